"""The stream end to end on the embedded target: answered, captured, written through, resumed, counted."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from domino_core.features import FeatureMeta, decode, read_meta
from pipelines import build_features as bf
from pipelines.batches import CachedFeatures
from pipelines.capture import CaptureConfig
from pipelines.capture_stream import Slice
from pipelines.feature_store import (
    Events,
    cached_rows,
    check_cache,
    read_events,
    read_ledger,
    read_manifest,
    record,
    write_ledger,
    write_manifest,
)
from pipelines.regenerate import AnswerConfig, answer_run, regenerate

LAYERS = (1, 6, 11)
CAPTURE = CaptureConfig(
    max_length=192, batch_size=5, max_num_seqs=16, kv_cache_bytes=64 << 20, slice_bytes=300_000, cpus_per_actor=1
)
ANSWER = AnswerConfig(max_tokens=12, temperature=1.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory, embedded_target):
    """Thirteen rows: six to answer, four with answers, one too long, two whose answers are of no use."""
    prompts = [json.loads(line) for line in (embedded_target / "prompts" / "train.jsonl").read_text().splitlines()]
    short = [row for row in prompts if len(row["messages"][0]["content"]) < 200][:10]
    rows = [{"id": f"open-{index}", "messages": row["messages"]} for index, row in enumerate(short[:6])]
    for index, row in enumerate(short[6:]):
        answered = [*row["messages"], {"role": "assistant", "content": "return None  # " + "x" * 20 * index}]
        rows.append({"id": f"given-{index}", "messages": answered})
    rows.append({"id": "too-long", "messages": [{"role": "user", "content": "import os\n" * 400}]})
    rows.append({"id": "no-pair", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]})
    rows.append({"id": "nothing", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 0]})
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(data, embedded_target, folder, **changes) -> bf.FeatureSource:
    settings = {"answer": ANSWER, "capture": CAPTURE, "events": folder / "events", "cache": folder / "cache"} | changes
    return bf.feature_source(data=str(data), target=str(embedded_target), layer_ids=LAYERS, **settings)


def test_rows_that_cannot_be_used_stop_the_run_before_it_starts(data, embedded_target, tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl:13: no token is supervised"):
        source_of(data, embedded_target, tmp_path)
    with pytest.raises(ValueError, match="no such prompt file"):
        source_of(tmp_path / "absent.jsonl", embedded_target, tmp_path)
    with pytest.raises(ValueError, match="layer 14 cannot be tapped"):
        bf.feature_source(
            data=str(data),
            target=str(embedded_target),
            layer_ids=(14,),
            answer=ANSWER,
            capture=CAPTURE,
            events=tmp_path,
        )
    with pytest.raises(ValueError, match=r"max_length=2048: .* takes 2048 positions"):
        source_of(data, embedded_target, tmp_path, capture=CaptureConfig(max_length=2048))
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.cluster
def test_stream_cache_resume_and_counts(local_ray, data, embedded_target, tmp_path, monkeypatch):
    monkeypatch.setattr(bf, "ROWS_TRIED_FIRST", 5)  # let the bad row reach the stream
    ledger = tmp_path / "ledger.json"
    source = source_of(data, embedded_target, tmp_path, ledger=ledger)
    stream = bf.feature_dataset(source, seed=3)
    # Written after the stream was built and before it runs: read at execution time.
    write_ledger(ledger, ["open-0", "given-1"])
    table = pa.concat_tables(stream.iter_batches(batch_size=None, batch_format="pyarrow"))
    expected = {f"open-{i}" for i in range(1, 6)} | {f"given-{i}" for i in (0, 2, 3)}
    assert sorted(table["sample_id"].to_pylist()) == sorted(expected)
    assert read_meta(table.schema) == source.meta

    events = read_events(source.events)
    assert events.captured == expected
    assert events.answered == {f"open-{i}" for i in range(1, 6)}
    assert set(events.skipped) == {"too-long", "no-pair"}
    assert "max_length=192" in events.skipped["too-long"]
    assert "rows.jsonl:13: no token is supervised" in events.failed["nothing"]
    assert events.summary().startswith("5 answered, 8 captured, 2 skipped, 1 failed\n  nothing: ")

    check_values(table, embedded_target)
    assert set(cached_rows(tmp_path / "cache")) == expected
    assert read_manifest(tmp_path / "cache") == source.meta
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".parquet", ".json"}

    # Going on: only what is missing is captured, and what is there already is the same row.
    write_ledger(ledger, cached_rows(tmp_path / "cache"))
    more = bf.feature_dataset(source).iter_batches(batch_size=None, batch_format="pyarrow")
    assert sorted(pa.concat_tables(more)["sample_id"].to_pylist()) == ["given-1", "open-0"]
    batches = list(CachedFeatures(tmp_path / "cache", batch_size=3, seed=0, epoch=0))
    assert sorted(i for batch in batches for i in batch.sample_ids) == sorted(expected | {"given-1", "open-0"})


def check_values(table: pa.Table, embedded_target) -> None:
    """Every row against transformers, in the precision that is stored."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(embedded_target, dtype=torch.float32)
    for row in range(table.num_rows):
        tokens = table["input_ids"][row].as_py()
        mask = table["loss_mask"][row].as_py()
        assert len(mask) == len(tokens) == table["num_tokens"][row].as_py()
        with torch.no_grad():
            states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        expected_SC = torch.cat([states[i + 1][0] for i in LAYERS], dim=-1)
        torch.testing.assert_close(decode(table["features"][row], len(tokens)), expected_SC, rtol=2**-7, atol=2e-3)
        if table["sample_id"][row].as_py().startswith("open-"):
            # The answer is the supervised end of the row, nothing else is.
            start = mask.index(1)
            assert mask[start:] == [1] * (len(mask) - start)
            assert len(mask) - start <= ANSWER.max_tokens


@pytest.mark.slow
@pytest.mark.cluster
def test_regenerating_writes_what_was_asked_and_goes_on(local_ray, data, embedded_target, tmp_path):
    rows = [line for line in data.read_text().splitlines() if json.loads(line)["id"] not in ("nothing", "no-pair")]
    some, everything = tmp_path / "some.jsonl", tmp_path / "rows.jsonl"
    output = tmp_path / "answers.jsonl"
    some.write_text("\n".join(rows[:4]))
    everything.write_text("\n".join(rows))

    def run(data, output=output, **changes):
        settings = AnswerConfig(**{"max_tokens": 12, "temperature": 1.0} | changes)
        return answer_run(data=str(data), target=str(embedded_target), output=output, answer=settings, capture=CAPTURE)

    assert sum(regenerate(run(some))) == 4
    first = output.read_text().splitlines()
    assert [json.loads(line)["id"] for line in first] == [json.loads(line)["id"] for line in rows[:4]]
    # More prompts join; the answers that are there stay, none comes twice.
    assert sum(regenerate(run(everything))) == 11
    lines = output.read_text().splitlines()
    assert lines[:4] == first
    assert [json.loads(line)["id"] for line in lines] == [
        json.loads(line)["id"] for line in rows if json.loads(line)["id"] != "too-long"
    ]
    info = json.loads((tmp_path / "answers.jsonl.info.json").read_text())
    assert info["counts"]["answered"] == 10
    assert set(info["skipped"]) == {"too-long"}
    assert (info["asked"]["temperature"], info["asked"]["enable_thinking"]) == (1.0, False)
    assert not (tmp_path / "answers.jsonl.parts").exists()
    # Nothing to do: nothing starts, nothing changes.
    assert list(regenerate(run(everything))) == [11]
    assert output.read_text().splitlines() == lines
    with pytest.raises(ValueError, match=r"begun with other settings \(max_tokens\)"):
        run(everything, max_tokens=13)
    check_answers(lines, embedded_target)


def check_answers(lines: list[str], embedded_target) -> None:
    """What was written can be trained on: the same tokens come back, and the text is what they say."""
    from domino_core.target import load_tokenizer, read_target_config
    from pipelines.prompts import answer_prompt, has_answer, normalise

    tokenizer = load_tokenizer(str(embedded_target))
    eos = read_target_config(str(embedded_target)).eos_token_ids
    for line in lines:
        row = json.loads(line) | {"sample_id": "x", "source": "f:1"}
        assert has_answer(row)
        found = normalise(row, tokenizer)
        start = found["loss_mask"].index(1)
        assert found["input_ids"][:start] == answer_prompt(row, tokenizer)
        answer = found["input_ids"][start:]
        assert row["finish_reason"] == ("stop" if answer[-1] in eos else "length")
        text = tokenizer.decode(answer[:-1] if answer[-1] in eos else answer)
        assert row["messages"][-1] == {"role": "assistant", "content": text}


def test_the_record_counts_a_row_once_and_forgives_what_came_right(tmp_path):
    record(tmp_path, Events(failed={"a": "no", "b": "no"}))
    record(tmp_path, Events(failed={"a": "no", "b": "no"}))
    record(tmp_path, Events(captured={"a"}, answered={"a"}))
    record(tmp_path, Events())
    events = read_events(tmp_path)
    assert (events.answered, events.captured, events.failed) == ({"a"}, {"a"}, {"b": "no"})
    assert len(list(tmp_path.iterdir())) == 2


def test_a_ledger_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "ledger.json"
    assert read_ledger(None) == read_ledger(path) == frozenset()
    write_ledger(path, ["a"])
    assert read_ledger(path) == {"a"}
    write_ledger(path, ["a", "b"])
    assert read_ledger(path) == {"a", "b"}
    path.write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"ledger\.json is no ledger"):
        read_ledger(path)


def test_a_cache_of_other_features_is_refused(tmp_path):
    meta = FeatureMeta(target="t", target_hash="a" * 64, layer_ids=(1, 2), hidden_size=4, tokenizer_hash="k")
    check_cache(tmp_path, meta)
    write_manifest(tmp_path, meta)
    check_cache(tmp_path, meta)
    for change, message in (
        ({"target_hash": "b" * 64}, "another target"),
        ({"layer_ids": [1, 3]}, r"layers \[1, 2\] were captured"),
        ({"tokenizer_hash": "z"}, "another tokenizer"),
        ({"dtype": "float8_e4m3fn", "format_version": 2}, "they are bfloat16, not float8_e4m3fn"),
    ):
        with pytest.raises(ValueError, match=message):
            check_cache(tmp_path, FeatureMeta.from_dict(meta.to_dict() | change))
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "x.parquet").touch()
    with pytest.raises(ValueError, match=r"without manifest\.json"):
        check_cache(tmp_path, meta)


def test_states_that_are_not_finite_fail_by_name(data, embedded_target, tmp_path, monkeypatch):
    class BrokenTarget:
        """Gives states as an engine whose numbers overflowed would."""

        dtype = "float16"

        def __init__(self, *arguments) -> None:
            pass

        def stream(self, parts, dtype):
            for sequences in parts:
                captured = Slice(sequences, (len(LAYERS), 192), dtype, pinned=False)
                for number, (tokens, receive) in enumerate(zip(sequences, captured.receivers(), strict=True)):
                    states_SLD = torch.full((len(tokens), len(LAYERS), 192), float(tokens[0]))
                    if number == 1:
                        states_SLD[3, 2, 7] = float("nan") if tokens[0] == 4 else float("-inf")
                    receive(tokens, states_SLD)
                yield captured

    monkeypatch.setattr(bf, "TargetActor", BrokenTarget)
    monkeypatch.setattr(bf, "ROWS_TRIED_FIRST", 5)
    source = source_of(data, embedded_target, tmp_path, capture=replace(CAPTURE, slice_bytes=15 * 3 * 192 * 2))
    events = Events()
    rows = [{"sample_id": name, "input_ids": [i] * 5, "loss_mask": [1] * 5} for i, name in enumerate("abcdefg")]
    tables = list(bf.FeatureActor(source, None).capture(rows, events))
    assert [table["sample_id"].to_pylist() for table in tables] == [["a", "c"], ["d", "f"], ["g"]]
    assert events.captured == set("acdfg")
    assert events.failed == dict.fromkeys("be", "hidden states are not finite in float16")
    for table in tables:
        for name, value in zip(table["sample_id"].to_pylist(), table["features"], strict=True):
            assert torch.equal(decode(value, 5), torch.full((5, 3 * 192), float("abcdefg".index(name))))


def test_the_job_refuses_a_cache_that_does_not_fit_before_it_starts(data, embedded_target, tmp_path, monkeypatch):
    import shutil

    from jobs.features import main

    arguments = ["--preset", "tiny", f"target={embedded_target}", f"data={data}", f"features={tmp_path / 'out'}"]
    monkeypatch.setattr(bf, "ROWS_TRIED_FIRST", 5)
    main([*arguments, "--plan"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"would take .* MB, 1\.0 kB are free: use another disk or fewer rows"):
        main(arguments)
    assert not any(tmp_path.iterdir())


def test_slices_keep_every_row_and_stay_small():
    rows = [{"input_ids": [0] * length} for length in (3, 3, 10, 1, 1, 1)]
    parts = [[len(row["input_ids"]) for row in part] for part in bf.slices(rows, 6)]
    assert parts == [[3, 3], [10], [1, 1, 1]]
