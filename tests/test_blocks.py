"""Index arithmetic against loops written slot by slot, from the paper's definitions."""

import json
import math
from dataclasses import replace

import pytest
import torch

from domino_core import blocks
from domino_core.block_attention import RowAttention
from domino_core.published_config import from_published

LENGTH = 14


@pytest.fixture(params=[True, False], ids=["shifted", "unshifted"])
def config(request, reference_dir):
    published = json.loads((reference_dir / "draft_shift1_p1" / "config.json").read_text())
    return replace(from_published(published), block_size=5, shift_label=request.param)


ANCHORS = [[3, 5, 12], [], [0, 10]]


@pytest.fixture
def texts():
    """Ids and masks of three rows: ids are positions (+ 100, + 200), masks have holes, and blocks overrun."""
    ids = [torch.arange(LENGTH), 100 + torch.arange(4), 200 + torch.arange(LENGTH)]
    masks = [torch.ones(len(row), dtype=torch.uint8) for row in ids]
    masks[0][:3] = 0
    masks[0][7] = 0
    masks[2][11:] = 0
    return ids, masks


@pytest.fixture
def rows(texts):
    ids, masks = texts
    lengths = [len(row) for row in ids]
    anchors = [torch.tensor(each, dtype=torch.long) for each in ANCHORS]
    return blocks.pack(torch.cat(ids), torch.cat(masks), torch.zeros(sum(lengths), 3), lengths, anchors)


PLACES = [(row, anchor) for row, anchors in enumerate(ANCHORS) for anchor in anchors]


def test_labels_weights_and_gru_inputs_slot_by_slot(config, texts, rows):
    labels, weights = blocks.labels_and_weights(rows, config, gamma=4.0)
    read = blocks.gru_inputs(rows, config)
    assert labels.shape == weights.shape == read.shape == (len(PLACES), config.num_drafts)
    for block, (row, anchor) in enumerate(PLACES):
        ids, mask = texts[0][row], texts[1][row]
        for slot in range(config.first_predicting_slot, config.block_size):
            draft = slot - config.first_predicting_slot
            position = anchor + slot + config.label_offset
            supervised = position < len(ids) and bool(mask[position])
            expected = math.exp(-draft / 4.0) if supervised else 0.0
            assert weights[block, draft].item() == pytest.approx(expected)
            if supervised:
                assert labels[block, draft] == ids[position]
                # The state's last token is the one before the label: nothing skipped, nothing leaked.
                assert read[block, draft] == ids[position - 1]
        assert read[block, 0] == ids[anchor]


def test_labels_past_the_end_of_their_row_weigh_nothing(config, rows):
    """The next row's tokens lie right behind: they are supervised, and not this block's."""
    every = replace(rows, loss_mask_T=torch.ones_like(rows.loss_mask_T))
    _, weights = blocks.labels_and_weights(every, config, math.inf)
    assert weights[2].tolist() == [1.0] + [0.0] * (config.num_drafts - 1)  # anchor 12 of 14 tokens


def test_block_inputs_and_positions(config, rows):
    mask = config.mask_token_id
    assert blocks.block_inputs(rows, config).tolist() == [[first] + [mask] * 4 for first in (3, 5, 12, 200, 210)]
    assert blocks.block_positions(rows, 5)[[1, 4]].tolist() == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert blocks.context_positions(rows).tolist() == [*range(LENGTH), *range(4), *range(LENGTH)]


def test_rows_that_do_not_fill_the_tokens_are_refused():
    ids, features = torch.zeros(5, dtype=torch.long), torch.zeros(5, 3)
    with pytest.raises(AssertionError, match="do not fill"):
        blocks.pack(ids, ids, features, [2, 2], [torch.tensor([0]), torch.tensor([0])])


def test_attention_equals_brute_force(rows):
    """Every slot by hand: keys of its row before its anchor, and of its own block."""
    torch.manual_seed(0)
    slots, heads, width = 5, 2, 4
    count, tokens = len(PLACES) * slots, len(rows.input_ids_T)
    q, k, v = (torch.randn(count, heads, width) for _ in range(3))
    ck, cv = (torch.randn(tokens, heads, width) for _ in range(2))
    got = RowAttention(rows, slots)(q, k, v, ck, cv)
    starts = [0, LENGTH, LENGTH + 4]
    for query in range(count):
        row, anchor = PLACES[query // slots]
        own = slice(query // slots * slots, (query // slots + 1) * slots)
        keys = torch.cat((ck[starts[row] : starts[row] + anchor], k[own]))
        values = torch.cat((cv[starts[row] : starts[row] + anchor], v[own]))
        for head in range(heads):
            shares = (keys[:, head] @ q[query, head] / width**0.5).softmax(0)
            torch.testing.assert_close(got[query, head], shares @ values[:, head])


def test_candidates_need_two_adjacent_supervised_tokens():
    candidates = blocks.anchor_candidates(torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1]))
    assert candidates.nonzero().flatten().tolist() == [1, 6, 7]
    assert not blocks.anchor_candidates(torch.tensor([1, 0, 1, 0, 0, 0, 0, 0, 1])).any()


@pytest.mark.parametrize(("supervised", "count"), [(slice(10, 40), 8), (slice(20, 24), 3), (slice(0, 0), 0)])
def test_sampled_anchors_are_ascending_candidates_without_repetition(supervised, count):
    loss_mask = torch.zeros(40, dtype=torch.uint8)
    loss_mask[supervised] = 1
    anchors = blocks.sample_anchors(loss_mask, 8, torch.Generator().manual_seed(3))
    assert anchors.dtype == torch.long
    assert len(anchors) == count
    assert anchors.tolist() == sorted(set(anchors.tolist()))
    assert blocks.anchor_candidates(loss_mask)[anchors].all()


def test_anchors_are_uniform_and_follow_the_generator():
    loss_mask = torch.ones(7, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(7)
    for _ in range(600):
        counts[blocks.sample_anchors(loss_mask, 2, generator)] += 1
    assert counts[6] == 0
    assert (counts[:6] / 600 - 1 / 3).abs().max() < 0.08  # 4 standard deviations
    again = [blocks.sample_anchors(loss_mask, 2, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*again)
