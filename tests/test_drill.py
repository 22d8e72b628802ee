"""How a drill that does not hold is told, and what the documents say of all of them; `.ci/run` has three for real."""

import json
from pathlib import Path

import psutil
import pytest

from jobs import drill
from jobs.drill_ground import Ground, Outcome
from jobs.drill_training import SMALL, described, ledger_problems, other_losses

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


def test_an_unknown_name_is_refused_and_a_list_is_printed(capsys):
    with pytest.raises(ValueError, match=r"no drill is called nothing; there are vllm-actor-killed, "):
        drill.main(["nothing"])
    assert drill.main(["--list", "disk-full"]) == 0
    assert "disk-full: The disk fills up" in capsys.readouterr().out


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
