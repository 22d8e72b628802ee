"""Shared pieces against transformers' or a plain-loop version, and the cache's bookkeeping."""

import math

import pytest
import torch

from domino_core.layers import KVCache, RMSNorm, SwiGLU, apply_rotary, attend, rotary_cos_sin


def test_norm_mlp_and_rotary_equal_transformers():
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    torch.manual_seed(0)
    x = torch.randn(2, 5, 24)
    config = Qwen3Config(
        hidden_size=24, intermediate_size=40, head_dim=8, num_attention_heads=3, max_position_embeddings=64
    )

    norm, theirs = RMSNorm(24, 1e-6), qwen3.Qwen3RMSNorm(24, 1e-6)
    norm.weight.data.uniform_(0.5, 2)
    theirs.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(x), theirs(x))

    mlp, theirs = SwiGLU(24, 40), qwen3.Qwen3MLP(config)
    theirs.load_state_dict(mlp.state_dict())
    torch.testing.assert_close(mlp(x), theirs(x))

    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 30, 31, 60]])
    theta = 10000.0
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    q = torch.randn(2, 5, 3, 8)
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(q, positions)
    expected, _ = qwen3.apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    torch.testing.assert_close(apply_rotary(q, rotary_cos_sin(positions, 8, theta)), expected.transpose(1, 2))


def test_norm_takes_bfloat16_with_float32_weight():
    norm = RMSNorm(8, 1e-6)
    x = torch.randn(3, 8)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x.bfloat16()).float(), norm(x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_attend_equals_a_loop_over_heads(heads, kv_heads, masked):
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 3, heads, 8), torch.randn(2, 7, kv_heads, 8), torch.randn(2, 7, kv_heads, 8)
    mask = torch.rand(2, 3, 7) < 0.5
    mask[..., 2] = True
    out = attend(q, k, v, mask if masked else None)
    for head in range(heads):
        of = head // (heads // kv_heads)
        scores = q[:, :, head] @ k[:, :, of].transpose(1, 2) / math.sqrt(8)
        if masked:
            scores = scores.masked_fill(~mask, -math.inf)
        torch.testing.assert_close(out[:, :, head], scores.softmax(-1) @ v[:, :, of])


def test_attend_broadcasts_a_mask_over_queries():
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    mask = torch.arange(7) < torch.tensor([[4], [6]])
    torch.testing.assert_close(attend(q, k, v, mask[:, None]), attend(q, k, v, mask[:, None].expand(2, 3, 7)))


def test_cache_writes_rows_at_their_own_positions_and_shares_storage_with_views():
    cache = KVCache.allocate(2, 3, 10, 1, 4, torch.float32)
    assert (cache.num_rows, cache.length) == (3, 10)
    k, v = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4)
    cache.view(2).write(1, k, v, torch.tensor([[0, 1], [6, 7]]))
    torch.testing.assert_close(cache.k[1, 0, :2], k[0])
    torch.testing.assert_close(cache.v[1, 1, 6:8], v[1])
    assert not cache.k[0].any()
    assert not cache.k[1, 2].any()
    assert cache.k[1].count_nonzero() == k.numel()

    cache.move_row(1, 2, 7)
    torch.testing.assert_close(cache.k[1, 2, 6], k[1, 0])
    assert not cache.k[1, 2, 7:].any()
    torch.testing.assert_close(cache.v[:, 2, :7], cache.v[:, 1, :7])


def test_a_new_cache_holds_no_nan():
    cache = KVCache.allocate(1, 2, 4, 1, 4, torch.bfloat16)
    assert not cache.k.any()
    assert not cache.v.any()
