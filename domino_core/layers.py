"""The pieces that target and drafter share: RMSNorm, rotary embedding, SwiGLU, grouped-query attention, the KV cache.

B rows · T tokens of this pass · M cache length · D hidden · H query heads · J key/value heads · d head width · L layers
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:
            # Forward and backward over 2,048 rows of 192 take three quarters of the time of F.rms_norm.
            mean_square = torch.linalg.vecdot(x, x)[..., None] / x.shape[-1]
            return x * torch.rsqrt(mean_square + self.eps) * self.weight
        # The weight is float32 under autocast while x may be bfloat16; the kernel wants one type.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


Rotary = tuple[Tensor, Tensor]
"""cos, and sin with the sign of its term (minus in the lower half), float32, [B, T, 1, d]."""


def rotary_cos_sin(positions_BT: Tensor, head_dim: int, theta: float) -> Rotary:
    """Angles of rotary position embedding for absolute positions; float32 whatever the model's type."""
    frequencies_d = _signed_frequencies(head_dim, theta, positions_BT.device)
    angles_BT1d = positions_BT[..., None, None] * frequencies_d
    return angles_BT1d.cos(), angles_BT1d.sin()


def apply_rotary(x_BTHd: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair (i, i + d/2) of every head by its position's angle."""
    cos, signed_sin = rotary
    swapped_BTHd = x_BTHd.roll(x_BTHd.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHd * cos, swapped_BTHd, signed_sin).to(x_BTHd.dtype)


@functools.cache
def _signed_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """[d]: the frequencies of all pairs, negative and then positive: cos does not notice, sin takes the sign."""
    with torch.inference_mode(False):  # kept for training as well, whoever asks first
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        frequencies = 1.0 / theta**exponents
        return torch.cat((-frequencies, frequencies))


def attend(q_BTHd: Tensor, k_BMJd: Tensor, v_BMJd: Tensor, mask_BTM: Tensor | None) -> Tensor:
    """Softmax attention, scale d^-1/2, grouped queries (H a multiple of J). mask: bool, true = visible, [B, T or 1, M].

    Every query must see at least one key: a row without any is NaN, and its NaN reaches every gradient as 0 · NaN.
    """
    mask = None if mask_BTM is None else mask_BTM[:, None]
    out_BHTd = F.scaled_dot_product_attention(
        q_BTHd.transpose(1, 2), k_BMJd.transpose(1, 2), v_BMJd.transpose(1, 2), attn_mask=mask, enable_gqa=True
    )
    return out_BHTd.transpose(1, 2)


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, [L, B, M, J, d]. It does not know how much of it is filled.

    How many entries of a row count is the decode state's business: rejecting tokens is a smaller number there, nothing
    moves here. Entries at and behind it are stale: readers mask them, later writes replace them.
    """

    k: Tensor
    v: Tensor
    row_index_B1: Tensor
    rotary: Tensor | None = None
    """[2, length, 1, d]: cos and signed sin of the positions, where passes read them from a table. It is here so that a
    CUDA graph, which keeps addresses, and the table live as long as each other."""

    @classmethod
    def allocate(
        cls,
        layers: int,
        rows: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "KVCache":
        # Zeros, not empty: uninitialised memory may hold NaN, and a masked NaN still poisons through 0 · NaN.
        k = torch.zeros(layers, rows, length, kv_heads, head_dim, dtype=dtype, device=device)
        return cls(k, torch.zeros_like(k), torch.arange(rows, device=device)[:, None])

    @property
    def num_rows(self) -> int:
        return self.k.shape[1]

    @property
    def length(self) -> int:
        """M, entries a row can hold."""
        return self.k.shape[2]

    def view(self, num_rows: int) -> "KVCache":
        """The first rows, sharing storage."""
        return KVCache(self.k[:, :num_rows], self.v[:, :num_rows], self.row_index_B1[:num_rows], self.rotary)

    def row(self, index: int) -> "KVCache":
        """One row alone, sharing storage."""
        return KVCache(self.k[:, index : index + 1], self.v[:, index : index + 1], self.row_index_B1[:1], self.rotary)

    def write(self, layer: int, k_BTJd: Tensor, v_BTJd: Tensor, positions_BT: Tensor) -> None:
        """Put the entries of one layer at their positions (different for every row); in place."""
        where = (self.row_index_B1, positions_BT)
        self.k[layer].index_put_(where, k_BTJd.to(self.k.dtype))
        self.v[layer].index_put_(where, v_BTJd.to(self.v.dtype))

    def move_row(self, src: int, dst: int, length: int) -> None:
        """Copy the first `length` entries of row src over row dst."""
        self.k[:, dst, :length] = self.k[:, src, :length]
        self.v[:, dst, :length] = self.v[:, src, :length]
