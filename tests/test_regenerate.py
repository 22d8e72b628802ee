"""Regenerated answers on disk: every row is one of three, nothing answered is lost or given to another prompt."""

import json
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest

from domino_core.target import load_tokenizer
from pipelines import regenerate as module
from pipelines.answer_files import prompt_hash
from pipelines.capture import Answer, CaptureConfig
from pipelines.regenerate import AnswerConfig, answer_run, regenerate, thinking_mode
from tests.chat_templates import HYBRID, INSTRUCT, THINKING, small_tokenizer

CAPTURE = CaptureConfig(max_length=96, batch_size=2)
PROMPTS = [{"id": f"r{number}", "messages": [{"role": "user", "content": f"def f{number}():"}]} for number in range(5)]
LONG = {"id": "long", "messages": [{"role": "user", "content": "import os\n" * 60}]}
ALONE = {"id": "alone", "messages": [{"role": "assistant", "content": "nobody asked"}]}


class Echo:
    """In the place of an engine: answers with the last tokens of a prompt. `asked` counts the prompts."""

    asked = 0

    def __init__(self, *arguments) -> None:
        pass

    def answer(self, prompts, keys, config):
        type(self).asked += len(prompts)
        return [Answer(token_ids=[*prompt[-6:-3], 2], finish_reason="stop") for prompt in prompts]


@pytest.fixture
def run(embedded_target, tmp_path, monkeypatch):
    """Writes rows and answers them into `output`; `stop` interrupts after so many batches."""
    import pyarrow as pa

    def on_engines(dataset, actor, config, **settings):
        engine = actor(**settings)
        tables = [engine(pa.Table.from_pylist([chunk])) for chunk in dataset]
        return type("Stream", (), {"iter_batches": lambda self, **options: iter(tables)})()

    monkeypatch.setattr(module, "TargetActor", Echo)
    monkeypatch.setattr(module, "chunk_dataset", lambda chunks: [chunk.__dict__ for chunk in chunks])
    monkeypatch.setattr(module, "on_engines", on_engines)

    def answered(rows, output="a.jsonl", num_rows=None, **changes: Any):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = replace(AnswerConfig(max_tokens=12), **changes)
        Echo.asked = 0
        files = {"data": str(tmp_path / "rows.jsonl"), "output": tmp_path / output, "num_rows": num_rows}
        made = answer_run(target=str(embedded_target), answer=settings, capture=CAPTURE, **files)
        return list(regenerate(made)), json.loads(made.info.read_text())

    return answered


def ids(path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_every_row_is_counted_once(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "prompt_chunks", _unchecked(module.prompt_chunks))
    steps, info = run([*PROMPTS[:3], LONG, ALONE, *PROMPTS[3:]])
    assert sum(steps) == 7
    assert info["counts"] == {"rows": 7, "answered": 5, "skipped": 1, "failed": 1, "finish_stop": 5}
    assert "leaves 94" in info["skipped"]["long"]
    assert "no user turn" in info["failed"]["alone"]
    assert ids(tmp_path / "a.jsonl") == ["r0", "r1", "r2", "r3", "r4"]
    # Rows that were refused and are no longer there are no longer counted; others join.
    steps, info = run([*PROMPTS, {**PROMPTS[0], "id": "new"}])
    assert (steps[0], Echo.asked) == (5, 1)
    assert info["counts"] == {"rows": 6, "answered": 6, "skipped": 0, "failed": 0, "finish_stop": 6}
    assert (info["skipped"], info["failed"]) == ({}, {})


def _unchecked(prompt_chunks):
    """Chunks without the trial of the first rows, so that a bad one comes as far as the engines."""

    def chunks(data, rows_per_chunk=256, num_rows=None):
        return prompt_chunks(data, 1 if rows_per_chunk == 16 else rows_per_chunk, num_rows)

    return chunks


def test_a_repaired_row_is_answered_after_all(run, monkeypatch):
    monkeypatch.setattr(module, "prompt_chunks", _unchecked(module.prompt_chunks))
    _, info = run([*PROMPTS[:2], LONG, ALONE])
    assert (info["counts"]["skipped"], info["counts"]["failed"]) == (1, 1)
    # As they were, they need no engine.
    steps, _ = run([*PROMPTS[:2], LONG, ALONE])
    assert (steps, Echo.asked) == ([4], 0)
    _, info = run([*PROMPTS[:2], {**PROMPTS[2], "id": "long"}, {**PROMPTS[3], "id": "alone"}])
    assert (info["counts"]["answered"], Echo.asked) == (4, 2)


def test_an_answer_is_not_given_to_another_prompt(run, tmp_path):
    run(PROMPTS)
    before = (tmp_path / "a.jsonl").read_text()
    changed = {"id": "r3", "messages": [{"role": "user", "content": "def g():"}]}
    with pytest.raises(ValueError, match=r"rows\.jsonl:4: 'r3' has been answered with another prompt; give the row"):
        run([*PROMPTS[:3], changed, PROMPTS[4]])
    # Another answer in the row is no other prompt: it was not asked.
    told = {**PROMPTS[3], "messages": [*PROMPTS[3]["messages"], {"role": "assistant", "content": "pass"}]}
    run([*PROMPTS[:3], told, PROMPTS[4]])
    assert (tmp_path / "a.jsonl").read_text() == before


def test_answers_are_not_lost_to_fewer_or_other_prompts(run, tmp_path):
    run(PROMPTS)
    before = (tmp_path / "a.jsonl").read_text()
    with pytest.raises(ValueError, match=r"answers to 3 prompts that are not in the first 2 rows of .*'r2'.*be lost"):
        run(PROMPTS, num_rows=2)
    with pytest.raises(ValueError, match=r"answers to 5 prompts that are not in .*rows\.jsonl"):
        run([{**row, "id": f"other-{row['id']}"} for row in PROMPTS])
    assert run(PROMPTS)[0] == [5]
    assert (tmp_path / "a.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([], "is damaged: it holds no JSON object"),
        ({"asked": 3}, "belongs to another job"),
        ({"failed": 3}, "is damaged: expected"),
        ({"skipped": ["r1"]}, "is damaged: expected"),
    ],
    ids=["list", "asked", "failed", "skipped"],
)
def test_a_damaged_record_is_refused_by_name_before_an_engine_starts(run, tmp_path, monkeypatch, change, said):
    _, info = run(PROMPTS)
    record = tmp_path / "a.jsonl.info.json"
    record.write_text(json.dumps(info | change if change else change))
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "regenerate", lambda made: pytest.fail("an engine would start"))
        with pytest.raises(ValueError, match=rf"a\.jsonl\.info\.json {said}"):
            run(PROMPTS)
    record.write_text(json.dumps(info))
    assert run(PROMPTS)[0] == [5]


def test_what_is_not_its_own_is_left_alone(run, tmp_path, embedded_target):
    (tmp_path / "a.jsonl").write_text("mine\n")
    with pytest.raises(
        ValueError, match=r"a\.jsonl is there already, without a\.jsonl\.info\.json; give another output"
    ):
        run(PROMPTS)
    with pytest.raises(ValueError, match=r"data and output are both .*rows\.jsonl"):
        run(PROMPTS, output="rows.jsonl")
    (tmp_path / "p.jsonl.info.json").write_text('{"asked": {"num": 5}, "prefix": "<|im_start|>user"}')
    with pytest.raises(ValueError, match=r"info\.json belongs to another job"):
        run(PROMPTS, output="p.jsonl")
    run(PROMPTS, output="b.jsonl")
    with pytest.raises(
        ValueError, match=r"other settings \(temperature, seed\).*remove .*b\.jsonl, b\.jsonl\.info\.json and"
    ):
        run(PROMPTS, output="b.jsonl", temperature=0.1, seed=4)


def test_nothing_answered_says_why(run, tmp_path):
    with pytest.raises(ValueError, match=r"no prompt could be answered, so there is no .*; the first: prompt of"):
        run([LONG], output="a.jsonl")
    with pytest.raises(ValueError, match="no prompt could be answered"):
        run([LONG], output="a.parquet")
    assert not (tmp_path / "a.jsonl").exists()
    # Answered with it, the others can still come.
    assert run([LONG, *PROMPTS], output="a.parquet")[1]["counts"]["answered"] == 5
    hashes = pq.read_table(tmp_path / "a.parquet")["prompt_hash"].to_pylist()
    assert hashes == [prompt_hash({**row, "source": "f:1"}) for row in PROMPTS]
    assert run([LONG, *PROMPTS], output="a.parquet")[0] == [6]


def test_an_interrupted_run_goes_on(run, tmp_path, monkeypatch):
    run(PROMPTS, output="whole.jsonl")
    answer, calls = Echo.answer, []

    def twice(self, prompts, keys, config):
        calls.append(keys)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(self, prompts, keys, config)

    monkeypatch.setattr(Echo, "answer", twice)
    with pytest.raises(KeyboardInterrupt):
        run(PROMPTS)
    assert not (tmp_path / "a.jsonl").exists()
    with pytest.raises(ValueError, match=r"begun with other settings \(seed\)"):
        run(PROMPTS, seed=1)
    steps, info = run(PROMPTS)
    assert (steps[0], Echo.asked, info["counts"]["answered"]) == (4, 1, 5)
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [
        (HYBRID, "on", "off"),
        (INSTRUCT, "none (the chat template has no such mode)", "none (the chat template has no such mode)"),
        (THINKING, "always (by the chat template)", "always (by the chat template)"),
        (None, "none (no chat template)", "none (no chat template)"),
    ],
)
def test_thinking_is_what_the_template_makes_of_it(template, on, off):
    fast = small_tokenizer(HYBRID)
    fast.chat_template = template
    assert [thinking_mode(fast, True), thinking_mode(fast, False)] == [on, off]


def test_what_was_asked_is_recorded(run, embedded_target):
    from domino_core.target import target_hash, tokenizer_hash

    _, info = run(PROMPTS, temperature=0.3, top_p=0.9, top_k=7, seed=5)
    assert info["asked"] == {
        "target": str(embedded_target),
        "target_hash": target_hash(embedded_target),
        "tokenizer_hash": tokenizer_hash(load_tokenizer(embedded_target)),
        "max_length": 96,
        "max_tokens": 12,
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 5,
        "enable_thinking": False,
        "thinking": "none (the chat template has no such mode)",
    }


@pytest.mark.cluster
def test_engines_are_given_a_chunk_at_a_time(local_ray):
    # All at once would be one engine's work, and nothing would be on disk before the last answer.
    import pyarrow as pa

    from pipelines.capture import chunk_dataset, on_engines
    from pipelines.prompt_files import Chunk

    class Engine:
        def __call__(self, batch):
            return pa.table({"rows": [batch.num_rows]})

    chunks = [Chunk(path="x", offset=number, first_line=number, num_rows=128) for number in range(12)]
    calls = on_engines(chunk_dataset(chunks), Engine, CaptureConfig()).take_all()
    assert [call["rows"] for call in calls] == [1] * 12
