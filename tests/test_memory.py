"""What an engine takes is worked out before it is allocated: caches to the byte, the rest with room to spare."""

from dataclasses import replace

import pytest
import torch

from domino_core.checkpoint import load_drafter
from domino_core.decode_state import DecodeState
from domino_core.engine import Engine
from domino_core.fused_drafter import FusedDrafter
from domino_core.memory import (
    CPU_ROWS,
    MOST_ROWS,
    SPARE,
    EngineMemory,
    cache_bytes,
    drafter_bytes,
    free_bytes,
)
from domino_core.target import load_target

GB = 10**9


@pytest.fixture(scope="module")
def target(reference_dir):
    return load_target(reference_dir / "target")


@pytest.fixture(scope="module")
def drafter(target, reference_dir):
    return load_drafter(reference_dir / "draft_shift1_p1", target.embed_VD, target.lm_head_VD)


@pytest.fixture(scope="module")
def needs(target, drafter):
    return EngineMemory.of(target.config, drafter.config, 64, 4)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("length", [2, 64])
def test_caches_of_a_row_are_those_that_are_allocated(target, drafter, drafted, length):
    model = FusedDrafter(drafter) if drafted else None
    state = DecodeState.allocate(target, model, 3, length)
    caches = [cache for cache in (state.target_cache, state.draft_cache) if cache is not None]
    allocated = sum(each.nbytes for cache in caches for each in (cache.k, cache.v))
    assert 3 * cache_bytes(target.config, drafter.config if drafted else None, length, 4) == allocated


def test_a_real_model_by_hand(target, drafter):
    """Qwen3-8B with the published drafter in bfloat16: a text of 2,048 tokens, blocks of 15 drafts and one token."""
    shape = {"num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288}
    qwen3 = replace(target.config, vocab_size=151936, num_hidden_layers=36, num_attention_heads=32, **shape)
    block = {"vocab_size": 151936, "num_hidden_layers": 5, "num_attention_heads": 32, "block_size": 16}
    domino = replace(drafter.config, num_target_layers=36, target_layer_ids=(1, 9, 17, 25, 33), **shape, **block)
    room = 2048 + 2 * (domino.num_drafts + 1)
    by_hand = 2 * 2 * 8 * 128 * (36 * room + 5 * (room + 17))
    assert cache_bytes(qwen3, domino, 2048, 2) == by_hand
    needs = EngineMemory.of(qwen3, domino, 2048, 2)
    # Caches are 0.35 GB a row, the logits of its round nearly as much.
    assert by_hand == pytest.approx(0.35 * GB, rel=0.02)
    assert needs.row_bytes - by_hand == pytest.approx(0.25 * GB, rel=0.1)
    plain = EngineMemory.of(qwen3, None, 2048, 2)
    assert plain.row_bytes == pytest.approx(0.32 * GB, rel=0.05)
    assert 1.4 * GB < plain.fixed_bytes < needs.fixed_bytes < 2 * GB
    assert needs.plan(None, 60 * GB) == MOST_ROWS
    assert 12 < needs.plan(None, 10 * GB) < 18


def test_rows_fit_and_one_more_would_not(needs):
    for rows in (1, 2, 17):
        free = needs.needed(rows)
        assert needs.fitting(free) == needs.plan(None, free) == needs.plan(rows, free) == rows
        assert needs.fitting(free - 1) == rows - 1
        with pytest.raises(ValueError, match=f"max_rows={rows} needs"):
            needs.plan(rows, free - 1)
    assert needs.fitting(0) == needs.fitting(-GB) == 0
    assert needs.fixed_bytes > SPARE


def test_a_device_is_not_filled_for_its_own_sake(needs):
    assert needs.plan(None, 1000 * GB) == MOST_ROWS
    assert needs.plan(100, 1000 * GB) == 100  # who asks for more gets it


def test_what_cannot_fit_is_refused_with_both_figures_and_the_remedy(target):
    needs = EngineMemory.of(target.config, None, 500, 2)
    needs = replace(needs, row_bytes=GB, fixed_bytes=2 * GB)
    with pytest.raises(
        ValueError, match=r"max_rows=9 needs 11.0 GB .* 6.5 GB are free: give fewer rows \(4 fit\) or a sh"
    ):
        needs.plan(9, int(6.5 * GB))
    with pytest.raises(ValueError, match=r"one row needs 3.0 GB .* 2.5 GB are free: give a shorter max_length"):
        needs.plan(None, int(2.5 * GB))
    with pytest.raises(ValueError, match=r" 0.0 GB are free: give a shorter max_length"):
        needs.plan(9, -GB)


def test_engines_plan_before_they_allocate(target, drafter, needs, monkeypatch):
    assert Engine(target, drafter, max_rows=None, max_length=64, memory=needs.needed(5)).max_rows == 5
    monkeypatch.setattr(DecodeState, "allocate", lambda *args: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=r"max_rows=6 needs .* fewer rows \(5 fit\)"):
        Engine(target, drafter, max_rows=6, max_length=64, memory=needs.needed(5))


def test_a_cpu_decodes_as_many_rows_as_are_asked_for_unless_the_machine_has_no_room(target):
    assert free_bytes(torch.device("cpu")) is None
    assert Engine(target, None, max_rows=None, max_length=64).max_rows == CPU_ROWS
    assert Engine(target, None, max_rows=70, max_length=64).max_rows == 70
    with pytest.raises(ValueError, match=r"max_rows=1000000000 needs [\d.]+ GB .* fewer rows \(\d+ fit\)"):
        Engine(target, None, max_rows=10**9, max_length=64)


def test_a_drafter_takes_no_more_than_is_said(drafter):
    fused = FusedDrafter(drafter)
    assert fused.head is not None
    assert fused.head.table_VG is not None
    kept = {
        id(t.untyped_storage()): t.untyped_storage().nbytes()
        for t in _tensors(fused, (fused.embed_VD, fused.output_DV, fused.rotary))
    }
    weights = sum(weight.nbytes for weight in drafter.parameters())
    assert weights < sum(kept.values()) <= drafter_bytes(drafter)


def _tensors(thing, without):
    """All tensors in a tree of our own classes, but those."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    if isinstance(thing, torch.Tensor):
        return [] if thing.untyped_storage().data_ptr() in known else [thing]
    if isinstance(thing, list | tuple):
        return [tensor for each in thing for tensor in _tensors(each, without)]
    if type(thing).__module__.startswith("domino_core.fused"):
        names = getattr(thing, "__slots__", None) or vars(thing)
        return [tensor for name in names for tensor in _tensors(getattr(thing, name), without)]
    return []


@pytest.mark.gpu
def test_on_a_gpu_what_is_free_is_what_can_be_had(target):
    device = torch.device("cuda")
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    now = free_bytes(device)
    assert now is not None
    assert now <= free - kept.nbytes + (64 << 20)
    del kept  # torch keeps it in reserve, for us
    later, small = free_bytes(device), free_bytes(device, share=0.1)
    assert later is not None
    assert small is not None
    assert later >= now + (1 << 28)
    assert small <= total // 10
