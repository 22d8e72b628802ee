"""pipelines.bench_shapes: floors against figures worked out by hand, and against the tensors that there are."""

import pytest
import torch

from domino_core.target_model import random_target
from pipelines.bench_shapes import (
    SHAPES,
    Ceilings,
    Work,
    accept_work,
    draft_work,
    extend_work,
    head_step_weights,
    head_work,
    layer_matrices,
    pass_weights,
    pass_work,
    random_drafter,
    token_kv,
)

LARGE, TINY = SHAPES["qwen3_8b"], SHAPES["tiny"]


def test_weights_of_qwen3():
    # q and out 4096 × 4096, k and v 4096 × 1024; gate, up, down 4096 × 12288
    assert layer_matrices(LARGE.target) == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288 == 192_937_984
    assert 2 * pass_weights(LARGE.target) / 1e9 == pytest.approx(15.1, abs=0.05)  # all but the embedding, bfloat16
    assert 2 * token_kv(LARGE.target) == 147_456  # bytes per token of text
    assert 2 * pass_weights(SHAPES["qwen3_4b"].target) / 1e9 == pytest.approx(8.04, abs=0.01)
    assert LARGE.drafter.num_drafts == 16


def test_head_of_the_published_drafter():
    assert 2 * head_step_weights(LARGE.drafter) / 1e6 == pytest.approx(84.6, abs=0.05)
    work = head_work(LARGE.drafter, rows=3, itemsize=2)
    assert work.bytes == 15 * 2 * head_step_weights(LARGE.drafter)
    assert work.operations == 3 * 15 * 2 * (3 * 1024**2 + 1024 * 256 + 256 * 151936)


def test_a_pass_by_hand():
    # tiny: 4 layers of 32·(4+2·2)·8 + 4·8·32 + 3·32·48 = 7680, output 128·32 = 4096, K and V of a token 2·4·2·8 = 128
    work = pass_work(TINY.target, rows=2, tokens=3, context=10, itemsize=4)
    assert work.bytes == 4 * (4 * 7680 + 4096 + 2 * 13 * 128)
    # six tokens through 34816 weights; keys seen: 11 + 12 + 13 in each row, 2·2·32 operations in each of 4 layers
    assert work.operations == 2 * 6 * 34816 + 2 * 36 * 4 * 4 * 32


def test_a_draft_by_hand():
    # one layer of 7680; 16 slots that see 10 + 16 keys; the output matrix for 16 drafts
    work = draft_work(TINY.drafter, rows=1, context=10, itemsize=4)
    assert work.bytes == 4 * (7680 + 4096 + 26 * 32)
    assert work.operations == 2 * 16 * (7680 + 4096) + 16 * 26 * 4 * 32


def test_the_rest_by_hand():
    extend = extend_work(TINY.drafter, rows=1, tokens=17, itemsize=4)
    assert extend.operations == 2 * 17 * (64 * 32 + 32 * 32)
    assert extend.bytes == 4 * (64 * 32 + 32 * 32 + 17 * (64 + 32))
    assert accept_work(TINY.target, rows=1, tokens=17, itemsize=4).bytes == 4 * 17 * 128


def test_the_larger_floor_counts():
    ceilings = Ceilings(bytes_per_s=100.0, operations_per_s=1000.0)
    assert ceilings.floor_ms(Work(bytes=50.0, operations=1.0)) == 500.0
    assert ceilings.floor_ms(Work(bytes=50.0, operations=2000.0)) == 2000.0


def test_counted_weights_are_those_of_the_models():
    target = random_target(TINY.target)
    matrices = [tensor for block in target.stack.blocks for tensor in (block.qkv, block.out, block.gate_up, block.down)]
    assert sum(tensor.numel() for tensor in (*matrices, target.output_DV)) == pass_weights(TINY.target)
    drafter = random_drafter(TINY.drafter, target)
    assert drafter.head is not None
    layers = sum(p.numel() for p in drafter.backbone.layers.parameters() if p.dim() == 2)
    assert layers + target.output_DV.numel() == pass_weights(TINY.drafter)
    first_RX, last_VR = (drafter.head.embed_proj.get_parameter(f"{index}.weight") for index in (0, 2))
    state_GG = drafter.head.prefix_gru.weight_hh_l0
    assert first_RX[:, -16:].numel() + state_GG.numel() + last_VR.numel() == head_step_weights(TINY.drafter)


def test_a_random_drafter_is_of_its_targets_type_and_shares_its_vocabulary():
    target, before = random_target(TINY.target, dtype=torch.bfloat16), torch.get_rng_state()
    drafter = random_drafter(TINY.drafter, target)
    assert drafter.dtype == torch.bfloat16
    assert drafter.lm_head_VD.data_ptr() == target.lm_head_VD.data_ptr()
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    assert torch.equal(before, torch.get_rng_state())
