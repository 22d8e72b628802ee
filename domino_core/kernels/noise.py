"""sampling.gumbel_noise in one pass. X positions · V vocabulary"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from domino_core.kernels.launch import LAUNCH, after_predecessor


@triton.jit
def _mix(x):
    """sampling._mix."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(seed_ptr, position_ptr, out_ptr, V, STREAM: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr):
    after_predecessor(PDL)
    x = tl.program_id(0)
    golden: tl.constexpr = -0x61C8864680B583EB
    key = _mix(_mix(tl.load(seed_ptr + x) + golden) ^ (tl.load(position_ptr + x) * golden + (1 + STREAM)))
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    bits = (_mix(key + (v + 1).to(tl.int64) * golden) >> 12) & 0xFFFFFFFFFFFFF
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    noise = -tl.log(-tl.log(uniform))
    tl.store(out_ptr + x.to(tl.int64) * V + v, noise.to(tl.float32), mask=v < V)


def gumbel_noise(seed_X: Tensor, position_X: Tensor, vocabulary: int, stream: int) -> Tensor:
    """As sampling.gumbel_noise."""
    seed_X, position_X = (each.contiguous() for each in torch.broadcast_tensors(seed_X, position_X))
    out_XV = torch.empty(*position_X.shape, vocabulary, dtype=torch.float32, device=position_X.device)
    _gumbel[(position_X.numel(), triton.cdiv(vocabulary, 1024))](
        seed_X, position_X, out_XV, vocabulary, STREAM=stream, BV=1024, num_warps=4, **LAUNCH
    )
    return out_XV
