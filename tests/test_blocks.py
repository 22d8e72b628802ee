"""Index arithmetic against loops written slot by slot, from the paper's definitions."""

import json
import math
from dataclasses import replace

import pytest
import torch

from domino_core import blocks
from domino_core.config import DrafterConfig

LENGTH = 14


@pytest.fixture(params=[True, False], ids=["shifted", "unshifted"])
def config(request, reference_dir):
    published = json.loads((reference_dir / "draft_shift1_p1" / "config.json").read_text())
    return replace(DrafterConfig.from_dict(published), block_size=5, shift_label=request.param)


@pytest.fixture
def batch():
    """Ids that are their own positions (row 1: + 100), a mask with holes, blocks that overrun, and a dropped one."""
    input_ids = torch.stack((torch.arange(LENGTH), 100 + torch.arange(LENGTH)))
    loss_mask = torch.ones(2, LENGTH, dtype=torch.uint8)
    loss_mask[0, :3] = 0
    loss_mask[0, 7] = 0
    loss_mask[1, 11:] = 0
    anchors = torch.tensor([[3, 5, 12], [0, 10, 6]])
    keep = torch.tensor([[True, True, True], [True, True, False]])
    return input_ids, loss_mask, anchors, keep


def test_labels_weights_and_gru_inputs_slot_by_slot(config, batch):
    input_ids, loss_mask, anchors, keep = batch
    labels, weights = blocks.labels_and_weights(input_ids, loss_mask, anchors, keep, config, gamma=4.0)
    read = blocks.gru_inputs(input_ids, anchors, config)
    assert labels.shape == weights.shape == read.shape == (2, 3, config.num_drafts)
    for row in range(2):
        for block in range(3):
            anchor = int(anchors[row, block])
            for slot in range(config.first_predicting_slot, config.block_size):
                draft = slot - config.first_predicting_slot
                position = anchor + slot + config.label_offset
                supervised = position < LENGTH and bool(loss_mask[row, position]) and bool(keep[row, block])
                expected = math.exp(-draft / 4.0) if supervised else 0.0
                assert weights[row, block, draft].item() == pytest.approx(expected)
                if supervised:
                    assert labels[row, block, draft] == input_ids[row, position]
                    # The state's last token is the one before the label: nothing skipped, nothing leaked.
                    assert read[row, block, draft] == input_ids[row, position - 1]
            assert read[row, block, 0] == input_ids[row, anchor]


def test_labels_past_the_end_weigh_nothing(config, batch):
    input_ids, loss_mask, anchors, keep = batch
    _, weights = blocks.labels_and_weights(input_ids, torch.ones_like(loss_mask), anchors, keep, config, math.inf)
    assert weights[0, 2].tolist() == [1.0] + [0.0] * (config.num_drafts - 1)  # anchor 12 of 14 tokens


def test_block_inputs_and_positions(config, batch):
    input_ids, _, anchors, keep = batch
    ids = blocks.block_inputs(input_ids, anchors, keep, config)
    mask = config.mask_token_id
    assert ids[0, 1].tolist() == [5] + [mask] * 4
    assert ids[1, 1].tolist() == [110] + [mask] * 4
    assert ids[1, 2].tolist() == [mask] * 5
    positions = blocks.block_positions(anchors, 5)
    assert positions[0].tolist() == [3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16]


def test_attention_mask_equals_brute_force(batch):
    _, _, anchors, keep = batch
    slots, mask = 5, blocks.attention_mask(anchors, keep, LENGTH, 5)
    assert mask.shape == (2, 3 * slots, LENGTH + 3 * slots)
    for row in range(2):
        for query in range(3 * slots):
            own = query // slots
            for key in range(LENGTH + 3 * slots):
                if key < LENGTH:
                    visible = bool(keep[row, own]) and key < int(anchors[row, own])
                else:
                    visible = (key - LENGTH) // slots == own
                assert bool(mask[row, query, key]) == visible
    assert mask.any(-1).all()  # a query that sees nothing is NaN


def test_candidates_need_two_adjacent_supervised_tokens():
    loss_mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0, 0, 1]])
    candidates = blocks.anchor_candidates(loss_mask)
    assert candidates[0].nonzero().flatten().tolist() == [1, 6, 7]
    assert not candidates[1].any()


def test_sampled_anchors_are_ascending_candidates_without_repetition():
    loss_mask = torch.zeros(3, 40, dtype=torch.uint8)
    loss_mask[0, 10:] = 1
    loss_mask[1, 20:24] = 1
    anchors, keep = blocks.sample_anchors(loss_mask, 8, torch.Generator().manual_seed(3))
    assert anchors.shape == keep.shape == (3, 8)
    candidates = blocks.anchor_candidates(loss_mask)
    for row, count in enumerate((8, 3, 0)):
        assert keep[row].tolist() == [True] * count + [False] * (8 - count)
        kept = anchors[row][keep[row]].tolist()
        assert kept == sorted(set(kept))
        assert candidates[row][kept].all()
        assert (anchors[row][~keep[row]] == 0).all()


def test_a_batch_without_candidates_is_dropped_blocks():
    anchors, keep = blocks.sample_anchors(torch.zeros(2, 9, dtype=torch.uint8), 4, torch.Generator())
    assert anchors.shape == (2, 1)
    assert not keep.any()


def test_anchors_are_uniform_and_follow_the_generator():
    loss_mask = torch.ones(1, 7, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(7)
    for _ in range(600):
        anchors, _ = blocks.sample_anchors(loss_mask, 2, generator)
        counts[anchors[0]] += 1
    assert counts[6] == 0
    assert (counts[:6] / 600 - 1 / 3).abs().max() < 0.08  # 4 standard deviations
    again = [blocks.sample_anchors(loss_mask, 2, torch.Generator().manual_seed(5))[0] for _ in range(2)]
    assert torch.equal(*again)
