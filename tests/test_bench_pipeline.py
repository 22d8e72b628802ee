"""jobs.bench pipeline: figures follow from a run's log lines, and the runs are real, on the tiny shapes."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import bench
from jobs.bench_pipeline import _parser, headline, pipeline_plan
from pipelines.bench_pipeline import MIN_STEPS, arm_figures, run_arm, steady, write_target
from pipelines.bench_shapes import SHAPES
from pipelines.feature_store import cached_rows
from pipelines.prepare import drafter_config
from pipelines.rates import GPU_RATES


def arguments(*flags: str) -> argparse.Namespace:
    found = _parser().parse_args(["--shapes", "tiny", *flags])
    found.row_tokens = found.row_tokens or 96
    return found


@pytest.fixture
def plan(tmp_path):
    made = pipeline_plan(arguments(), tmp_path)
    write_target(made)
    return made


def line(**changes: float) -> dict[str, float]:
    """Ten seconds of two rows of 96 tokens a second, of which the trainer waits four."""
    values = {"window_s": 10.0, "samples_per_s": 2.0, "tokens_per_s": 192.0, "data_wait_s": 4.0}
    values |= {"engine_work_s": 8.0, "engine_blocked_s": 2.0, "offered_tokens_per_s": 200.0}
    return values | changes


def test_figures_are_of_the_steady_part_and_beside_the_estimate(plan):
    predicted = replace(
        plan.predicted(plan.train), trained_rows_per_s=4.0, extracted_rows_per_s=2.5, bound="extraction"
    )
    history = [line(window_s=500.0), line(window_s=50.0), *(line() for _ in range(6))]
    assert steady(history) == history[2:]
    found = arm_figures(history, predicted, 96)
    assert (found["seconds"], found["samples_per_s"], found["tokens_per_s"]) == (60.0, 2.0, 192.0)
    assert found["trained_samples_per_s"] == pytest.approx(2 / 0.6)
    assert found["extracted_tokens_per_s"] == pytest.approx(250)
    assert (found["trainer_waited_share"], found["engine_blocked_share"]) == (0.4, 0.2)
    assert found["bound"] == found["estimate"]["bound"] == "extraction"
    assert found["ratios"] == pytest.approx(
        {"trained_samples_per_s": 2 / 0.6 / 4, "extracted_tokens_per_s": 250 / (2.5 * 96), "samples_per_s": 2 / 2.5}
    )
    cached = [{name: value for name, value in each.items() if "engine" not in name} for each in history]
    found = arm_figures(cached, predicted, 96)
    assert "extracted_tokens_per_s" not in found
    assert found["ratios"]["samples_per_s"] == 2 / 4.0
    assert headline({"whole": found}) == dict.fromkeys(headline({})) | {
        "whole_samples_per_s": 2.0,
        "whole_ratio": 0.5,
    }


def test_the_plan_of_a_real_size_is_the_recipe(plan, tmp_path):
    args = arguments("--minutes", "2")
    args.shapes, args.row_tokens = "qwen3_8b", 768
    large = replace(pipeline_plan(args, tmp_path), rates=GPU_RATES)
    assert drafter_config(large.shape, large.target, None) == SHAPES["qwen3_8b"].drafter
    # Two minutes of 11 rows a second are 45 GB; some are on their way, and two checkpoints lie beside them.
    assert 80e9 < large.disk_bytes() < 110e9
    assert plan.disk_bytes() < 1e9


@pytest.mark.parametrize(
    "flags",
    [
        ["--shapes", "llama"],
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--bus-gb", "inf"],
        ["--steps", "0"],
        ["--arms", "stream,fast"],
        ["--row-tokens", "10"],
        ["--row-tokens", "2048", "--shapes", "tiny"],
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags):
    with pytest.raises(ValueError, match=flags[0]):
        bench.main(["pipeline", *flags])


def test_a_file_is_no_scratch_folder(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match=r"file/\.new cannot be written"):
        bench.main(["pipeline", "--shapes", "tiny", "--scratch", str(tmp_path / "file")])


def test_a_cache_must_be_there(tmp_path):
    with pytest.raises(ValueError, match="run the arm stream with this --scratch first"):
        bench.main(["pipeline", "--shapes", "tiny", "--arms", "whole", "--scratch", str(tmp_path)])


@pytest.mark.matrix
@pytest.mark.cluster
def test_a_stream_and_a_sharded_run_from_its_cache(local_ray, plan):
    found = run_arm(plan, "stream", num_workers=1, shard=False, steps=MIN_STEPS)
    cached = cached_rows(plan.cache)
    assert len(cached) >= MIN_STEPS * 2
    assert found["history"][-1]["step"] == MIN_STEPS
    assert found["tokens_per_s"] == pytest.approx(96 * found["samples_per_s"])
    assert sum(each["offered_tokens_per_s"] * each["window_s"] for each in found["history"]) > 0
    assert {"samples_per_s", "trained_samples_per_s"} <= set(found["ratios"])
    assert found["memory"]["private_gb"]["peak"] > 0.1
    assert found["memory"]["spilled_gb"] == 0
    assert found["memory_curve"]
    sharded = run_arm(plan, "sharded", num_workers=2, shard=True, steps=MIN_STEPS)
    assert sharded["history"][-1]["step"] == MIN_STEPS
    assert sharded["samples_per_s"] > 0
    assert set(sharded["ratios"]) == {"samples_per_s", "trained_samples_per_s"}
    folders = [path.name for path in Path(plan.root).glob("*/checkpoint_*/")]
    assert folders == []
    assert (Path(plan.root) / "sharded" / "drafter" / "model.safetensors").exists()
