"""fused.run_blocks for a card: the same blocks, nine kernels each. X tokens · D hidden · J key/value heads"""

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_core.fused import LONG_PASS, Stack
from domino_core.kernels.attention import attend, norm_rotate_store
from domino_core.kernels.linear import linear, linear_parts
from domino_core.kernels.norm import add_norm, rms_norm
from domino_core.layers import KVCache


def run_blocks(
    stack: Stack,
    x_XD: Tensor,
    cache: KVCache,
    start_B: Tensor,
    num_keys: int,
    *,
    causal: bool,
    tap_layers: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """As fused.run_blocks."""
    taps: list[Tensor] = []
    blocks, num_tokens = stack.blocks, x_XD.shape[0] // len(start_B)
    positions_BT = start_B[:, None] + torch.arange(num_tokens, device=start_B.device)
    assert cache.rotary is not None
    turns_2Xd = cache.rotary[:, positions_BT.flatten(), 0]
    prompt = num_tokens >= LONG_PASS
    norms = [*[block.input_norm for block in blocks[1:]], stack.norm]
    normed_XD = rms_norm(x_XD, blocks[0].input_norm.weight, blocks[0].input_norm.eps)
    for index, (block, next_norm) in enumerate(zip(blocks, norms, strict=True)):
        weight, eps = (None, 0.0) if block.qk_norm is None else (block.qk_norm.weight, block.qk_norm.eps)
        layer = slice(index, index + 1)
        q_XHd = norm_rotate_store(
            linear(normed_XD, block.qkv.t(), any_order=prompt),
            weight,
            eps,
            turns_2Xd,
            positions_BT,
            cache.k[layer],
            cache.v[layer],
        )
        attended_XE = attend(q_XHd, cache.k[index], cache.v[index], start_B, num_tokens, num_keys, causal)
        parts_2XD = linear_parts(attended_XE, block.out.t(), any_order=prompt)
        x_XD, normed_XD = add_norm(x_XD, parts_2XD, block.mlp_norm.weight, block.mlp_norm.eps)
        active_XI = linear(normed_XD, block.gate_up.t(), is_gated=True, any_order=prompt)
        parts_2XD = linear_parts(active_XI, block.down.t(), any_order=prompt)
        x_XD, normed_XD = add_norm(x_XD, parts_2XD, next_norm.weight, next_norm.eps)
        if index in tap_layers:
            taps.append(x_XD)
    return normed_XD, taps
