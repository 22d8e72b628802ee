"""How a drill that does not hold is told, and what the documents say of all of them; `.ci/run` has three for real."""

import asyncio
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn
from starlette.responses import JSONResponse

from jobs import drill, drill_serving
from jobs.drill_ground import Ground, Outcome
from jobs.drill_load import HUNG, PROMPTS, Load, answers_since
from jobs.drill_training import SMALL, described, judged, ledger_problems, other_losses
from serve.config import ServeConfig
from serve.replica import EngineLoop
from serve.server import Server
from tests.serving import listening, wait_until

ROOT = Path(__file__).resolve().parent.parent
RESULT = json.loads((ROOT / "docs" / "results" / "drills.json").read_text())


@pytest.fixture
def drilled(tmp_path):
    def run(*names: str) -> tuple[int, dict]:
        out = tmp_path / "drills.json"
        code = drill.main([*names, "--out", str(out), "--report", str(tmp_path / "drills.html")])
        return code, json.loads(out.read_text())["drills"]

    return run


def breaks(ground: Ground) -> Outcome:
    """Everything is broken.

    Must hold: a process that
    is left is ended.

    Observed: here.
    """
    ground.start("left", "http.server", "0", "--bind", "127.0.0.1")
    ground.run("wrong", "json.tool", "--no-such-flag")
    return Outcome()


def loses(ground: Ground) -> Outcome:
    """Something is lost.

    Must hold: nothing is.

    Observed: by counting.
    """
    return Outcome(lost=1, seconds_to_recover=2.0)


def cannot(ground: Ground) -> Outcome:
    """Nothing can be shown.

    Must hold: that.

    Observed: not.
    """
    return Outcome(skipped="there is <no> way")


def test_what_does_not_hold_is_said_and_leaves_no_process(drilled, monkeypatch, capsys, tmp_path):
    for name, each in (("breaks", breaks), ("loses", loses), ("cannot", cannot)):
        monkeypatch.setitem(drill.DRILLS, name, each)
    before = {process.pid for process in psutil.process_iter()}
    code, found = drilled("breaks", "loses", "cannot")
    printed = capsys.readouterr().out
    assert code == 1
    assert [found[name]["held"] for name in ("breaks", "loses", "cannot")] == [False, False, False]
    (problem,) = found["breaks"]["problems"]
    assert "json.tool ended with 2, not 0" in problem
    assert "--no-such-flag" in problem
    assert problem in printed
    assert printed.count("DOES NOT HOLD") == 2
    assert "1 of 3 hold or are skipped" in printed
    left = [process for process in psutil.process_iter() if process.pid not in before]
    assert not [process for process in left if "http.server" in " ".join(process.cmdline())]
    page = (tmp_path / "drills.html").read_text()
    assert "a process that is left is ended." in page
    assert "there is &lt;no&gt; way" in page
    # Another run keeps what it does not repeat.
    monkeypatch.setitem(drill.DRILLS, "loses", cannot)
    code, found = drilled("loses")
    assert code == 0
    assert set(found) == {"breaks", "loses", "cannot"}
    assert found["loses"]["skipped"]


def test_what_is_set_for_the_users_own_registry_and_endpoint_is_not_a_drills(monkeypatch, tmp_path):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "DOMINO_API_KEY", "DOMINO_HOME"):
        monkeypatch.setenv(name, "the user's")
    ground = Ground(folder=tmp_path, inputs=tmp_path)
    assert "the user's" not in ground.environment().values()
    assert ground.environment(DOMINO_API_KEY="the drill's")["DOMINO_API_KEY"] == "the drill's"


def test_an_unknown_name_is_refused_and_a_list_is_printed(capsys):
    with pytest.raises(ValueError, match=r"no drill is called nothing; there are vllm-actor-killed, "):
        drill.main(["nothing"])
    assert drill.main(["--list", "disk-full"]) == 0
    assert "disk-full: The disk fills up" in capsys.readouterr().out


def test_whatever_a_drill_raises_does_not_hold_and_the_next_one_is_done(drilled, monkeypatch):
    for number, error in enumerate([subprocess.TimeoutExpired("train", 300), KeyError("live"), httpx.ReadTimeout("x")]):

        def raises(ground: Ground, error: Exception = error) -> Outcome:
            raise error

        raises.__doc__ = loses.__doc__
        monkeypatch.setitem(drill.DRILLS, f"raises-{number}", raises)
    monkeypatch.setitem(drill.DRILLS, "cannot", cannot)
    code, found = drilled("raises-0", "raises-1", "raises-2", "cannot")
    assert code == 1
    assert [found[f"raises-{number}"]["held"] for number in range(3)] == [False] * 3
    assert "TimeoutExpired" in found["raises-0"]["problems"][0]
    assert found["cannot"]["skipped"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"drills": []}', '{"drills": {"disk-full": {"held": true}}}'])
def test_a_file_of_something_else_is_refused_before_anything_is_done_and_stays(drilled, monkeypatch, tmp_path, content):
    monkeypatch.setitem(drill.DRILLS, "breaks", breaks)
    (tmp_path / "drills.json").write_text(content)
    with pytest.raises(ValueError, match=r"drills\.json"):
        drilled("breaks")
    assert (tmp_path / "drills.json").read_text() == content


@contextmanager
def answering(app) -> Iterator[str]:
    """An ASGI application where drills look for the endpoint."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def test_clients_see_answers_that_never_come_and_those_that_are_none():
    """Either was counted as nothing: a client that hung asked again, and one that raised was gone."""
    kind = "none"

    async def app(scope, receive, send):
        if scope["type"] == "http":
            if kind == "hangs":
                await asyncio.sleep(1.5)
            content = {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": []}
            await JSONResponse(content)(scope, receive, send)

    with answering(app) as url:
        load = Load(url=url, expected=dict.fromkeys(PROMPTS, "x"), patience=0.5)
        with load.running(clients=2):
            wait_until(lambda: len(load.wrong) > 2)
        assert "IndexError" in " ".join(load.wrong)
        kind, load = "hangs", Load(url=url, expected=dict.fromkeys(PROMPTS, "x"), timeout=0.3, patience=0.5)
        with load.running(clients=1):
            wait_until(lambda: bool(load.lost))
    found = drill_serving.served(load, 0.0, {}, drill_serving.REPLICA_GONE)
    assert f"a request got {HUNG}" in found.problems


@pytest.mark.parametrize("frees", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_rows_that_end_by_themselves_are_not_taken_for_freed_ones(embedded_target, tmp_path, monkeypatch, frees):
    server = Server(ServeConfig(target=str(embedded_target), drafter="none", max_rows=16, max_length=1024))

    @contextmanager
    def here(ground: Ground, *overrides: str) -> Iterator[str]:
        try:  # nothing runs on behind the test
            with listening(server) as url:
                yield f"{url}/v1"
        finally:
            server.close()

    monkeypatch.setattr(drill_serving, "endpoint", here)
    if not frees:
        monkeypatch.setattr(EngineLoop, "cancel", lambda self, ticket: None)
    found = drill.carried_out(drill_serving.client_disconnects, Ground(folder=tmp_path, inputs=tmp_path))
    assert found.held is frees, found
    assert frees or "answers take" in found.problems[0] or "the rows of clients that left" in found.problems[0]


def test_a_replica_is_known_by_when_it_began_to_answer(embedded_target):
    server = Server(ServeConfig(target=str(embedded_target), drafter="none", max_rows=4, max_length=256))
    then = time.time()
    with listening(server) as url:
        assert answers_since(f"{url}/v1") == 0
        load = Load(url=f"{url}/v1")
        load.learn()
        assert then < answers_since(f"{url}/v1") < time.time()
    assert answers_since(f"{url}/v1") == 0


def test_a_run_that_began_anew_is_told_from_one_that_went_on(tmp_path):
    """Its ledgers and its curve are those of a run that nothing happened to."""
    run_dir, books, ids = tmp_path / "run", [], [f"row-{number}" for number in range(48)]
    history = [{"step": step, "final_loss": 5.0 - step / 10} for step in range(1, 25)]
    for step in range(3, 25, 3):
        epoch, done = (0, step * 4) if step <= 12 else (1, step * 4 - 48)
        (run_dir / f"checkpoint_{step}").mkdir(parents=True)
        progress = {"step": step, "epoch": epoch, "samples": step * 4, "acknowledged": ids[:done]}
        content = json.dumps({"progress": progress | {"history": history[:step]}})
        (run_dir / f"checkpoint_{step}" / "progress.json").write_text(content)
        books.append({"checkpoint_dir_name": f"checkpoint_{step}"})
    (run_dir / "checkpoint_manager_snapshot.json").write_text(json.dumps({"checkpoint_results": books}))
    ground = Ground(folder=tmp_path, inputs=tmp_path)
    assert judged(ground, 0, history, 1.0, {}, ["checkpoint_3", "checkpoint_6"]).held
    found = judged(ground, 0, history, 1.0, {}, ["checkpoint_3", "checkpoint_of_before"])
    assert found.problems == ["began anew: checkpoint_of_before are not of the run's checkpoints any more"]


def test_ledgers_that_lie_are_seen(tmp_path):
    """A run's checkpoints as they should be, and with one id twice, one missing, one that is forgotten."""

    def written(change) -> list[str]:
        books, ids = [], [f"row-{number}" for number in range(48)]
        for step in range(3, 25, 3):
            epoch, done = (0, step * 4) if step <= 12 else (1, step * 4 - 48)
            ledger = change(step, ids[:done])
            folder = tmp_path / f"checkpoint_{step}"
            folder.mkdir(exist_ok=True)
            progress = {"step": step, "epoch": epoch, "samples": step * 4, "acknowledged": ledger}
            (folder / "progress.json").write_text(json.dumps({"progress": progress}))
            books.append({"checkpoint_dir_name": folder.name})
        (tmp_path / "checkpoint_manager_snapshot.json").write_text(json.dumps({"checkpoint_results": books}))
        return ledger_problems(tmp_path)

    assert written(lambda step, ids: ids) == []
    assert written(lambda step, ids: [*ids[:-1], ids[0]] if step == 24 else ids) == [
        "epoch 1: 1 samples skipped, 1 trained on twice"
    ]
    assert written(lambda step, ids: ids[1:] if step == 12 else ids) == [
        "the ledger of step 12 does not go on from that of step 9",
        "epoch 0: 1 samples skipped, 0 trained on twice",
    ]
    assert len(SMALL) > 4
    curve = [{"step": step, "final_loss": 5.0 - step} for step in (1, 2)]
    assert other_losses([curve[0], curve[1] | {"final_loss": 3.01}], curve) == [2]


def test_the_documents_have_every_drill_and_its_stored_result():
    page = (ROOT / "docs" / "operations.md").read_text()
    assert set(RESULT["drills"]) == set(drill.DRILLS)
    for name, each in drill.DRILLS.items():
        found = RESULT["drills"][name]
        what, holds, observed = described(each)
        verdict = "held" if found["held"] else f"skipped: {found['skipped']}"
        seconds = "" if found["seconds_to_recover"] is None else f", {found['seconds_to_recover']:.0f} s"
        assert f"| `{name}` | {what} | {holds} | {observed} | {verdict}{seconds} |" in page
