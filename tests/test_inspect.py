"""jobs.inspect against the rows that training gets: the same tokens, counts and reasons, and the same refusals."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from domino_core.target import load_tokenizer
from jobs import inspect
from pipelines.build_features import feature_source, prepare_rows
from pipelines.capture import CaptureConfig
from pipelines.inspect_prompts import inspect_prompts, render_row
from pipelines.prompt_files import read_prompts
from pipelines.regenerate import AnswerConfig
from tests.chat_templates import HYBRID, small_tokenizer

FILES = Path(__file__).resolve().parent / "data" / "prompts"
ROOT = Path(__file__).resolve().parent.parent


def turn(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Rows of every fate: kept, answered first, cut, too long to answer, cut before their answer, wrong."""
    asked = turn("user", "def f(x):")
    rows = [
        {"id": "kept", "messages": [asked, turn("assistant", "    return x + 1")]},
        {"id": "open", "messages": [asked]},
        {"id": "cut", "messages": [asked, turn("assistant", "    return x + 1\n" * 40)]},
        {"id": "no-room", "messages": [turn("user", "import os\n" * 60)]},
        {"id": "no-anchor", "messages": [turn("user", "import os\n" * 60), turn("assistant", "yes")]},
        *({"id": f"fine-{i}", "messages": [asked, turn("assistant", "    return x")]} for i in range(12)),
        {"id": "tools", "tools": [{"name": "look"}], "messages": [asked, turn("assistant", "    return")]},
        {"id": "outside", "input_ids": [5, 10**7], "loss_mask": [0, 1]},
        {"id": "outside-2", "input_ids": [5, 6, 10**8], "loss_mask": [0, 1, 1]},
    ]
    path = tmp_path_factory.mktemp("data") / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = inspect.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_figures_are_those_of_the_rows_that_training_gets(capsys, mixed, embedded_target, tmp_path):
    code, out, _ = run(capsys, mixed, "--preset", "tiny", "--json", "capture.max_length=128")
    found = json.loads(out)
    assert code == 0
    # The stream's own preparation, with its own settings.
    source = feature_source(
        data=str(mixed),
        target=str(embedded_target),
        layer_ids=(1,),
        answer=AnswerConfig(max_tokens=128, temperature=0.0),
        capture=CaptureConfig(max_length=128, batch_size=128),
        events=tmp_path / "events",
    )
    trained = prepare_rows(read_prompts(mixed), source, load_tokenizer(embedded_target))
    assert found["usable"] == len(trained) == 15
    assert found["to_answer"] == sum(row["needs_answer"] for row in trained) == 1
    assert found["tokens"] == sum(len(row["input_ids"]) for row in trained)
    assert found["supervised"] == sum(sum(row["loss_mask"]) for row in trained)
    assert found["supervised_share"] == found["supervised"] / found["tokens"]
    assert (found["rows"], found["sampled"], found["truncated"]) == (20, 20, 1)
    assert found["roles"] == {"user": 18, "assistant": 16, "tokens": 2}
    assert found["refusal"] is None

    # One reason for what differs in figures only, with the first ids; nothing is lost.
    reasons = {drop["first_ids"][0]: drop for drop in found["dropped"].values()}
    assert set(reasons) == {"no-room", "no-anchor", "tools", "outside"}
    assert reasons["outside"]["first_ids"] == ["outside", "outside-2"]
    assert "mixed.jsonl:19: input_ids[1] is 10000000" in reasons["outside"]["reason"]
    assert sum(drop["count"] for drop in reasons.values()) + found["usable"] == found["sampled"]
    before, after = (sum(both[side] for both in found["lengths"].values()) for side in (0, 1))
    assert (before, after) == (17, 15)  # wrong rows have no length, dropped ones none after the cut
    assert found["lengths"]["up to 128"][1] == 1
    assert any("5 of 20 rows are dropped" in warning for warning in found["warnings"])


def test_text_for_people_marks_what_is_supervised(capsys, mixed, monkeypatch):
    code, out, err = run(capsys, mixed, "--preset", "tiny", "--rows", "2", "capture.max_length=128")
    assert (code, err) == (0, "")
    assert "--- kept: " in out
    assert "<|im_start|>assistant\n[[    return x + 1<|im_end|>]]\n" in out
    assert ", the target answers\n" in out
    assert "--- cut: " not in out
    assert "cut         1 rows at capture.max_length=128" in out
    assert "outside the vocabulary" in out
    assert "\033" not in out
    # On a terminal, green; with NO_COLOR, brackets there too.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = run(capsys, mixed, "--preset", "tiny", "--rows", "1", "capture.max_length=128")
    assert "\033[30;42m    return x + 1<|im_end|>\033[0m" in out
    assert "[[" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = run(capsys, mixed, "--preset", "tiny", "--rows", "1", "capture.max_length=128")
    assert "\033" not in out


def test_everything_wrong_in_a_file_is_told_at_once(capsys, tmp_path):
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"id": "a", "text": "x"})
    robots = [json.dumps({"id": f"r{i}", "messages": [{"role": f"robot{i}", "content": "x"}]}) for i in range(5)]
    path.write_text("\n".join([good, good, "{", *robots]) + "\n")
    code, out, err = run(capsys, path, "--preset", "tiny", "--json")
    found = json.loads(out)
    assert code == 1
    assert "error: training refuses the file until all its rows are in order" in err
    assert f"{path}:2: id 'a' is also on line 1" in err
    assert found["duplicate_ids"] == {"a": 2}
    counts = sorted((drop["count"], drop["first_ids"]) for drop in found["problems"].values())
    assert counts == [(1, ["a"]), (1, ["line 3"]), (5, ["r0", "r1", "r2"])]


def test_nothing_to_train_on_is_an_exit_code_with_its_reason(capsys, tmp_path, mixed):
    code, _, err = run(capsys, mixed, "--preset", "tiny", "num_rows=1", "capture.max_length=8")
    assert code == 1
    assert "error: none of 1 rows can be trained on; most often: no two neighbouring supervised tokens" in err
    # A wrong row among the first stops training before it starts: so says the trial, and so says this.
    path = tmp_path / "early.jsonl"
    path.write_text(json.dumps({"text": "no turns"}) + "\n" + mixed.read_text())
    code, _, err = run(capsys, path, "--preset", "tiny", "--sample", "1")
    assert code == 1
    assert f"training stops before it starts when one of the first 16 rows is wrong: {path}:1: no token is" in err
    with pytest.raises(ValueError, match="no such prompt file"):
        run(capsys, tmp_path / "absent.jsonl", "--preset", "tiny")
    with pytest.raises(ValueError, match="--sample 0"):
        run(capsys, mixed, "--sample", "0")


def inspected(name: str, **answer):
    tokenizer = small_tokenizer(HYBRID)
    return inspect_prompts(FILES / name, tokenizer, AnswerConfig(**answer), CaptureConfig(), keep=9), tokenizer


def test_thoughts_and_prompts_of_the_other_mode_are_warned_of():
    (found, rows), tokenizer = inspected("reasoning.jsonl", enable_thinking=False)
    assert (found.with_thoughts, found.thoughts_supervised) == (3, 3)
    assert found.not_as_served == ["r-1", "r-2", "r-3"]
    assert any("3 rows teach thoughts, but answer.enable_thinking=false" in text for text in found.warnings)
    assert any("do not begin with the prompt that serving sends" in text for text in found.warnings)
    shown = render_row(rows[0], tokenizer, colour=False)
    assert shown.endswith("assistant\n[[<think>\n7 times 13 is 91.\n</think>\n\nNo.<|im_end|>]]\n")

    (found, _), _ = inspected("reasoning.jsonl", enable_thinking=True)
    assert (found.not_as_served, found.warnings) == ([], [])
    (found, rows), tokenizer = inspected("sharegpt.json", enable_thinking=True)
    assert any("2 rows have answers without a thought" in text for text in found.warnings)
    assert "<think>\n\n</think>\n\n[[Only at weekends.<|im_end|>]]" in render_row(rows[1], tokenizer, colour=False)
    (found, _), _ = inspected("tools.jsonl", enable_thinking=True)
    assert (found.with_tools, found.usable) == (2, 2)
    (found, _), _ = inspected("tools.jsonl", when="always")
    assert (found.to_answer, found.supervised) == (2, 0)


def test_long_stretches_are_shortened():
    (_, rows), tokenizer = inspected("conversations.jsonl")
    whole = render_row(rows[0], tokenizer, colour=False)
    assert "[[Two minutes at 80 degrees.<|im_end|>]]" in whole
    short = render_row(rows[0], tokenizer, colour=False, limit=12)
    assert "[[Two mi …24 characters… _end|>]]" in short


HOSTILE = "\033[2J\033]0;title\a\x9b1m\r\x7f\u202egpj.\u2066\ufeff"


def test_nothing_from_a_file_reaches_the_terminal_raw(capsys, tmp_path):
    path = tmp_path / "hostile.jsonl"
    asked = [turn("user", f"a{HOSTILE}\tb\nc"), turn("assistant", "woman \U0001f469\u200d\U0001f52c é")]
    rows = [
        {"id": f"{HOSTILE}\nrows        9", "messages": asked},
        {"id": "broken", "messages": [turn("user", "\ud800"), turn("assistant", "x")]},
        {"id": "half \udfff", "messages": asked},
        {"id": f"t{HOSTILE}", "input_ids": [5], "loss_mask": [1], HOSTILE: 1},
        {"id": f"t{HOSTILE}", HOSTILE: 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = run(capsys, path, "--preset", "tiny")
    assert code == 1
    assert not {character for character in out + err if not character.isprintable()} - set("\n\t\u200d")
    first = out.splitlines()[0]
    assert first.startswith(r"--- \x1b[2J\x1b]0;title\x07\x9b1m\r\x7f\u202egpj.\u2066\ufeff\nrows        9: ")
    assert "\\u2066\\ufeff\tb\nc" in out
    assert "woman \U0001f469\u200d\U0001f52c é" in out
    assert ":2: turn 1 contains an unpaired surrogate" in out
    assert ":3: id contains an unpaired surrogate" in out
    assert r"[half \udfff]" in out


def test_a_terminal_without_unicode_gets_escapes(tmp_path, monkeypatch):
    path = tmp_path / "tea.jsonl"
    path.write_text(json.dumps({"id": "thé", "messages": [turn("user", "☕?"), turn("assistant", "yes")]}) + "\n")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert inspect.main([str(path), "--preset", "tiny"]) == 0
    printed = written.getvalue().decode("ascii")
    assert printed.startswith(r"--- th\xe9: ")
    assert r"\u2615?" in printed


def test_one_file_and_no_folder(capsys, tmp_path, mixed):
    for words in (["a.jsonl", "b.jsonl"], ["a.jsonl", "data=b.jsonl"]):
        with pytest.raises(ValueError, match=r"2 prompt files, a\.jsonl and b\.jsonl: give one"):
            run(capsys, *words)
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"dir\.jsonl is a folder"):
        run(capsys, tmp_path / "dir.jsonl")


@pytest.mark.parametrize(("token", "said"), [(True, r"True \(bool\)"), (3.0, r"3\.0 \(float\)"), ("3", r"'3' \(str\)")])
def test_tokens_of_a_wrong_type_are_told_by_it(tmp_path, token, said):
    path = tmp_path / "tokens.jsonl"
    path.write_text(json.dumps({"id": "a", "input_ids": [5, 6, token], "loss_mask": [0, 1, 1]}))
    found, _ = inspect_prompts(path, small_tokenizer(HYBRID), AnswerConfig(), CaptureConfig())
    (dropped,) = found.dropped.values()
    assert re.search(rf"tokens\.jsonl:1: input_ids\[2\] is {said}; tokens are whole numbers", dropped.reason)


def test_the_readme_shows_what_the_command_prints(capsys):
    _, out, _ = run(capsys, FILES / "conversations.jsonl", "--preset", "tiny")
    shown = (ROOT / "README.md").read_text().partition("--- tea-2: ")[2].partition("```")[0].splitlines()
    assert len(shown) == 8
    assert all(line in out for line in shown if line != "…"), shown


def test_the_command_needs_neither_ray_nor_vllm(mixed):
    """In a process of its own, in which importing either is an error."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('ray', 'vllm', 'mlflow'))); from jobs import inspect; "
        f"sys.exit(inspect.main([{str(mixed)!r}, '--preset', 'tiny', '--rows', '0', '--sample', '2']))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("rows        20, tokens of the first 2: 1 with answers, 1 that the target answers")
