"""The teacher-forced pass with its mask equals drafting from the cache."""

import pytest
import torch

from domino_core import blocks
from domino_core.backbone import Backbone
from domino_core.block_attention import RowAttention
from domino_core.checkpoint import read_config
from domino_core.layers import KVCache
from tests.packing import one_block


@pytest.fixture
def backbone(reference_dir):
    torch.manual_seed(0)
    backbone = Backbone(read_config(reference_dir / "draft_shift1_p1"))
    for parameter in backbone.parameters():
        parameter.data.normal_(0.0, 0.3)
    return backbone.eval()


def cache_for(backbone, rows, length):
    config = backbone.config
    return KVCache.allocate(
        config.num_hidden_layers, rows, length, config.num_key_value_heads, config.head_dim, torch.float32
    )


def teacher_forced(backbone, embeds_BKD, features_BSC, starts):
    """One block per row at its start."""
    num_slots = embeds_BKD.shape[1]
    rows = one_block(torch.zeros(features_BSC.shape[:2], dtype=torch.long), features_BSC, starts)
    return backbone(
        embeds_BKD,
        backbone.project_context(rows.features_TC),
        blocks.block_positions(rows, num_slots),
        blocks.context_positions(rows),
        RowAttention(rows, num_slots),
    )


@pytest.mark.parametrize("starts", [[9, 9, 9], [4, 11, 7], [0, 12, 1]], ids=["equal", "mixed", "empty context"])
def test_cached_drafting_equals_the_training_mask(backbone, starts):
    config = backbone.config
    features = torch.randn(3, 12, config.feature_width)
    embeds = torch.randn(3, config.block_size, config.hidden_size)
    cache = cache_for(backbone, 3, 12 + config.block_size)
    with torch.inference_mode():
        expected = teacher_forced(backbone, embeds, features, starts)
        # Everything is written, also what a row does not count: it must be masked.
        backbone.extend_context(cache, backbone.project_context(features), torch.arange(12).expand(3, -1))
        got = backbone.draft(cache, embeds, torch.tensor(starts))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_context_in_pieces_with_padding_and_a_block_in_between(backbone):
    """As decoding does it: rows accept different numbers, blocks leave stale entries behind, padding is overwritten."""
    config = backbone.config
    features = torch.randn(2, 14, config.feature_width)
    cache = cache_for(backbone, 2, 14 + config.block_size)
    starts = torch.tensor([4, 6])
    with torch.inference_mode():
        context = backbone.project_context(features)
        backbone.extend_context(cache, context[:, :6], torch.arange(6).expand(2, -1))  # row 0: two of padding
        for fresh in ([3, 1], [1, 4]):
            embeds = torch.randn(2, config.block_size, config.hidden_size)
            got = backbone.draft(cache, embeds, starts)
            expected = teacher_forced(backbone, embeds, features, starts.tolist())
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
            positions = starts[:, None] + torch.arange(max(fresh))
            real = torch.arange(max(fresh)) < torch.tensor(fresh)[:, None]
            piece = context.gather(1, positions.clamp(max=13)[..., None].expand(-1, -1, config.hidden_size))
            garbage = torch.full_like(piece, 50.0)
            backbone.extend_context(cache, torch.where(real[..., None], piece, garbage), positions)
            starts = starts + torch.tensor(fresh)
        got = backbone.draft(cache, embeds, starts)
        expected = teacher_forced(backbone, embeds, features, starts.tolist())
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_a_block_sees_neither_its_anchor_s_feature_nor_later_ones(backbone):
    config = backbone.config
    features = torch.randn(1, 10, config.feature_width)
    embeds = torch.randn(1, config.block_size, config.hidden_size)
    with torch.inference_mode():
        before = teacher_forced(backbone, embeds, features, [6])
        for position in range(10):
            changed = features.clone()
            changed[:, position] = torch.randn(config.feature_width)
            same = torch.equal(teacher_forced(backbone, embeds, changed, [6]), before)
            assert same == (position >= 6)


def test_rows_do_not_see_each_other(backbone):
    config = backbone.config
    cache = cache_for(backbone, 3, 30)
    features = torch.randn(3, 9, config.feature_width)
    embeds = torch.randn(3, config.block_size, config.hidden_size)
    starts = torch.tensor([3, 9, 5])
    with torch.inference_mode():
        backbone.extend_context(cache, backbone.project_context(features), torch.arange(9).expand(3, -1))
        together = backbone.draft(cache, embeds, starts)
        for row in range(3):
            alone = cache_for(backbone, 1, 30)
            context = backbone.project_context(features[row : row + 1])
            backbone.extend_context(alone, context, torch.arange(9)[None])
            z = backbone.draft(alone, embeds[row : row + 1], starts[row : row + 1])
            torch.testing.assert_close(z[0], together[row], atol=2e-5, rtol=1e-4)


def test_context_that_does_not_fit_the_cache_is_caught(backbone):
    config = backbone.config
    cache = cache_for(backbone, 1, 10)
    embeds = torch.randn(1, config.block_size, config.hidden_size)
    with pytest.raises(AssertionError, match="the cache holds 10"):
        backbone.draft(cache, embeds, torch.tensor([3]))
