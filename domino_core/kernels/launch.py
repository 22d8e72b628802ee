"""How our kernels follow one another: each may start before the one before it ends, and waits only for its results.

Weights depend on no kernel, so a program asks the cache for its first ones while it waits. Without this, every kernel
boundary would leave the memory idle for some microseconds, about 350 times a pass (programmatic dependent launch).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# These modules are imported on a CUDA device alone, at the first pass. Cards before Hopper have no such launches.
LAUNCH = {"PDL": True, "launch_pdl": True} if torch.cuda.get_device_capability() >= (9, 0) else {"PDL": False}
"""Keyword arguments of every launch."""


@triton.jit
def after_predecessor(PDL: tl.constexpr):
    """Let the next kernel start, and wait until all before this one have ended. To be called by every program, first:
    nothing that a kernel wrote may be read, nor anything that one may still read be overwritten, before it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_rows(w_ptr, n0, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask the cache for the first COLUMNS (a power of two, or 0) of rows n0.. of a matrix [N, K]."""
    if COLUMNS >= 64:
        WIDTH: tl.constexpr = COLUMNS // 64  # lines of 128 bytes
        n = n0 + tl.arange(0, ROWS)[:, None]
        n = tl.minimum(n, N - 1).to(tl.int64)
        address = (w_ptr + n * K + tl.arange(0, WIDTH)[None, :] * 64).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )
