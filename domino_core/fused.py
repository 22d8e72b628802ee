"""Transformer blocks as decoding wants them: fused [in, out] matrices, static caches, one mask and rotation per pass.

Target and drafter decode on the same blocks, with the same care; what differs is what a token may see.

B rows · T tokens of this pass · X = B·T · M keys · D hidden · H, J query and key/value heads · d head width ·
N = H + 2J · E = H·d · I width of the MLP
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_core.layers import KVCache

OUTPUT_COPY_BYTES = 64 << 20

# Tokens per row from which on a pass takes in a prompt. Its shapes do not depend on how the text behind it is decoded,
# so there, and only there, its sums may take any order (kernels/).
LONG_PASS = 128

CHUNK_KEYS = 128  # of attention in shorter passes on a card, which keeps a partial result for each chunk


def matrix(first_OI: Tensor, *more_OI: Tensor) -> Tensor:
    """Stack [out, in] matrices and turn them to [in, out]."""
    stacked = torch.cat((first_OI, *more_OI)).t() if more_OI else first_OI.t()
    # On a CPU small products take up to 40 % longer from the transposed view; GPUs do not care.
    return stacked.contiguous() if stacked.device.type == "cpu" else stacked


def output_matrix(lm_head_VD: Tensor) -> Tensor:
    """The output matrix as [D, V]: on a CPU a second copy, if it is small."""
    size = lm_head_VD.numel() * lm_head_VD.element_size()
    return matrix(lm_head_VD) if size <= OUTPUT_COPY_BYTES else lm_head_VD.t()


def on_card(tensor: Tensor) -> bool:
    """Whether domino_core.kernels does the work: bfloat16 on a CUDA device. The rest is done as written here."""
    return tensor.is_cuda and tensor.dtype == torch.bfloat16


def product(x: Tensor, matrix_IO: Tensor, *, any_order: bool = False) -> Tensor:
    """[..., I] · [I, O] → [..., O]. any_order: see kernels/linear.py."""
    if on_card(x):
        from domino_core.kernels.linear import linear

        return linear(x.reshape(-1, x.shape[-1]), matrix_IO.t(), any_order=any_order).view(*x.shape[:-1], -1)
    return x.matmul(matrix_IO)


class Norm:
    """RMSNorm over the last axis; a weight of two axes holds one per head."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight.detach(), eps
        self.shape = weight.shape[-1:]
        # x·w·√D / hypot(‖x‖, √(D·ε)) is the same number in 4 kernels, where rms_norm takes 11 (float32 on a CPU).
        self.split = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.scaled = self.weight * self.shape[0] ** 0.5
        self.floor = torch.tensor((self.shape[0] * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self.split:
            return (x * self.scaled).div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor))
        if on_card(x) and self.weight.dim() == 1:
            from domino_core.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        if self.weight.dim() == 1:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.rms_norm(x, self.shape, None, self.eps) * self.weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One pre-norm block. Matrices are [in, out]: qkv [D, N·d], gate_up [D, 2I]; qk_norm has H+J rows, or is None."""

    input_norm: Norm
    qkv: Tensor
    qk_norm: Norm | None
    out: Tensor
    mlp_norm: Norm
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Where the tokens of one pass lie and what they see: the same for all layers."""

    shape: tuple[int, int]
    cos_X1d: Tensor
    sin_X1d: Tensor
    mask_B1TM: Tensor | None
    """Additive; None: everything is visible."""
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    """Per layer, [B, J, M, d] views of the cache, the new tokens included."""
    cache: KVCache
    positions_BT: Tensor
    new_keys: tuple[Tensor, ...]
    new_values: tuple[Tensor, ...]
    """Per layer, [T, J, d] views to write to, if the pass has one row; else empty."""

    @classmethod
    def at(cls, cache: KVCache, positions_BT: Tensor, num_keys: int, rotary: Tensor, causal: bool) -> "Span":
        """As run_blocks has it."""
        B, T = positions_BT.shape
        # A lone row sees all of its keys, unless its own later tokens are hidden; other rows end earlier than the last.
        visible_BTM = None
        if B > 1 or (causal and T > 1):
            last_BT = positions_BT if causal else positions_BT[:, -1:]
            visible_BTM = torch.arange(num_keys, device=rotary.device) <= last_BT[..., None]
        mask_B1TM = None
        if visible_BTM is not None:  # attention would turn a bool mask into this one in every layer
            mask_BTM = torch.zeros(visible_BTM.shape, dtype=rotary.dtype, device=rotary.device)
            mask_B1TM = mask_BTM.masked_fill_(~visible_BTM, -torch.inf)[:, None]
        new = slice(num_keys - T, num_keys)  # a lone row's tokens lie together: views, where others gather and scatter
        cos_X1d, sin_X1d = (rotary[:, new] if B == 1 else rotary[:, positions_BT.flatten()]).unbind(0)
        return cls(
            shape=(B, T),
            cos_X1d=cos_X1d,
            sin_X1d=sin_X1d,
            mask_B1TM=mask_B1TM,
            keys=cache.k[:, :, :num_keys].transpose(2, 3).unbind(0),
            values=cache.v[:, :, :num_keys].transpose(2, 3).unbind(0),
            cache=cache,
            positions_BT=positions_BT,
            new_keys=cache.k[:, 0, new].unbind(0) if B == 1 else (),
            new_values=cache.v[:, 0, new].unbind(0) if B == 1 else (),
        )

    def write(self, layer: int, k_XJd: Tensor, v_XJd: Tensor) -> None:
        if self.new_keys:
            self.new_keys[layer].copy_(k_XJd)
            self.new_values[layer].copy_(v_XJd)
        else:
            shape = (*self.shape, *k_XJd.shape[1:])
            self.cache.write(layer, k_XJd.view(shape), v_XJd.view(shape), self.positions_BT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Blocks, and the norm behind the last."""

    blocks: Sequence[Block]
    norm: Norm


def run_blocks(
    stack: Stack,
    x_XD: Tensor,
    cache: KVCache,
    start_B: Tensor,
    num_keys: int,
    *,
    causal: bool,
    tap_layers: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """The last norm of the residual stream [X, D] behind all blocks, and the stream itself after each of `tap_layers`.

    Fills the tokens' cache entries.

    x holds the same number of tokens T for each row, at positions start..start+T-1 of its text. Token t sees the row's
    keys 0..start+t if `causal`, else all of 0..start+T-1. num_keys: no start + T exceeds it; without the kernels, a
    lone row's start + T is it exactly, since its tokens are then views of the cache.
    """
    rotary = cache.rotary
    assert rotary is not None
    assert num_keys <= min(cache.length, rotary.shape[1]), f"{num_keys} tokens in a cache of {cache.length}"
    if on_card(x_XD):
        from domino_core.kernels import blocks as kernels

        return kernels.run_blocks(stack, x_XD, cache, start_B, num_keys, causal=causal, tap_layers=tap_layers)
    num_kv_heads = cache.k.shape[3]
    positions_BT = start_B[:, None] + torch.arange(x_XD.shape[0] // len(start_B), device=start_B.device)
    span = Span.at(cache, positions_BT, num_keys, rotary, causal)
    taps: list[Tensor] = []
    for index, block in enumerate(stack.blocks):
        attended_XE = _attention(index, block, block.input_norm(x_XD), span, num_kv_heads)
        x_XD = torch.addmm(x_XD, attended_XE, block.out)
        gate_XI, up_XI = block.mlp_norm(x_XD).mm(block.gate_up).chunk(2, -1)
        x_XD = torch.addmm(x_XD, F.silu(gate_XI).mul_(up_XI), block.down)
        if index in tap_layers:
            taps.append(x_XD)
    return stack.norm(x_XD), taps


def _attention(index: int, block: Block, x_XD: Tensor, span: Span, num_kv_heads: int) -> Tensor:
    """What lies between the first norm and the output projection, [X, H·d]."""
    d = span.cos_X1d.shape[-1]
    qkv_XNd = x_XD.mm(block.qkv).view(x_XD.shape[0], -1, d)
    qk_XNd, v_XJd = qkv_XNd[:, :-num_kv_heads], qkv_XNd[:, -num_kv_heads:]
    if block.qk_norm is not None:
        qk_XNd = block.qk_norm(qk_XNd)
    qk_XNd = rotate(qk_XNd, span.cos_X1d, span.sin_X1d)
    q_XHd, k_XJd = qk_XNd[:, :-num_kv_heads], qk_XNd[:, -num_kv_heads:]
    span.write(index, k_XJd, v_XJd)
    B, T = span.shape
    # One token: the heads that share keys become queries of one head, and the keys are read once.
    q_BHTd = q_XHd.view(B, num_kv_heads, -1, d) if T == 1 else q_XHd.view(B, T, -1, d).transpose(1, 2)
    attended_BHTd = F.scaled_dot_product_attention(
        q_BHTd, span.keys[index], span.values[index], attn_mask=span.mask_B1TM, enable_gqa=T > 1
    )
    return attended_BHTd.reshape(B, -1) if T == 1 else attended_BHTd.transpose(1, 2).reshape(B * T, -1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding of [..., d]: x·cos + rotate_half(x)·sin, the sign of rotate_half being in the table."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def rotary_table(frequency: Tensor, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[2, length, 1, d]: cos, and sin signed as rotate-half signs it, of positions 0..length-1; frequency: [d/2]."""
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
    return table[:, :, None].to(device, dtype)


def rotary_frequency(head_dim: int, theta: float) -> Tensor:
    """Radians per position of each pair of a head's dimensions, [d/2], float32."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
