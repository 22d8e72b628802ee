"""The formula of a training step's operations against PyTorch's own counter on the slow twin."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from domino_core import blocks
from domino_core.block_attention import RowAttention
from domino_core.blocks import pack
from domino_core.drafter import Drafter
from domino_core.losses import Drafts, whole_losses
from jobs.bench import main
from pipelines.bench_shapes import SHAPES
from pipelines.training_work import num_parameters, training_work

LENGTHS, ANCHORS = [40, 25], [[3, 9, 20], [5, 11]]


@pytest.fixture(params=[True, False], ids=["head", "no head"])
def drafter(request):
    config = replace(SHAPES["tiny"].drafter, num_hidden_layers=2, head=request.param, block_size=4)
    torch.manual_seed(0)
    return Drafter(config, torch.randn(128, 32), torch.randn(128, 32))


@pytest.fixture
def rows(drafter):
    count = sum(LENGTHS)
    features = torch.randn(count, drafter.config.feature_width)
    return pack(torch.randint(100, (count,)), torch.ones(count), features, LENGTHS, [torch.tensor(a) for a in ANCHORS])


def counted(drafter, rows) -> dict[str, int]:
    """Operations by kind, forward and backward, all logits at once."""
    z = drafter.predicting
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        z_XQD = z(drafter.block_hidden(rows, RowAttention(rows, drafter.config.block_size)))
        labels_XQ, weights_XQ = blocks.labels_and_weights(rows, drafter.config, 4.0)
        low_XQR = drafter.low_rank(z_XQD, blocks.gru_inputs(rows, drafter.config))
        last_VR = None if drafter.head is None else drafter.head.last_weight
        tensors = {"low_XQR": low_XQR, "lm_head_VD": drafter.lm_head_VD, "last_VR": last_VR}
        drafts = Drafts(z_XQD=z_XQD, labels_XQ=labels_XQ, weights_XQ=weights_XQ, **tensors)
        whole_losses(drafts, 0.5).mixed_sum.backward()
    found = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for name, count in found.items() if "attention" in name or "bmm" in name)
    return {"attention": attention, "matrices": sum(found.values()) - attention}


def test_matrices_are_counted_as_pytorch_counts_them(drafter, rows):
    work, config = training_work(drafter.config, rows), drafter.config
    # Drafts that are not corrected pass through W2 as zeros; the formula does not count them.
    uncorrected = 3 * 2 * len(rows.anchors_X) * config.pure_draft_prefix_len * config.emb_dim * config.vocab_size
    expected = work.operations - work.attention + (uncorrected if config.head else 0)
    # The first state of a GRU is zero, and its product gives the input no gradient.
    first_state = 2 * len(rows.anchors_X) * 3 * config.gru_hidden_dim**2
    assert counted(drafter, rows)["matrices"] == pytest.approx(expected, abs=first_state if config.head else 0)


def test_attention_is_counted_over_what_a_slot_sees(drafter, rows):
    """The twin multiplies with every key of its row and with all of its blocks: the counter says so."""
    config = drafter.config
    dense = sum(
        len(anchors) * 4 * (length + len(anchors) * 4) for length, anchors in zip(LENGTHS, ANCHORS, strict=True)
    )
    seen = sum(4 * (anchor + 4) for anchors in ANCHORS for anchor in anchors)
    got = training_work(config, rows).attention
    assert got == 3 * 4 * 2 * config.num_attention_heads * config.head_dim * seen
    assert counted(drafter, rows)["attention"] * seen == got * dense


def test_parameters_are_all_but_the_norms(drafter):
    matrices = sum(each.numel() for each in drafter.parameters() if each.ndim == 2)
    assert num_parameters(drafter.config) == matrices


def test_the_job_writes_points_parts_and_twins(tmp_path, capsys):
    import json

    out = tmp_path / "training.json"
    assert main(["training", "--shapes", "tiny", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    table = found["training"]["tiny"]
    assert found["ms_per_sample"] == table["length 96, batch 2"]["ms_per_sample"] > 0
    assert {"backbone, both ways", "losses, both ways", "clip and optimiser"} < set(table["parts"])
    assert found["environment"]
    assert "twins" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--shapes nothing"):
        main(["training", "--shapes", "nothing"])
