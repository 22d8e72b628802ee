"""What would end the experiment late, or mix what does not belong together, is said before anything is trained."""

import json

import numpy as np
import pytest
import torch

from domino_core.atomic_files import sole_writer
from domino_core.target import target_hash
from jobs import smollm2
from pipelines import experiment_run
from pipelines.experiment_data import Conversation, Conversations, info_file, read_conversations, write_conversations
from pipelines.experiment_run import RunPlan, open_setting, run_all, weights_file

ROWS = tuple(Conversation(prompt_ids=(1, 2, 3 + i), answer_ids=(9, 8, 7, 6, 5)) for i in range(6))


@pytest.fixture
def data(tmp_path, embedded_target):
    path = tmp_path / "data.npz"
    write_conversations(
        path, Conversations(rows=ROWS, num_heldout=2), {"target_hash": target_hash(embedded_target)}
    )  # fmt: skip
    return path


@pytest.fixture
def common(data, embedded_target):
    return ["--target", str(embedded_target), "--data", str(data), "--device", "cpu", "--tiny", "--steps", "1"]


@pytest.fixture
def run(common, tmp_path, monkeypatch):
    """`run` of one arm with further flags; nothing may be trained."""

    def refuse(*args, **kwargs):
        raise AssertionError("work was begun")

    def call(*flags: str, trains: bool = False) -> None:
        open_setting.cache_clear()  # a process reads its files once
        with monkeypatch.context() as patch:
            if not trains:
                patch.setattr("pipelines.experiment_run.train_arm", refuse)
            usual = ["--out", str(tmp_path / "result.json"), "--work", str(tmp_path / "work"), "--seeds", "1"]
            smollm2.main(["run", *common, *usual, "--arms", "dflash", *flags])

    return call


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts | {"lengths": parts["lengths"].astype(float)},
        lambda parts: parts | {"prompts": parts["prompts"][:-1]},
        lambda parts: parts | {"prompts": 0 * parts["prompts"]},
        lambda parts: parts | {"heldout": np.array([1, 2])},
    ],
    ids=["fractions", "one less", "no prompts", "two numbers"],
)
def test_archives_that_describe_no_conversations_are_refused(data, change):
    with np.load(data) as archive:
        parts = dict(archive)
    np.savez(data, **change(parts))
    with pytest.raises(ValueError, match="damaged"):
        read_conversations(data)


def test_damaged_archives_are_refused(data, tmp_path):
    whole = data.read_bytes()
    np.save(tmp_path / "array.npy", np.arange(3))
    contents = {"short": whole[:-30], "changed": whole[:60] + bytes(20) + whole[80:], "empty": b""}
    contents["array"] = (tmp_path / "array.npy").read_bytes()
    for content in contents.values():
        data.write_bytes(content)
        with pytest.raises(ValueError, match="holds no packed conversations"):
            read_conversations(data)


def test_data_of_another_target_is_refused(data, run):
    described = json.loads(info_file(data).read_text())
    info_file(data).write_text(json.dumps(described | {"target_hash": "0123"}))
    with pytest.raises(ValueError, match="was made by target 0123"):
        run()
    info_file(data).write_text("[]")
    with pytest.raises(ValueError, match=r"data\.info\.json is damaged"):
        run()
    foreign = (*ROWS[1:], Conversation(prompt_ids=(1,), answer_ids=(2, 60_000)))
    write_conversations(data, Conversations(rows=foreign, num_heldout=2), {})
    with pytest.raises(ValueError, match="token 60000"):
        run()


def test_prompts_that_cannot_be_measured_on_are_refused_first(data, run, tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    row = json.dumps({"messages": [{"role": "user", "content": "a b"}]})
    long = json.dumps({"messages": [{"role": "user", "content": "word " * 5000}]})
    cases = {
        row + '\n{"messages"': "line 2",
        "[1]": "line 1",
        '{"text": "x"}': "line 1",
        "": "none of 0",
        long: "none of 1",
    }
    for text, said in cases.items():
        (folder / "set.jsonl").write_text(text)
        with pytest.raises(ValueError, match=said):
            run("--eval", str(folder))
    # JSON leaves such ends of lines inside of texts.
    (folder / "set.jsonl").write_text(row.replace("a b", "a\u2028b") + "\n")
    run("--eval", str(folder), "--plan")
    (folder / "set.jsonl").rename(folder / "heldout.jsonl")
    with pytest.raises(ValueError, match="rename it"):
        run("--eval", str(folder))
    write_conversations(data, Conversations(rows=ROWS, num_heldout=0), {})
    with pytest.raises(ValueError, match="heldout: none of 0 prompts"):
        run()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"runs": {"arm": 3}}', '{"runs": [1], "data": {}, "measure": {}}']
)
def test_a_file_that_is_no_result_stays(run, tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ValueError, match="name another file"):
        run()
    assert (tmp_path / "result.json").read_text() == content


@pytest.mark.parametrize(
    "change",
    [{"speed": None}, {"commands": 3}, {"runs": {"dflash/0": None}}, {"runs": {"dflash/0": {}}}],
    ids=["speed", "commands", "tau", "acceptance"],
)
def test_a_result_with_a_damaged_part_stays(run, tmp_path, change):
    run(trains=True)
    file = tmp_path / "result.json"
    result = json.loads(file.read_text())
    if "runs" in change:  # what τ is
        change = {"runs": {key: result["runs"][key] | {"tau": tau} for key, tau in change["runs"].items()}}
    file.write_text(json.dumps(result | change))
    for call in (run, lambda: smollm2.main(["table", "--out", str(file)])):
        with pytest.raises(ValueError, match=r"result\.json is damaged"):
            call()
    assert json.loads(file.read_text()) == result | change
    del result["arms"]  # which follows from the runs
    file.write_text(json.dumps(result))
    smollm2.main(["table", "--out", str(file)])


def test_two_runs_do_not_write_one_result(run, tmp_path):
    with sole_writer(tmp_path / "result.json"):
        with pytest.raises(ValueError, match="being written by another run"):
            run()
        run("--plan")
    run(trains=True)
    assert sorted(each.name for each in tmp_path.iterdir() if "result" in each.name) == ["result.json"]


def test_a_result_goes_on_only_with_what_it_began_with(data, run, tmp_path):
    run(trains=True)
    before = (tmp_path / "result.json").read_text()
    run()  # all is there
    assert json.loads((tmp_path / "result.json").read_text())["runs"] == json.loads(before)["runs"]
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "set.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    with pytest.raises(ValueError, match=r"dflash/0\.train\.steps: 1, now 2"):
        run("--steps", "2")
    with pytest.raises(ValueError, match="prompts of dflash/0"):
        run("--eval", str(folder))
    write_conversations(data, Conversations(rows=ROWS[::-1], num_heldout=2), {})
    with pytest.raises(ValueError, match=r"data\.digest"):
        run()


def test_speed_is_not_measured_of_weights_that_another_result_left(run, tmp_path, monkeypatch):
    run(trains=True)
    result = json.loads((tmp_path / "result.json").read_text())
    del result["speed"]
    plan = RunPlan(target="", data="", work=str(tmp_path / "work"))
    monkeypatch.setattr(
        "pipelines.experiment_run.speeds", lambda plan, seeds: {name: {"speedup": 1.0} for name in seeds}
    )
    assert list(run_all(plan, [("dflash", 0)], json.loads(json.dumps(result)), lambda: None)) == ["dflash ×1.00"]
    weights_file(plan, "dflash", 0).write_bytes(b"of another result's run")
    assert list(run_all(plan, [("dflash", 0)], result, lambda: None)) == []


def test_a_run_that_fails_does_not_end_the_others(run, tmp_path, monkeypatch, capsys):
    def run_some(plan, name, seed):
        if name == "dflash":
            raise torch.OutOfMemoryError("no room for 768 MiB")
        return trained(plan, name, seed)

    trained = experiment_run.run_one
    monkeypatch.setattr(experiment_run, "run_one", run_some)
    with pytest.raises(RuntimeError, match="1 of 2 runs failed; the same command repeats them"):
        run("--arms", "dflash,domino_both", trains=True)
    assert "dflash/0 failed: OutOfMemoryError no room for 768 MiB" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "result.json").read_text())["runs"]) == ["domino_both/0"]


def test_flags_that_would_lose_a_training_are_refused_first(run, common, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="cannot be written"):
        run("--work", str(tmp_path / "file"))
    for minutes in ("nan", "-1"):
        with pytest.raises(ValueError, match="--minutes"):
            run("--minutes", minutes)
    with pytest.raises(ValueError, match=r"train\.seed must be between"):
        run("--arms", f"dflash/{1 << 63}")
    monkeypatch.setattr("pipelines.experiment_train.train_arm", lambda *args, **kwargs: pytest.fail("work was begun"))
    for place, said in (("file", "is no folder"), (".", "holds"), ("file/below", "cannot be written")):
        with pytest.raises(ValueError, match=said):
            smollm2.main(["train", *common, "--out", str(tmp_path / place)])
    assert (tmp_path / "file").read_text() == "precious"
