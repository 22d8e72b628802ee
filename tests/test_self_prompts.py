"""Self-made prompts end to end on the embedded target: drawn, filtered, held out, resumed, and fit to be answered."""

import json
import random
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pytest

from domino_core.target import load_tokenizer
from pipelines.capture import CaptureConfig
from pipelines.prompts import TokenRow, prepare_row, read_prompts
from pipelines.regenerate import AnswerConfig
from pipelines.self_prompts import SelfPromptConfig, make_prompts, prompt_run
from pipelines.self_prompts_draw import PromptActor

CAPTURE = CaptureConfig(max_length=128, batch_size=8, max_num_seqs=8, kv_cache_bytes=64 << 20)
CONFIG = SelfPromptConfig(max_tokens=48, seed=3)


@pytest.fixture(scope="module")
def asked(embedded_target):
    """Makes a run into a folder."""

    def run(folder, num=10, heldout=3, capture=CAPTURE, name="prompts.jsonl", **changes):
        folder.mkdir(exist_ok=True)
        second = {"heldout": heldout, "heldout_output": folder / "heldout.jsonl"} if heldout else {}
        config = replace(CONFIG, **changes)
        files = {"output": folder / name, **second}
        return prompt_run(target=str(embedded_target), num=num, config=config, capture=capture, **files)

    return run


@pytest.fixture(scope="module")
def engine(asked, tmp_path_factory):
    """Draws parts with one engine in this process; `engine.parts` counts what it was asked for."""
    actor = PromptActor(asked(tmp_path_factory.mktemp("engine")))

    def draw(run, missing):
        actor.run = run
        for part in missing:
            draw.parts.append((part.offset, part.num_rows))
            yield actor(pa.Table.from_pylist([asdict(part)]))

    draw.parts = []
    return draw


@pytest.fixture(scope="module")
def whole(asked, engine, tmp_path_factory):
    """A run without interruption: its folder."""
    folder = tmp_path_factory.mktemp("whole")
    steps = list(make_prompts(asked(folder), engine))
    assert steps[-1][0] == 13
    assert [draws for _, draws in steps[:-1]] == [8 * (i + 1) for i in range(len(steps) - 1)]
    return folder


def texts(path) -> list[str]:
    return [row["messages"][-1]["content"] for row in read_prompts(path)]


@pytest.mark.slow
def test_what_is_written_can_be_answered(whole, embedded_target):
    tokenizer = load_tokenizer(str(embedded_target))
    rows = [*read_prompts(whole / "prompts.jsonl"), *read_prompts(whole / "heldout.jsonl")]
    assert (len(rows), len({row["sample_id"] for row in rows})) == (13, 13)
    for row in rows:
        (turn,) = row["messages"]
        assert turn["role"] == "user"
        found = prepare_row(row, tokenizer, AnswerConfig(), CAPTURE)
        assert isinstance(found, TokenRow)
        assert found.needs_answer
        assert tokenizer.decode(found.input_ids).startswith(f"<|im_start|>user\n{turn['content']}<|im_end|>")
    # The target was trained on Python and writes it.
    assert sum(row["messages"][0]["content"].startswith(("def ", "class ", "import ", "@")) for row in rows) >= 10


@pytest.mark.slow
def test_the_info_has_settings_counts_examples_and_figures(whole, asked):
    info = json.loads((whole / "prompts.jsonl.info.json").read_text())
    assert info["asked"] == json.loads(json.dumps(asked(whole).asked))
    assert (info["asked"]["num"], info["asked"]["heldout"], info["asked"]["temperature"]) == (10, 3, 1.0)
    assert (info["prefix"], info["end"]) == ("<|im_start|>user\n", "<|im_end|>")
    counts = dict(info["counts"])
    draws, kept = counts.pop("draws"), counts.pop("kept")
    assert (kept, sum(counts.values())) == (13, draws - 13)
    assert counts["unfinished"] > 0  # 48 tokens are few for this target
    assert len(info["examples"]["unfinished"]) == min(3, counts["unfinished"])
    assert info["statistics"]["yield"] == round(13 / draws, 4)
    assert info["statistics"]["tokens"]["max"] < CONFIG.max_tokens
    assert asked(whole).summary().startswith(f"13 prompts of {draws} draws (")


@pytest.mark.slow
def test_batches_and_interruptions_change_nothing(whole, asked, engine, tmp_path):
    # Interrupted twice, in batches of other sizes; the second time a part that was being written is half there.
    for size, parts in ((5, 2), (3, 1)):
        steps = make_prompts(asked(tmp_path, capture=replace(CAPTURE, batch_size=size)), engine)
        for _ in range(parts):
            next(steps)
        steps.close()
        assert not (tmp_path / "prompts.jsonl").exists()
        (tmp_path / "prompts.jsonl.draws" / ".000000015-5.jsonl.7.tmp").write_text('{"index": 15, "tok')
    assert sorted(path.name for path in (tmp_path / "prompts.jsonl.draws").glob("0*")) == [
        "000000000-5.jsonl", "000000005-5.jsonl",
    ]  # fmt: skip
    engine.parts.clear()
    list(make_prompts(asked(tmp_path), engine))
    assert engine.parts[0] == (10, 8)  # nothing is drawn twice
    for name in ("prompts.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_text() == (whole / name).read_text()
    before, after = (json.loads((f / "prompts.jsonl.info.json").read_text()) for f in (whole, tmp_path))
    for info in (before, after):
        del info["asked"]["heldout_output"]
    assert before == after


@pytest.mark.slow
def test_the_same_command_draws_nothing_and_more_prompts_only_what_is_missing(whole, asked, engine, tmp_path):
    list(make_prompts(asked(tmp_path), engine))
    (tmp_path / "prompts.jsonl").unlink()
    engine.parts.clear()
    list(make_prompts(asked(tmp_path), engine))
    assert engine.parts == []
    assert (tmp_path / "prompts.jsonl").read_text() == (whole / "prompts.jsonl").read_text()
    list(make_prompts(asked(tmp_path, num=20), engine))
    assert engine.parts
    # The held-out ones and the first ten stay.
    assert texts(tmp_path / "prompts.jsonl")[:10] == texts(whole / "prompts.jsonl")
    assert (tmp_path / "heldout.jsonl").read_text() == (whole / "heldout.jsonl").read_text()
    # Another filter goes over the draws that are there.
    longest = max(json.loads(line)["index"] for line in "".join(map(_read, tmp_path.glob("*.draws/*"))).splitlines())
    engine.parts.clear()
    list(make_prompts(asked(tmp_path, num=3, heldout=0, min_tokens=12), engine))
    assert engine.parts == []
    assert longest > 10
    assert len(texts(tmp_path / "prompts.jsonl")) == 3


def _read(path) -> str:
    return path.read_text()


@pytest.mark.slow
def test_a_draw_stops_where_the_turn_ends(asked, engine, embedded_target, tmp_path):
    # Which need not be where the target's answers end: here, after a line.
    (newline,) = load_tokenizer(str(embedded_target))("\n")["input_ids"]
    run = asked(tmp_path, num=2, heldout=0)
    run = replace(run, turn=replace(run.turn, end_ids=frozenset({newline, 2, 0})))
    list(make_prompts(run, engine))
    drawn = [json.loads(line) for path in run.draws.iterdir() for line in path.read_text().splitlines()]
    stopped = [draw["token_ids"] for draw in drawn if newline in draw["token_ids"]]
    assert stopped
    assert all(tokens.index(newline) == len(tokens) - 1 for tokens in stopped)


@pytest.mark.slow
def test_seed_and_evaluation_prompts(whole, asked, engine, tmp_path):
    list(make_prompts(asked(tmp_path / "seed", num=4, heldout=0, seed=4), engine))
    assert not set(texts(tmp_path / "seed" / "prompts.jsonl")) & set(texts(whole / "prompts.jsonl"))
    exclude = (str(whole / "prompts.jsonl"), str(whole / "heldout.jsonl"))
    list(make_prompts(asked(tmp_path / "excluded", name="p.parquet", exclude=exclude), engine))
    found = [*texts(tmp_path / "excluded" / "p.parquet"), *texts(tmp_path / "excluded" / "heldout.jsonl")]
    assert len(found) == 13
    assert not set(found) & {*texts(exclude[0]), *texts(exclude[1])}
    assert json.loads((tmp_path / "excluded" / "p.parquet.info.json").read_text())["counts"]["excluded"] == 13


@pytest.mark.slow
def test_a_low_yield_ends_with_the_counts(asked, engine, tmp_path):
    run = asked(tmp_path, num=10, heldout=0, max_draws=12)
    with pytest.raises(
        ValueError, match=r"10 prompts were asked for; \d prompts of 12 draws \(\d+.\d%\): .*unfinished"
    ):
        list(make_prompts(run, engine))
    assert not (tmp_path / "prompts.jsonl").exists()
    assert json.loads(run.info.read_text())["counts"]["draws"] == 12
    engine.parts.clear()
    list(make_prompts(asked(tmp_path, heldout=0), engine))
    assert engine.parts[0] == (12, 8)
    assert len(texts(tmp_path / "prompts.jsonl")) == 10


@pytest.mark.slow
@pytest.mark.cluster
def test_the_job_stops_its_engines_when_it_has_enough(local_ray, whole, embedded_target, tmp_path, capsys):
    from jobs.make_prompts import main

    arguments = ["--preset", "tiny", f"target={embedded_target}", "--num", "10", "--output", str(tmp_path / "p.jsonl")]
    arguments += ["--heldout", "3", "--heldout-output", str(tmp_path / "h.jsonl"), "self_prompts.seed=3"]
    arguments += ["self_prompts.max_tokens=48", "self_prompts.max_draws=4000", "capture.max_length=128"]
    arguments += ["capture.batch_size=8", "capture.max_num_seqs=8", f"capture.kv_cache_bytes={64 << 20}"]
    main([*arguments, "--plan"])
    assert "each goes on from '<|im_start|>user\\n', up to '<|im_end|>'" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
    main(arguments)
    # Through Ray and in another process, they are the same prompts.
    assert (tmp_path / "p.jsonl").read_text() == (whole / "prompts.jsonl").read_text()
    assert (tmp_path / "h.jsonl").read_text() == (whole / "heldout.jsonl").read_text()
    assert f"held out    3 prompts: {tmp_path / 'h.jsonl'}" in capsys.readouterr().out
    draws = sum(int(path.stem.split("-")[1]) for path in (tmp_path / "p.jsonl.draws").iterdir())
    assert draws <= 2 * 13


def test_what_cannot_be_done_is_refused_before_work(asked, embedded_target, tmp_path):
    whole: dict[str, Any] = {"target": str(embedded_target), "num": 5, "output": tmp_path / "p.jsonl"}
    whole.update(config=CONFIG, capture=CAPTURE)
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    for changes, message in (
        ({"num": 0}, "--num 0, --heldout 0: need at least one"),
        ({"heldout": 3}, "--heldout 3, --heldout-output None: give both or neither"),
        ({"heldout_output": tmp_path / "h.jsonl"}, "give both or neither"),
        ({"heldout": 3, "heldout_output": tmp_path / "p.jsonl"}, "name two files"),
        ({"output": tmp_path / "p.txt"}, "name it .jsonl or .parquet"),
        ({"capture": replace(CAPTURE, max_length=2048)}, "takes 2048 positions"),
        ({"capture": replace(CAPTURE, max_length=50)}, "3 tokens before a prompt leave 47 of capture.max_length=50"),
        ({"config": replace(CONFIG, exclude=("absent.jsonl",))}, "absent.jsonl: no such prompt file"),
        ({"config": replace(CONFIG, exclude=(str(tmp_path / "empty.jsonl"),))}, "no user says anything in it"),
    ):
        with pytest.raises(ValueError, match=r".") as error:
            prompt_run(**{**whole, **changes})
        assert message in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "need temperature > 0"),
        ({"top_p": 1.1}, "0 < top_p <= 1"),
        ({"max_tokens": 1, "min_tokens": 1}, "max_tokens > 1"),
        ({"longest": 3}, "min_tokens=4, longest=3, max_tokens=512"),
        ({"longest": 513}, "longest <= max_tokens"),
        ({"max_draws": 0}, "max_draws=0: expected at least 1"),
        ({"min_distinct": 1.5}, "expected a share"),
        ({"near_duplicate": 0.5}, "near_duplicate=0.5: expected 0.6 (below, pairs would be missed)"),
        ({"keep_system_prompt": True}, "without self_prompts.system_prompt"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=r".") as error:
        SelfPromptConfig(**changes)
    assert message in str(error.value)


def written(run, missing, text=lambda index: " ".join(f"{chr(97 + index % 26)}{index}{place}" for place in range(12))):
    """Parts as an engine would write them, of texts that no filter minds."""
    tokenizer = load_tokenizer(run.target)
    for part in missing:
        if run.enough.exists():
            return
        run.draws.mkdir(exist_ok=True)
        with (run.draws / f"{part.offset:09d}-{part.num_rows}.jsonl").open("w") as file:
            for index in range(part.offset, part.offset + part.num_rows):
                tokens = [*tokenizer(text(index))["input_ids"], 2]
                file.write(json.dumps({"index": index, "token_ids": tokens, "finish_reason": "stop"}) + "\n")
        yield part


def test_held_out_prompts_are_far_from_the_others(asked, tmp_path):
    def text(index):  # every second one from 30 on is a copy of an earlier one, but for its last word
        first = index - 30 if index >= 30 and index % 2 else index
        letters = random.Random(first)
        return " ".join([*("".join(letters.choices("bcdfghklmnprstvwxz", k=7)) for _ in range(12)), f"end{index}"])

    run = asked(tmp_path, num=40, heldout=15)
    list(make_prompts(run, lambda run, missing: written(run, missing, text)))
    assert json.loads(run.info.read_text())["counts"]["near_duplicate"] >= 15
    held, trained = (
        [set(words.split()) for words in texts(tmp_path / f"{name}.jsonl")] for name in ("heldout", "prompts")
    )
    assert (len(held), len(trained)) == (15, 40)
    assert max(len(a & b) for a in held for b in trained) == 0


def test_a_yield_below_half_starts_the_engines_again(asked, tmp_path):
    given, running = [], []

    def draw(run, missing):
        assert not running, "the engines before still hold their cards"
        running.append(missing)
        given.append([(part.offset, part.num_rows) for part in missing])
        yield from written(run, missing, lambda index: f"{'abcdefghijklmnopqrstuvw'[index // 3]} one two three")
        running.clear()

    steps = list(make_prompts(asked(tmp_path, num=9, heldout=0), draw))
    assert steps[-1] == (9, 25)
    # Eighteen draws are twice nine.
    assert given == [[(0, 8), (8, 8), (16, 2)], [(18, 8), (26, 8), (34, 2)]]
    assert not running


def test_what_is_there_already_is_not_overwritten(asked, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl is there already and was not made by this command"):
        asked(tmp_path)
    (tmp_path / "prompts.jsonl").unlink()
    (tmp_path / "heldout.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match=r"heldout\.jsonl is there already"):
        asked(tmp_path)
    (tmp_path / "heldout.jsonl").unlink()
    for record, said in (
        ('{"asked": {"when": "missing"}}', "belongs to another job"),
        ('{"asked": 3, "prefix": "<|im_start|>user"}', "belongs to another job"),
        ("[1]", "is damaged"),
    ):
        (tmp_path / "prompts.jsonl.info.json").write_text(record)
        with pytest.raises(ValueError, match=rf"info\.json {said}"):
            asked(tmp_path)
    (tmp_path / "prompts.jsonl.info.json").unlink()
    list(make_prompts(asked(tmp_path), written))
    for changes, named in (({"seed": 9}, "seed"), ({"top_k": 5, "max_tokens": 9}, "top_k, max_tokens")):
        with pytest.raises(ValueError, match=rf"begun with other settings \({named}\); give another output, or remove"):
            asked(tmp_path, **changes)
    asked(tmp_path, num=11, min_distinct=0.1)


def test_a_system_prompt_is_drawn_under_and_kept_if_asked(asked, tmp_path):
    system = {"role": "system", "content": "You teach maths."}
    for keep, before in ((False, []), (True, [system])):
        run = asked(tmp_path / str(keep), system_prompt="You teach maths.", keep_system_prompt=keep)
        assert run.turn.prefix == "<|im_start|>system\nYou teach maths.<|im_end|>\n<|im_start|>user\n"
        list(make_prompts(run, written))
        for row in read_prompts(run.output):
            assert row["messages"][:-1] == before


def test_a_run_goes_on_behind_the_text_that_it_began_with(asked, tmp_path):
    # As templates do that write the date.
    run = asked(tmp_path)
    list(make_prompts(run, written))
    before = (tmp_path / "prompts.jsonl").read_text()
    info = json.loads(run.info.read_text())
    run.info.write_text(json.dumps(info | {"prefix": "1 May\n" + info["prefix"]}))
    again = asked(tmp_path)
    assert again.turn.prefix == "1 May\n<|im_start|>user\n"
    assert len(again.turn.prefix_ids) > len(run.turn.prefix_ids)
    assert again.turn.stop_ids == run.turn.stop_ids
    list(make_prompts(again, written))
    # Ids tell draws of another text apart.
    assert (tmp_path / "prompts.jsonl").read_text() != before
    assert texts(tmp_path / "prompts.jsonl") == [
        json.loads(line)["messages"][0]["content"] for line in before.splitlines()
    ]
