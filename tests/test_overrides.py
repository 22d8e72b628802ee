"""Command lines: strict keys and types, required fields, paths, and answers without heavy imports."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from jobs import bench, compare_features, estimate, evaluate, make_prompts, quickstart, regenerate
from jobs.overrides import apply, describe, resolve, run_job, writable
from jobs.presets import JobConfig

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ["quickstart", "regenerate", "features", "train", "evaluate", "promote", "deploy", "estimate", "tiny_target"]
COMMANDS += ["bench", "make_prompts"]


@dataclass(frozen=True, kw_only=True)
class Section:
    steps: int | None = None
    rate: float = 0.1
    layers: tuple[int, ...] = (1, 2)
    mode: Literal["fast", "exact"] = "fast"
    on: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.rate > self.steps:
            raise ValueError(f"rate={self.rate} is more than steps={self.steps}")


@dataclass(frozen=True, kw_only=True)
class Whole:
    name: str = "x"
    train: Section = field(default_factory=Section)
    again: Section = field(default_factory=Section)


def test_values_are_parsed_by_type():
    got = apply(Whole(), ["name=a=b", "train.steps=3", "train.rate=1e-3", "train.layers=[3, 4]", "train.on=true"])
    assert got.name == "a=b"
    assert got.train == Section(steps=3, rate=1e-3, layers=(3, 4), on=True)
    assert got.again == Section()
    assert apply(got, ["train.steps=none", "train.mode=exact", "train.layers="]).train.layers == ()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stesp=1", "did you mean train.steps"),
        ("steps=1", "did you mean train.steps or again.steps"),
        ("zzz=1", "--plan lists every key"),
        ("train=1", "unknown key 'train'"),
        ("train.steps", "not key=value"),
        ("train.steps=many", "train.steps=many: expected a whole number"),
        ("train.steps=1.5", "expected a whole number"),
        ("train.rate=fast", "train.rate=fast: expected a number"),
        ("train.on=maybe", "train.on=maybe: expected true or false"),
        ("train.mode=slow", "train.mode=slow: expected one of fast, exact"),
        ("train.layers=1,a", "train.layers=a: expected a whole number"),
    ],
)
def test_what_is_wrong_is_named(override, said):
    with pytest.raises(ValueError, match=r".") as error:
        apply(Whole(), [override])
    assert said in str(error.value)


def test_a_number_or_a_word():
    assert apply(JobConfig(), ["serve.num_verify=auto"]).serve.num_verify == "auto"
    assert apply(JobConfig(), ["serve.num_verify=3"]).serve.num_verify == 3
    assert apply(JobConfig(), ["serve.num_verify=none"]).serve.num_verify is None
    with pytest.raises(ValueError, match=r"serve\.num_verify=most: expected a whole number"):
        apply(JobConfig(), ["serve.num_verify=most"])


def test_fields_of_a_section_are_checked_together():
    assert apply(Whole(), ["train.steps=1", "train.rate=0.5"]).train.rate == 0.5
    assert apply(Whole(), ["train.rate=5", "train.steps=9"]).train.steps == 9
    with pytest.raises(ValueError, match="more than steps=1"):
        apply(Whole(), ["train.rate=5", "train.steps=1"])


def test_description_lists_every_key():
    lines = describe(Whole()).splitlines()
    assert "name = x" in lines
    assert "again.layers = (1, 2)" in lines
    assert len(lines) == 11


def test_required_fields(tmp_path):
    with pytest.raises(ValueError, match=r"target= is required with --preset qwen3_8b .*Qwen/Qwen3-8B"):
        resolve(["--preset", "qwen3_8b"], None)
    with pytest.raises(ValueError, match="data= is required"):
        resolve(["--preset", "qwen3_8b", "target=Qwen/Qwen3-8B"], None)
    job, plan = resolve(["--preset", "qwen3_8b", "target=Qwen/Qwen3-8B", "data=p.jsonl", "--plan"], None)
    assert plan
    assert job.target == "Qwen/Qwen3-8B"


def test_local_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    job, _ = resolve(["target=some/model", "data=prompts.jsonl", "root=out"], None)
    assert (job.target, job.data, job.root) == ("some/model", str(tmp_path / "prompts.jsonl"), str(tmp_path / "out"))


def test_a_submitted_job_needs_an_absolute_root(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.delenv("DOMINO_HOME", raising=False)
    with pytest.raises(ValueError, match=r"root=runs is relative.*DOMINO_HOME"):
        resolve([], None)
    monkeypatch.setenv("DOMINO_HOME", str(tmp_path))
    assert resolve([], None)[0].root == str(tmp_path)
    # Inputs stay as they are: every node has its own copy of the working directory.
    assert resolve([], None)[0].data == "assets/tiny-qwen3/prompts/train.jsonl"


def test_user_errors_are_one_line_and_code_2(monkeypatch, capsys):
    def main(argv):
        raise ValueError(f"no {argv[0]}")

    monkeypatch.setattr(sys, "argv", ["job", "sense"])
    monkeypatch.delenv("DOMINO_TRACEBACK", raising=False)
    assert run_job(main) == 2
    assert capsys.readouterr().err.startswith("error: no sense\n")
    monkeypatch.setenv("DOMINO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no sense"):
        run_job(main)
    monkeypatch.setattr(sys, "argv", ["job"])
    assert run_job(lambda argv: 1) == 1
    assert run_job(lambda argv: None) == 0


def test_an_interrupt_is_one_word_and_code_130(monkeypatch, capsys):
    def main(argv):
        raise KeyboardInterrupt

    monkeypatch.delenv("DOMINO_TRACEBACK", raising=False)
    assert run_job(main) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setenv("DOMINO_TRACEBACK", "1")
    with pytest.raises(KeyboardInterrupt):
        run_job(main)


@pytest.mark.parametrize("words", [1, 100_000])  # in the buffer until the end, or more than a pipe holds
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_quietly_with_code_141(words, unbuffered):
    code = f"import sys; from jobs.overrides import run_job; sys.exit(run_job(lambda argv: print('word ' * {words})))"
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, b"")


def test_a_connection_that_breaks_is_no_closed_pipe(monkeypatch):
    def main(argv):
        raise BrokenPipeError("the other side has gone")

    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    with pytest.raises(BrokenPipeError):
        run_job(main)


def test_an_output_is_tried_and_left_as_it_was(tmp_path):
    kept, fresh, link = tmp_path / "kept.json", tmp_path / "new" / "er" / "fresh.json", tmp_path / "link.json"
    kept.write_text("as it was")
    link.symlink_to(tmp_path / "not yet.json")
    assert writable(kept) == kept
    assert writable(str(fresh)) == fresh
    assert writable(link) == link
    assert kept.read_text() == "as it was"
    assert fresh.parent.is_dir()
    assert not fresh.exists()
    assert link.is_symlink()
    assert not link.exists()


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (bench.main, ["--out"]),
        (compare_features.main, ["--out"]),
        (estimate.main, ["--json"]),
        (evaluate.main, ["--out"]),
        (quickstart.main, ["--result"]),
        (quickstart.main, ["--result", "fine.json", "--report"]),
        (make_prompts.main, ["--num", "5", "--output"]),
        (make_prompts.main, ["--num", "5", "--output", "fine.jsonl", "--heldout", "2", "--heldout-output"]),
        (regenerate.main, ["--output"]),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_work(main, flags, tmp_path, monkeypatch):
    inputs = [f"data={ROOT}/assets/tiny-qwen3/prompts/train.jsonl", f"target={ROOT}/assets/tiny-qwen3"]
    inputs += [f"eval_data={ROOT}/assets/tiny-qwen3/prompts/heldout.jsonl", f"root={tmp_path}/runs"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    (tmp_path / "folder.jsonl").mkdir()
    for path, reason in (("a file/out.jsonl", "(File exists|Not a directory)"), ("folder.jsonl", "Is a directory")):
        with pytest.raises(ValueError, match=f"{path} cannot be written: {reason}; name another file"):
            main([*inputs, *flags, path])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_answers_at_once(name):
    started = time.monotonic()
    command = [sys.executable, "-X", "importtime", "-m", f"jobs.{name}", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0
    assert run.stdout.startswith("usage:")
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert not imported & {"torch", "ray", "mlflow", "vllm", "transformers", "pyarrow"}
    assert time.monotonic() - started < 10
