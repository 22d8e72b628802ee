"""jobs.bench decode: every table has its points, the figures fit each other, and mistakes are named before work."""

import json
import subprocess
import sys

import pytest
import torch

from domino_core.checkpoint import save_drafter
from domino_core.drafter import Drafter
from domino_core.target import load_target
from jobs import bench, bench_decode
from pipelines.bench_decode import PLANS, Plan, Window, figures, room_for, rounds_for
from pipelines.bench_real import RealPlan, real_table
from tests.serving import drafter_config

TINY = ["decode", "--shapes", "tiny", "--device", "cpu"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("bench") / "deep" / "decode.json"
    assert bench.main([*TINY, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_result_says_what_it_is(stored):
    assert stored["command"].startswith("python -m jobs.bench decode --shapes tiny")
    assert stored["acceptance"].startswith("imposed")
    assert stored["environment"]["cores"] >= 1
    assert stored["errors"] == {}
    assert set(stored["seconds"]) == {"ceilings", "parts tiny", "single", "load"}


def test_parts_beside_their_floors(stored):
    parts, ceilings = stored["parts"]["tiny"], stored["ceilings"]
    assert [name for name in parts if name.startswith("verify")] == [
        f"verify, {tokens} tokens" for tokens in (1, 2, 4, 5, 8, 9, 16, 17)
    ]
    rest = {"plain step", "drafter's backbone", "head, as trained", "head, fused", "accept and commit"}
    assert rest | {"extend context, 17 tokens"} <= set(parts)
    for part in parts.values():
        floor_s = max(part["bytes"] / ceilings["bytes_per_s"], part["operations"] / ceilings["operations_per_s"])
        assert part["floor_ms"] == pytest.approx(1e3 * floor_s)
        assert part["ratio"] == pytest.approx(part["ms"] / part["floor_ms"])


def test_single_and_load_have_every_point(stored):
    plan = PLANS["tiny"]
    aims = [f"{tau:g}" for tau in plan.taus]
    assert list(stored["single"]) == [str(context) for context in plan.contexts]
    assert list(stored["load"]) == [str(rows) for rows in plan.concurrencies]
    for point in stored["single"].values():
        assert list(point["domino"]) == aims
    for rows, point in stored["load"].items():
        assert list(point["fixed"]) == list(point["auto"]) == aims
        assert (point["plain"]["tau"], point["plain"]["verified"]) == (1.0, 0.0)
        for aim, found in point["fixed"].items():
            assert found["aim"] == float(aim)
            assert found["tau"] == pytest.approx(found["aim"], rel=0.25)  # some tens of rounds
            assert found["verified"] == 16
            rate = int(rows) * found["tau"] / found["ms_per_round"] * 1e3
            assert found["tokens_per_s"] == pytest.approx(rate, rel=1e-6)
            assert found["speedup"] == pytest.approx(found["tokens_per_s"] / point["plain"]["tokens_per_s"])


def test_figures_to_quote(stored):
    shortest = stored["single"][str(min(PLANS["tiny"].contexts))]
    assert stored["plain_tokens_per_s_b1"] == shortest["plain"]["tokens_per_s"]
    assert stored["domino_tokens_per_s_b1_tau7.17"] == shortest["domino"]["7.17"]["tokens_per_s"]
    assert stored["round_ms"] == shortest["domino"]["7.17"]["ms_per_round"]
    assert stored["head_ms"] == stored["parts"]["tiny"]["head, fused"]["ms"]
    assert stored["speedup_by_rows"] == {
        rows: point["auto"]["7.17"]["speedup"] for rows, point in stored["load"].items()
    }
    assert stored["ratio_over_vllm_147"] == pytest.approx(stored["domino_tokens_per_s_b1_tau7.17"] / 147)


def test_a_table_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def out_of_memory(*_, **__):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr("pipelines.bench_decode.single_table", out_of_memory)
    out = tmp_path / "decode.json"
    assert bench.main([*TINY, "--tables", "single,load", "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert found["errors"] == {"single": "RuntimeError: CUDA error"}
    assert found["plain_tokens_per_s_b1"] is None
    assert set(found["speedup_by_rows"]) == set(found["load"])


def test_a_points_pace_is_the_median_windows_and_its_tokens_are_all():
    windows = [
        Window(rows=2, rounds=10, seconds=seconds, tokens=tokens, tau=tokens / 20, drafts={16: 9, 8: 1})
        for seconds, tokens in ((1.0, 60), (9.0, 80), (1.0, 100))
    ]
    found = figures(windows)
    assert (found["ms_per_round"], found["tokens_per_s"], found["tau"]) == pytest.approx((100.0, 80.0, 4.0))
    assert found["verified"] == pytest.approx(15.2)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_rows_have_room_for_what_is_measured(plan: Plan):
    room = room_for(plan, plan.tokens, windows=plan.repeats, rows=64, num_drafts=16)
    assert all(plan.repeats * rounds_for(plan.tokens, tau) * tau < room for tau in plan.taus)
    if plan is PLANS["full"]:
        assert plan.load_context + room <= 1024 + 2 * 17  # the margin is not reached, see Plan.load_context


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--shapes", "qwen3_900b"], "--shapes qwen3_900b: expected some of qwen3_8b, qwen3_4b, qwen3_0_6b, tiny"),
        (["--tables", "parts,parts"], "each once"),
        (["--tables", ""], "--tables : expected some of parts, single, load, real"),
        (["--tables", "real"], "give --drafter FOLDER"),
        (["--tables", "real", "--drafter", "nowhere"], "nowhere"),
        (["--device", "tpu"], "expected auto, cpu or cuda"),
        (["--out", "/dev/null/decode.json"], "cannot be written"),
    ],
)
def test_flags_that_cannot_be_meant(flags, said):
    with pytest.raises(ValueError, match=said):
        bench.main([*TINY, *flags])


def test_names_are_those_of_the_modules():
    from pipelines.bench_shapes import SHAPES

    assert set(bench_decode.SHAPE_NAMES) == set(SHAPES)


def test_a_trained_drafter_beside_transformers(embedded_target, tmp_path):
    target = load_target(embedded_target, dtype=torch.float32)
    save_drafter(Drafter(drafter_config(embedded_target), target.embed_VD, target.lm_head_VD), tmp_path / "drafter", {})
    plan = RealPlan(
        target=str(embedded_target),
        prompts=str(embedded_target / "prompts" / "heldout.jsonl"),
        drafter=str(tmp_path / "drafter"),
        num_prompts=2,
        max_tokens=8,
        repeats=1,
        transformers_prompts=1,
    )
    plan.check()
    arms = real_table(plan, torch.device("cpu"))["float32"]
    assert (arms["domino"]["identical"], arms["domino"]["outputs"]) == (2, 2)
    assert (arms["transformers"]["identical"], arms["transformers"]["outputs"]) == (1, 1)
    assert arms["domino"]["tau"] >= 1
    assert arms["domino"]["tokens"] == arms["plain"]["tokens"] > arms["transformers"]["tokens"] > 0


def test_nothing_but_torch_is_needed():
    """The machines with GPUs that this runs on have none of these."""
    absent = ("ray", "mlflow", "vllm", "pyarrow", "fastapi", "matplotlib", "datasets")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from jobs import bench; from pipelines import bench_real\n"
        f"sys.exit(bench.main({[*TINY, '--tables', 'single']!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
