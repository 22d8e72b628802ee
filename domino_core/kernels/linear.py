"""Products of some tokens with a large matrix, at the speed of reading the matrix.

An output element is one float32 sum over the inner dimension in ascending order, whatever the tile that computes it. So
a token's result is the same bits in every batch: what makes bfloat16 decoding give the same text with and without
drafts (docs/exactness.md).

X tokens · N outputs · K inner dimension
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from domino_core.kernels.launch import LAUNCH, after_predecessor, prefetch_rows

SMALL = 32  # tokens up to which our tiles are the faster ones


@triton.jit
def gated(gate, up):
    """silu(gate) · up, rounded where torch rounds: both products, then the activation."""
    gate = gate.to(tl.bfloat16).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16)
    return active.to(tl.float32) * up.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _linear(
    x_desc,
    w_desc,
    w_ptr,
    out_ptr,
    X,
    N: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    BX: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    GATED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    x0 = tl.program_id(0) * BX
    n0 = tl.program_id(1) * BN
    first = tl.program_id(2) * PART
    if PDL:
        prefetch_rows(w_ptr + first, n0, N, K, BN, PREFETCH)
        if GATED:
            prefetch_rows(w_ptr + N * K, n0, N, K, BN, PREFETCH)
    after_predecessor(PDL)
    # The matrix unit wants 64 rows of its first operand: the weights, if tokens are few.
    shape: tl.constexpr = [BN, BX] if WEIGHTS_FIRST else [BX, BN]
    acc = tl.zeros(shape, tl.float32)
    up = tl.zeros(shape, tl.float32)
    for k in tl.range(first, tl.minimum(first + PART, K), BK, num_stages=STAGES):
        w = w_desc.load([n0, k])
        x = x_desc.load([x0, k])
        acc = tl.dot(w, x.T, acc) if WEIGHTS_FIRST else tl.dot(x, w.T, acc)
        if GATED:
            w = w_desc.load([N + n0, k])
            up = tl.dot(w, x.T, up) if WEIGHTS_FIRST else tl.dot(x, w.T, up)
    if GATED:
        acc = gated(acc, up)
    if WEIGHTS_FIRST:
        acc = acc.T
    x = x0 + tl.arange(0, BX)[:, None]
    n = n0 + tl.arange(0, BN)[None, :]
    place = out_ptr + (tl.program_id(2) * X + x).to(tl.int64) * N + n
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(x < X) & (n < N))


@triton.jit
def _gated_product(pair_ptr, out_ptr, N, BN: tl.constexpr, PDL: tl.constexpr):
    after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    gate = tl.load(pair_ptr + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(pair_ptr + row * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, gated(gate, up).to(out_ptr.dtype.element_ty), mask=n < N)


def _tile(tokens: int, inner: int, is_gated: bool) -> dict[str, Any]:
    """The tile for a shape, as measured on an H100."""
    if tokens <= SMALL:
        return {
            "BX": max(16, triton.next_power_of_2(tokens)),
            "BN": 64,
            "BK": 128 if is_gated else 256,
            "STAGES": 4 if is_gated else 3,
            "WEIGHTS_FIRST": True,
            "PREFETCH": min(256, 1 << (inner.bit_length() - 1)),
        }
    return {
        "BX": 64,
        "BN": 64 if is_gated else 128,
        "BK": 64,
        "STAGES": 4,
        "WEIGHTS_FIRST": not is_gated,
        "PREFETCH": 0,
    }


def linear(x_XK: Tensor, weight_NK: Tensor, *, is_gated: bool = False, any_order: bool = False) -> Tensor:
    """x · weightᵀ, [X, N]. is_gated: weight stacks [gate; up], [2N, K], and silu(gate) · up is returned.

    Products are rounded before they are gated, as torch does it: many tokens go to its library, where that gives the
    same bits. any_order: they go there anyway; for prompts, whose chunks are the same however they are decoded.
    """
    if x_XK.shape[0] > SMALL and (any_order or _library_agrees(x_XK, weight_NK, split=False)):
        out_XN = F.linear(x_XK, weight_NK)
        return _gate(out_XN) if is_gated else out_XN
    return _by_tiles(x_XK, weight_NK, is_gated=is_gated)


def linear_parts(x_XK: Tensor, weight_NK: Tensor, *, any_order: bool = False) -> Tensor:
    """x · weightᵀ as two float32 sums over parts of the inner dimension, [2, X, N]; norm.add_norm adds them.

    Two parts keep a card busy where the outputs are few. Always two, so that the result does not depend on the batch.
    """
    if x_XK.shape[0] > SMALL and (any_order or _library_agrees(x_XK, weight_NK, split=True)):
        return _library_parts(x_XK, weight_NK)
    return _by_tiles(x_XK, weight_NK, split=True)


def part_length(inner: int) -> int:
    """Where the second part begins: half of the inner dimension, rounded up to whole tiles."""
    return triton.cdiv(inner, 512) * 256


def _by_tiles(x_XK: Tensor, weight_NK: Tensor, *, is_gated: bool = False, split: bool = False) -> Tensor:
    tokens, inner = x_XK.shape
    outputs = weight_NK.shape[0] // 2 if is_gated else weight_NK.shape[0]
    tile = _tile(tokens, inner, is_gated)
    shape = (2, tokens, outputs) if split else (tokens, outputs)
    out = torch.empty(shape, dtype=torch.float32 if split else x_XK.dtype, device=x_XK.device)
    _linear[(triton.cdiv(tokens, tile["BX"]), triton.cdiv(outputs, tile["BN"]), 2 if split else 1)](
        TensorDescriptor.from_tensor(x_XK, [tile["BX"], tile["BK"]]),
        TensorDescriptor.from_tensor(weight_NK, [tile["BN"], tile["BK"]]),
        weight_NK,
        out,
        tokens,
        outputs,
        inner,
        PART=part_length(inner) if split else inner,
        GATED=is_gated,
        num_warps=4,
        **tile,
        **LAUNCH,
    )
    return out


def _library_parts(x_XK: Tensor, weight_NK: Tensor) -> Tensor:
    half = part_length(x_XK.shape[1])
    out_2XN = torch.empty(2, x_XK.shape[0], weight_NK.shape[0], dtype=torch.float32, device=x_XK.device)
    for part, columns in zip(out_2XN, (slice(0, half), slice(half, None)), strict=True):
        torch.mm(x_XK[:, columns], weight_NK[:, columns].t(), out_dtype=torch.float32, out=part)
    return out_2XN


def _gate(pair_XN: Tensor) -> Tensor:
    tokens, outputs = pair_XN.shape[0], pair_XN.shape[1] // 2
    out_XN = torch.empty(tokens, outputs, dtype=pair_XN.dtype, device=pair_XN.device)
    _gated_product[(tokens, triton.cdiv(outputs, 1024))](pair_XN, out_XN, outputs, BN=1024, num_warps=4, **LAUNCH)
    return out_XN


_agreement: dict[tuple[int, ...], bool] = {}


def _library_agrees(x_XK: Tensor, weight_NK: Tensor, *, split: bool) -> bool:
    """Whether torch's product of this shape is the same bits as ours. It is, unless it splits the inner dimension more.

    Found out once per shape, by trying; that waits for the device, so it happens before a graph is captured.
    """
    shape = (x_XK.shape[0], *weight_NK.shape, *weight_NK.stride(), split, weight_NK.get_device())
    if shape not in _agreement:
        assert not torch.cuda.is_current_stream_capturing(), f"a graph is captured before its shapes {shape} were tried"
        x_XK = torch.randn(x_XK.shape, device=weight_NK.device).to(weight_NK.dtype)
        theirs = _library_parts(x_XK, weight_NK) if split else F.linear(x_XK, weight_NK)[None]
        slices = [_by_tiles(few_XK, weight_NK, split=split) for few_XK in x_XK.split(SMALL)]
        ours = torch.cat([each.view(-1, *each.shape[-2:]) for each in slices], dim=1)
        _agreement[shape] = torch.equal(theirs, ours)
    return _agreement[shape]
