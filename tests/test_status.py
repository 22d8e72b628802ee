"""jobs.status where parts are missing, and of runs by the files that they leave; the parts themselves are asked where
they run: tests/test_serve_cluster.py has cluster, endpoint and registry, tests/test_fit.py a run."""

import json
import os
import subprocess
import sys

import pytest

from jobs.drill_ground import free_port
from jobs.overrides import apply
from jobs.presets import tiny
from jobs.status import training
from jobs.status_screen import training_lines
from pipelines.train_state import LIVE_FILE, RUN_FILE, STOPPED_FILE, write_json

LINE = {"step": 40, "final_loss": 2.5, "final_accepted": 0.75, "tokens_per_s": 900.0, "window_s": 10.0}
LINE |= {"data_wait_s": 6.0, "engine_work_s": 10.0, "engine_blocked_s": 0.0}
LINE |= {"offered_tokens_per_s": 900.0, "demand_tokens_per_s": 2250.0}


@pytest.fixture
def alone(tmp_path, monkeypatch) -> list[str]:
    """Arguments for a place where nothing is, no Ray either."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return [f"root={tmp_path}", f"serve.port={free_port()}"]


def status(*arguments: str) -> str:
    """What it prints in a process of its own: this one may be connected to a Ray of other tests."""
    command = [sys.executable, "-m", "jobs.status", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_what_is_missing_is_said_and_nothing_is_made(alone, tmp_path):
    told = status(*alone)
    for part in ("no cluster", "no endpoint", "no registry", "no training run"):
        assert part in told
    found = json.loads(status(*alone, "--json"))
    assert found["cluster"] is None
    assert found["missing"].keys() == {"cluster", "endpoint", "registry", "training"}
    assert list(tmp_path.iterdir()) == []


def test_a_registry_that_does_not_answer_is_named(alone):
    told = status(*alone, "tracking_uri=http://127.0.0.1:9")
    assert "no registry: tracking server http://127.0.0.1:9 does not answer" in told


def test_a_cluster_that_does_not_answer_is_said_at_once(alone, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert f"no cluster: RAY_ADDRESS={address} does not answer" in status(*alone)


def test_the_run_that_wrote_last_is_told_with_supply_and_demand(tmp_path):
    for number, name in enumerate(("new", "old")):
        write_json(tmp_path / name / RUN_FILE, {"started_with": {"total_steps": 100}})
        os.utime(tmp_path / name / RUN_FILE, (1000 - number, 1000 - number))
    job = apply(tiny(), [f"root={tmp_path}"])
    assert (training(job).name, training(job).state, training(job).metrics) == ("new", "started", {})
    write_json(tmp_path / "old" / LIVE_FILE, {"metrics": LINE, "skipped": []})
    told = "\n".join(training_lines(training(job)))
    assert "old: under way or interrupted" in told
    assert "step 40 of 100, loss 2.500, 0.75 tokens a round" in told
    assert "supply 900 tokens/s, demand 2,250, trained 900" in told
    assert "waits for data 60% of the time" in told
    write_json(tmp_path / "old" / STOPPED_FILE, "too many steps were skipped")
    assert training(job).state == "stopped: too many steps were skipped"
