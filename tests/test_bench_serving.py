"""python -m jobs.bench serving: what is counted, which flags are refused, and a run of it."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from domino_core.checkpoint import read_config
from jobs import bench, bench_serving
from pipelines.bench_serving import ServingPlan, Window, _level, percentile, serve_arm
from tests.trained import train_drafter


def test_a_window_counts_what_arrives_in_it():
    window = Window(begin=10.0, end=20.0)
    window.arrived(9.0, 8.0, None, 1)  # before it
    window.arrived(11.0, 8.0, 9.0, 4)  # half a second for each of four tokens
    window.arrived(12.0, 11.5, None, 2)  # the first of a request
    window.arrived(20.0, 11.5, 12.0, 3)  # behind it
    found = window.figures()
    assert found["tokens_per_s"] == 0.6
    assert (found["ttft_p50_ms"], found["itl_p50_ms"], found["itl_p99_ms"]) == (500.0, 500.0, 500.0)
    assert Window(begin=0.0, end=1.0).figures()["ttft_p50_ms"] is None


def test_percentiles_are_in_milliseconds():
    assert percentile([0.001 * value for value in range(1, 102)], 50) == pytest.approx(51.0)
    assert percentile([0.001 * value for value in range(1, 102)], 99) == pytest.approx(100.0)


TARGET = ("--target", "assets/tiny-qwen3")
REFUSED = {
    "neither": ((), "give --target"),
    "both": ((*TARGET, "--shapes", "tiny"), "give --target"),
    "no prompts": (TARGET, "needs --prompts"),
    "no such prompts": ((*TARGET, "--prompts", "nowhere"), "no prompt file"),
    "unknown shapes": (("--shapes", "qwen9"), "expected one of"),
    "clients": (("--shapes", "tiny", "--concurrency", "1,x"), "each once"),
    "clients twice": (("--shapes", "tiny", "--concurrency", "8,8"), "each once"),
    "prompts too long": (("--shapes", "tiny", "--arms", "plain", "--prompt-tokens", "1761"), "2,049 positions"),
    "answers too long": (
        (*TARGET, "--prompts", "assets/tiny-qwen3/prompts/heldout.jsonl", "--max-tokens", "2048"),
        "--max-tokens: .* more than the target's 2,048",
    ),
    "endless": (("--shapes", "tiny", "--seconds", "inf"), "must be above 0"),
    "no number": (("--shapes", "tiny", "--seconds", "nan"), "must be above 0"),
    "temperature": (("--shapes", "tiny", "--temperature", "-1"), "expected 0 to 2"),
    "graphs": (("--shapes", "tiny", "--graph-tokens", "0"), "expected a number above 0"),
    "graphs in eager mode": (("--shapes", "tiny", "--graph-tokens", "8", "--eager"), "no --eager"),
    "seconds": (("--shapes", "tiny", "--seconds", "0"), "must be above 0"),
    "no card": (("--shapes", "tiny"), "on a GPU only"),
    "τ that is trained": ((*TARGET, "--prompts", "README.md", "--tau", "3"), "--tau is imposed"),
    "weights that are random": (("--shapes", "tiny", "--drafter", "x"), "leave out"),
    "unknown arm": ((*TARGET, "--prompts", "assets/tiny-qwen3/prompts/heldout.jsonl", "--arms", "x"), "some of plain"),
    "no JSON": (
        (*TARGET, "--prompts", "assets/tiny-qwen3/prompts/heldout.jsonl", "--configured", "{"),
        "--configured {",
    ),
    "no object": (
        (*TARGET, "--prompts", "assets/tiny-qwen3/prompts/heldout.jsonl", "--configured", "5"),
        "a JSON object",
    ),
    "no drafter": ((*TARGET, "--prompts", "assets/tiny-qwen3/prompts/heldout.jsonl", "--drafter", "x"), "x"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_cannot_be_meant_are_refused_before_an_engine_starts(case, monkeypatch):
    flags, said = REFUSED[case]
    monkeypatch.setattr("pipelines.bench_serving.serve_arm", lambda *args: pytest.fail("an engine was started"))
    with pytest.raises((ValueError, OSError), match=said):
        bench.main(["serving", *flags])


def test_imposed_arms_are_the_same_drafter_with_and_without_its_head(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    args = bench_serving._parser().parse_args(["--shapes", "tiny", "--tau", "2,3.5"])
    plan, arms = bench_serving._imposed(args, (1,), tmp_path)
    assert list(arms) == ["plain", "dflash, τ 2", "dflash, τ 3.5", "domino, τ 2", "domino, τ 3.5"]
    dflash, domino = (read_config(tmp_path / name) for name in ("dflash", "domino"))
    assert (dflash.head, domino.head) == (False, True)
    rates = (arms["domino, τ 3.5"] or {})["synthetic_acceptance_rates"]
    assert 1 + sum(rates) == pytest.approx(3.5)
    assert rates == pytest.approx([rates[0] ** (i + 1) for i in range(16)])
    assert not plan.ends
    args.configured, args.arms = '{"num_speculative_tokens": 3}', "plain;domino, τ 2;domino, τ 2, configured"
    _, arms = bench_serving._imposed(args, (1,), tmp_path)
    assert list(arms) == ["plain", "domino, τ 2", "domino, τ 2, configured"]
    whole, fewer = (arms[name] or {} for name in ("domino, τ 2", "domino, τ 2, configured"))
    rates = whole["synthetic_acceptance_rates"][:3]
    assert fewer == whole | {"num_speculative_tokens": 3, "synthetic_acceptance_rates": rates}
    with pytest.raises(ValueError, match="1 to 17"):
        bench_serving._imposed(bench_serving._parser().parse_args(["--shapes", "tiny", "--tau", "20"]), (1,), tmp_path)
    with pytest.raises(ValueError, match="--tau x: expected numbers"):
        bench_serving._imposed(bench_serving._parser().parse_args(["--shapes", "tiny", "--tau", "x"]), (1,), tmp_path)


class Metronome:
    """An engine that says a token every 10 ms, five to a request, and counts as vLLM does."""

    def __init__(self) -> None:
        self.rounds = 0

    async def generate(self, prompt, asked, name):
        for _ in range(5):
            await asyncio.sleep(0.01)
            self.rounds += 1
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7])])


def test_a_level_counts_what_its_clients_get_behind_the_warm_up(monkeypatch):
    import vllm.sampling_params  # noqa: F401 (seconds, which the clients would spend in their window)

    engine = Metronome()
    monkeypatch.setattr("pipelines.bench_serving._spec_counts", lambda: (float(engine.rounds), 3.0 * engine.rounds))
    plan = ServingPlan(
        target="", prompts=((1,),), concurrency=(2,), max_tokens=5, seconds=1.0, warm_seconds=1.0, temperature=0.0
    )
    found = asyncio.run(_level(engine, plan, 2))
    assert found["tau"] == 4.0
    assert found["requests"] == pytest.approx(found["tokens_per_s"] / 5, abs=3)  # none of the warm-up
    assert found["itl_p50_ms"] >= 10.0


@pytest.mark.parametrize(("flag", "head"), [("--drafter", False), ("--dflash", True)])
def test_a_drafter_stands_under_its_own_name(tmp_path, embedded_target, flag, head):
    drafter = train_drafter(tmp_path / "drafter", embedded_target, [[5, 6, 7, 8, 9, 10, 11, 12]], 1, head=head)
    prompts = str(embedded_target / "prompts" / "heldout.jsonl")
    with pytest.raises(ValueError, match="by its head a drafter is Domino"):
        bench.main(["serving", "--target", str(embedded_target), "--prompts", prompts, flag, str(drafter)])


def test_an_engine_that_does_not_start_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    plan = ServingPlan(
        target=str(tmp_path), prompts=((1,),), concurrency=(1,), max_tokens=1, seconds=1.0, warm_seconds=0.0
    )
    with pytest.raises(RuntimeError, match="exit code 1"):
        list(serve_arm(plan, None))


def check_arms(out, names):
    arms = json.loads(out.read_text())["arms"]
    assert list(arms) == names
    for levels in arms.values():
        assert list(levels) == ["1", "3"]
        assert all(found["tokens_per_s"] > 0 and found["requests"] >= 0 for found in levels.values())
    return arms


@pytest.mark.matrix
@pytest.mark.slow
def test_a_run_measures_every_arm_at_every_concurrency(tmp_path, embedded_target):
    texts = [[5 + i % 40 for i in range(start, start + 48)] for start in range(8)]
    drafter, out = train_drafter(tmp_path / "drafter", embedded_target, texts, 2), tmp_path / "serving.json"
    flags = ["--target", str(embedded_target), "--prompts", str(embedded_target / "prompts" / "heldout.jsonl")]
    flags += ["--drafter", str(drafter), "--concurrency", "1,3", "--seconds", "3", "--max-tokens", "48"]
    assert bench.main(["serving", *flags, "--arms", "plain;domino", "--out", str(out)]) == 0
    arms = check_arms(out, ["plain", "domino"])
    assert arms["plain"]["3"]["tau"] == 1.0
    assert arms["domino"]["3"]["tau"] > 1.0  # untrained as it is, a draft is right now and then
    assert arms["domino"]["3"]["speedup"] > 0


@pytest.mark.gpu
@pytest.mark.slow
def test_acceptance_is_what_is_imposed(tmp_path):
    out = tmp_path / "serving.json"
    flags = ["--shapes", "tiny", "--tau", "5", "--prompt-tokens", "32", "--concurrency", "1,3", "--seconds", "3"]
    assert bench.main(["serving", *flags, "--max-tokens", "48", "--eager", "--out", str(out)]) == 0
    arms = check_arms(out, ["plain", "dflash, τ 5", "domino, τ 5"])
    assert arms["dflash, τ 5"]["3"]["tau"] == pytest.approx(5.0, rel=0.1)
    assert arms["domino, τ 5"]["3"]["tau"] == pytest.approx(5.0, rel=0.1)


STOPPED = """
import sys, time
from jobs import bench
from pipelines import bench_serving

def serve(plan, speculative):
    print(plan.target, flush=True)
    time.sleep(60)

bench_serving.serve_arm = serve
bench.main(["serving", "--shapes", "tiny", "--arms", "plain"])
"""


def test_what_is_stopped_takes_its_folder_with_it():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert (folder / "config.json").is_file()
    process.terminate()
    process.wait(30)
    assert not folder.parent.exists()
