"""RMSNorm of whole rows, and the residual stream that it is taken of. X tokens · D hidden"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from domino_core.kernels.launch import LAUNCH, after_predecessor


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr):
    d = tl.arange(0, BD)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    x = tl.load(x_ptr + row + d, mask=d < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
    tl.store(out_ptr + row + d, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _add_norm(
    x_ptr,
    parts_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    X,
    D: tl.constexpr,
    BD: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    d = tl.arange(0, BD)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    first = tl.load(parts_ptr + row + d, mask=d < D, other=0.0)
    second = tl.load(parts_ptr + tl.cast(X, tl.int64) * D + row + d, mask=d < D, other=0.0)
    added = (first + second).to(x_ptr.dtype.element_ty).to(tl.float32)
    x = tl.load(x_ptr + row + d, mask=d < D, other=0.0).to(tl.float32) + added
    x = x.to(x_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + d, x, mask=d < D)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
    tl.store(out_ptr + row + d, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=d < D)


def add_norm(x_XD: Tensor, parts_2XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + both parts, [X, D]; its RMSNorm). The parts' sum is rounded before it is added, as torch does it."""
    sum_XD, out_XD = torch.empty_like(x_XD), torch.empty_like(x_XD)
    tokens, D = x_XD.shape
    BD = triton.next_power_of_2(D)
    _add_norm[(tokens,)](
        x_XD,
        parts_2XD,
        weight_D,
        sum_XD,
        out_XD,
        tokens,
        D=D,
        BD=BD,
        EPS=eps,
        num_warps=8 if BD > 1024 else 4,
        **LAUNCH,
    )
    return sum_XD, out_XD


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight of each row, in float32 until the end."""
    out_XD = torch.empty_like(x_XD)
    D = x_XD.shape[-1]
    BD = triton.next_power_of_2(D)
    _rms_norm[(x_XD.numel() // D,)](
        x_XD, weight_D, out_XD, D=D, BD=BD, EPS=eps, num_warps=8 if BD > 1024 else 4, **LAUNCH
    )
    return out_XD
