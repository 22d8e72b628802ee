"""The jobs as a user runs them on a cluster: features, train, evaluate, promote, each by `ray job submit`."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from domino_core.atomic_files import sole_writer
from domino_core.checkpoint import read_config, read_provenance
from jobs import evaluate, promote, regenerate, train
from jobs.presets import tiny
from pipelines.feature_store import read_events
from pipelines.registry import CHAMPION, find_version
from pipelines.tracking import connect

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

SMALL = [
    "num_rows=16", "answer.max_tokens=24", "capture.max_length=256", "capture.batch_size=8", "train.steps=3",
    "train.batch_size=2", "train.num_anchors=8", "train.cpus_per_worker=0.5", "evaluate.num_prompts=2",
    "evaluate.max_tokens=12", "evaluate.repeats=1", "gate.min_tau=1.0", "gate.min_speedup=0.0",
]  # fmt: skip


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def jobs_address() -> Iterator[str]:
    """A head node of our own on free ports, ended with all that it started."""
    gcs, dashboard, agent, agent_grpc, client = free_ports(5)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:  # short: sockets lie below it
        # Jobs find `python` through the PATH of `ray start`.
        env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "RAY_TMPDIR": scratch}
        env.pop("RAY_ADDRESS", None)
        command = [
            str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=4", f"--port={gcs}",
            "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
            f"--ray-client-server-port={client}", "--object-store-memory=268435456", f"--temp-dir={scratch}",
        ]  # fmt: skip
        with open(f"{scratch}/start.log", "w") as log:
            head = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{dashboard}"
            wait_for(f"{address}/api/version", head, Path(scratch) / "start.log")
            yield address
        finally:
            family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
            head.terminate()
            for process in psutil.wait_procs(family, timeout=15)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            head.wait()


def wait_for(url: str, head: subprocess.Popen, log: Path, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert head.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} does not answer: {log.read_text()}")


def submit(address: str, *arguments: str, code: int = 0) -> str:
    """`ray job submit -- python -m ...` from the repository root; its output, after checking the exit code."""
    command = [str(BIN / "ray"), "job", "submit", "--address", address, "--working-dir", ".", "--", "python", "-m"]
    started = time.monotonic()
    run = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    print(f"{arguments[0]}: {time.monotonic() - started:.0f} s")
    assert run.returncode == code, f"{run.stdout[-6000:]}\n{run.stderr[-3000:]}"
    return run.stdout


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (train.main, [], "will train 3 layers on 16 rows"),
        (evaluate.main, ["--head-off"], "evaluation-head-off.json"),
        (promote.main, ["--version", "7"], "will gate version 7, alias champion of domino-tiny-qwen3 in sqlite:///"),
        (promote.main, ["--rollback"], "will roll back, alias champion of domino-tiny-qwen3"),
        (promote.main, ["--canary", "serve.port=8123"], "after a canary at http://127.0.0.1:8123"),
        (promote.main, ["--abandon"], "will abandon the canary, alias champion of domino-tiny-qwen3"),
    ],
)
def test_a_plan_shows_what_would_be_done_and_does_nothing(main, arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not main([f"root={tmp_path}/runs", *SMALL, *arguments, "--plan"])
    printed = capsys.readouterr().out
    assert said in printed
    assert "train.learning_rate = " in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (promote.main, ["--rollback"], "has no alias 'champion'; it has no versions"),
        (promote.main, ["--version", "7"], "has no version 7"),
        (promote.main, ["--run", "nothing"], "run nothing has no drafter"),
        (promote.main, ["--rollback", "--alias", "canary"], "leaves --alias canary alone"),
        (promote.main, ["eval_data=nowhere.jsonl"], "nowhere.jsonl: no such prompt file"),  # before it registers
        (promote.main, ["--alias", "v2"], "alias 'v2' cannot be set"),
        (promote.main, ["--canary", "--alias", "x"], "without --rollback, --abandon and --alias"),
        (promote.main, ["--abandon"], "has no canary that is running"),
        (promote.main, ["gate.min_tau=nan"], "gate.min_tau=nan: expected a finite number"),
        (evaluate.main, [], "is no drafter"),
        (train.main, ["data=nowhere.jsonl"], "nowhere.jsonl: no such prompt file"),
        (train.main, ["tracking_uri=http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
    ],
)
def test_mistakes_are_named(main, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=said):
        main([f"root={tmp_path}", *SMALL, *arguments])


def test_two_runs_do_not_write_one_file_of_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("jobs.ray_session.ray_session", lambda: pytest.fail("work was begun"))
    with sole_writer(tmp_path / "answers.jsonl"), pytest.raises(ValueError, match="being written by another run"):
        regenerate.main(["--preset", "tiny", "num_rows=2", "--output", str(tmp_path / "answers.jsonl")])


@pytest.mark.cluster
@pytest.mark.slow
def test_features_train_evaluate_promote_as_submitted_jobs(jobs_address, tmp_path, monkeypatch, capsys):
    root, cache = f"root={tmp_path}", f"features={tmp_path}/features"

    # A relative root would be written into the job's copy of the working directory, and lost with it.
    said = submit(jobs_address, "jobs.train", "root=runs", *SMALL, code=1)
    assert "root=runs is relative" in said

    said = submit(jobs_address, "jobs.features", root, cache, *SMALL)
    assert "16 rows in" in said
    events = read_events(tmp_path / "features" / "events")
    assert len(events.answered) == len(events.captured) == 16

    said = submit(jobs_address, "jobs.train", root, cache, *SMALL)
    assert "3 steps of 4 rows (2 workers x 2 rows x 1 micro-batches)" in said
    run_dir = tmp_path / tiny().run_name
    assert read_config(run_dir / "drafter").block_size == tiny().drafter.block_size
    made = read_provenance(run_dir / "drafter")
    assert made["training"]["steps"] == 3

    said = submit(jobs_address, "jobs.evaluate", root, *SMALL)
    found = json.loads((run_dir / "evaluation.json").read_text())
    assert found["greedy_identical"] is True
    assert found["num_prompts"] == 2
    assert read_provenance(run_dir / "drafter")["evaluation"]["tau"] == found["tau"]
    assert "every output is the target's own" in said

    # A gate that is not passed ends in an error and leaves no champion.
    monkeypatch.chdir(ROOT)
    assert promote.main([root, *SMALL, "gate.min_tau=8.9"]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert "gate.min_tau 8.900" in said
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(ValueError, match="no alias 'champion'"):
        find_version(client, "domino-tiny-qwen3", alias=CHAMPION)

    said = submit(jobs_address, "jobs.promote", root, *SMALL)
    assert "champion is version 1" in said
    version = find_version(client, "domino-tiny-qwen3", alias=CHAMPION)
    assert version.tags["gate"] == "passed"
    assert version.tags["target_hash"] == made["target_hash"]
    assert float(version.tags["tau.heldout"]) >= 1.0
    metrics = client.get_run(str(version.run_id)).data.metrics
    assert metrics["step"] == 3
    assert metrics["gate.tau"] == pytest.approx(float(version.tags["tau.heldout"]), abs=1e-3)
