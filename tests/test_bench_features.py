"""jobs.bench features: its figures follow from what workers report, and the stream really runs, on the tiny shapes."""

import argparse
from pathlib import Path

import pytest

from domino_core.target import read_target_config
from jobs import bench
from jobs.bench_features import _plan, headline, stages
from pipelines.bench_features import (
    MIN_ROWS,
    random_rows,
    stream_arm,
    stream_figures,
    write_config,
)
from pipelines.bench_shapes import SHAPES
from pipelines.capture_stream import EngineClock
from pipelines.memory_watch import memory_curve, memory_figures


def plan_of(folder: Path, **changes):
    values = {"shapes": "tiny", "row_tokens": 24, "batched_tokens": 512, "rows_per_call": 12, "slice_mb": 0.2}
    values |= {"train_batch": 4, "seconds": 0.01} | changes
    return _plan(argparse.Namespace(**values), folder)


def test_rates_count_from_the_first_call_and_stages_from_all_of_it():
    # After the actor's last call, at 116, what is left comes at once; it is no part of the steady rate.
    marks = [(100.0 + i, 50, 1_000_000_000) for i in range(1, 17)] + [(121.0, 50, 1_000_000_000)] * 5
    calls = [{"began": 103.0, "ended": 116.0, "taken": 1.0}, {"began": 100.0, "ended": 110.0, "taken": 4.0}]
    clock = EngineClock(rows=40, tokens=1050, working=14.0, blocked=7.0)
    found = stream_figures({"marks": marks, "collate": 42.0, "copy": 2.1}, calls, clock)
    assert (found["seconds"], found["seconds_to_first_batch"], found["batches"]) == (21.0, 1.0, 21)
    assert found["tokens_per_s"] == found["steady_tokens_per_s"] == 50.0
    assert found["gb_per_s"] == 1.0
    assert found["busy_share"] == pytest.approx(
        {"engine": 14 / 21, "engine_blocked": 1 / 3, "taken": 5 / 21, "collate": 2.0, "copy": 0.1}
    )
    assert found["busy_seconds_per_gb"]["collate"] == pytest.approx(2.0)


def test_memory_is_compared_between_the_thirds_of_the_stream():
    def sample(at: float, value: float) -> dict[str, float]:
        return {"time": at, "private_gb": value, "store_gb": 2 * value, "fallback_gb": 0.0, "spilled_gb": at / 10}

    samples = [sample(0, 99), *(sample(10 + i, 1 + i) for i in range(9)), sample(50, 77)]
    found = memory_figures(samples, 10.0, 18.0)
    assert found["private_gb"] == {"peak": 9, "first_third": 2, "last_third": 8}
    assert found["store_gb"] == {"peak": 18, "first_third": 4, "last_third": 16}
    assert (found["samples"], found["spilled_gb"]) == (9, 5.0)
    curve = memory_curve(samples, start=10.0, points=4)
    assert [point["time"] for point in curve] == [-10, 1, 3, 5, 7, 40][:6]
    assert curve[0]["private_gb"] == 99


def test_the_headline_is_what_was_measured_so_far():
    assert headline({}) == dict.fromkeys(headline({}))
    found = headline({"engine": {"tokens_per_s": 200.0}, "stream": {"steady_tokens_per_s": 190.0, "gb_per_s": 2.0}})
    assert found["delivered_ratio"] == 0.95
    assert (found["engine_tokens_per_s"], found["delivered_tokens_per_s"], found["gb_per_s"]) == (200.0, 190.0, 2.0)


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_0_6b"])
def test_a_folder_without_weights_has_the_shapes(name, tmp_path):
    write_config(tmp_path, SHAPES[name].target)
    found, expected = read_target_config(tmp_path), SHAPES[name].target
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "rope_theta", "tie_word_embeddings"):
        assert getattr(found, field) == getattr(expected, field)
    assert found.dtype == "bfloat16"
    plan = plan_of(tmp_path / name, shapes=name, slice_mb=256)
    assert plan.source.meta.bytes_per_token == 2 * 5 * expected.hidden_size
    assert plan.layer_ids == SHAPES[name].drafter.target_layer_ids


def test_rows_are_random_and_the_same_again(tmp_path):
    plan = plan_of(tmp_path)
    first = random_rows(plan, 0, 3)
    assert first == random_rows(plan, 0, 3)
    assert first != random_rows(plan, 1, 3)
    assert [len(row) for row in first] == [24] * 3


@pytest.mark.parametrize(
    "flags",
    [
        ["--shapes", "llama"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--slice-mb", "-1"],
        ["--store-gb", "inf"],
        ["--rows-per-call", "0"],
        ["--row-tokens", "2048", "--shapes", "tiny"],
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags):
    with pytest.raises(ValueError, match=flags[0]):
        bench.main(["features", *flags])


@pytest.mark.slow
@pytest.mark.cluster
def test_the_stream_runs_and_every_token_arrives(local_ray, tmp_path):
    plan = plan_of(tmp_path)
    found = stream_arm(plan, tokens_per_s=1000.0)
    tokens = MIN_ROWS * plan.row_tokens
    stream = found["stream"]
    assert stream["rows"] == MIN_ROWS
    assert stream["batches"] >= MIN_ROWS / plan.train_batch
    assert stream["tokens_per_s"] * stream["seconds"] == pytest.approx(tokens)
    assert stream["gb_per_s"] * stream["seconds"] == pytest.approx(tokens * plan.source.meta.bytes_per_token / 1e9)
    assert found["memory"]["spilled_gb"] == 0
    assert found["memory"]["private_gb"]["peak"] > 0.1
    assert set(found["alone"]) == {"to_arrow", "put", "get"}
    table = stages(found | {"engine": {"tokens_per_s": 1000.0}}, plan)
    assert table["engine"]["alone"] == pytest.approx(1 / (1000 * plan.source.meta.bytes_per_token / 1e9))
    assert all(each.get("share", 1.0) > 0 for name, each in table.items() if name != "engine waits")
