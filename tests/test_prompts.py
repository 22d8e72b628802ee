"""Rows of every shape become tokens with exactly the target's own words supervised, in both thinking modes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import prompts
from tests.chat_templates import HYBRID, small_tokenizer

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is two and two"}]
ONE_TURN = [*ASKED, {"role": "assistant", "content": "it is four"}]
TWO_TURNS = [*ONE_TURN, {"role": "user", "content": "and three"}, {"role": "assistant", "content": "seven\n"}]


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer(HYBRID)


def normal(row: dict, tokenizer, **options) -> dict:
    return prompts.normalise({"sample_id": "x", "source": "f.jsonl:1", **row}, tokenizer, **options)


def supervised(row: dict, tokenizer) -> list[str]:
    """The texts of the supervised runs."""
    runs, before = [], 0
    for token, value in zip(row["input_ids"], row["loss_mask"], strict=True):
        if value and not before:
            runs.append([])
        if value:
            runs[-1].append(token)
        before = value
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("enable_thinking", [False, True])
def test_only_the_answer_and_its_end_of_turn_are_supervised(tokenizer, enable_thinking):
    row = normal({"messages": ONE_TURN}, tokenizer, enable_thinking=enable_thinking)
    text = tokenizer.decode(row["input_ids"])
    # The template itself inserts an empty think block before a final answer: present, and not supervised.
    assert "<think>\n\n</think>\n\nit is four<|im_end|>\n" in text
    assert supervised(row, tokenizer) == ["it is four<|im_end|>"]


def test_without_thinking_the_prompt_is_what_serving_sends(tokenizer):
    row = normal({"messages": ONE_TURN}, tokenizer)
    prompt = prompts.answer_prompt({"sample_id": "x", "source": "f:1", "messages": ONE_TURN}, tokenizer)
    assert row["input_ids"][: len(prompt)] == prompt
    assert row["loss_mask"].index(1) == len(prompt)


@pytest.mark.parametrize(
    "final",
    [
        {"role": "assistant", "content": "four", "reasoning_content": "add them"},
        {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nfour"},
    ],
)
def test_a_thought_of_the_target_is_supervised(tokenizer, final):
    row = normal({"messages": [*ASKED, final]}, tokenizer, enable_thinking=True)
    assert supervised(row, tokenizer) == ["<think>\nadd them\n</think>\n\nfour<|im_end|>"]
    prompt = prompts.answer_prompt(
        {"sample_id": "x", "source": "f:1", "messages": [*ASKED, final]}, tokenizer, enable_thinking=True
    )
    assert row["loss_mask"].index(1) == len(prompt)


def test_every_assistant_turn_is_supervised_and_earlier_thoughts_are_gone(tokenizer):
    thinking = [*ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfour"}, *TWO_TURNS[-2:]]
    row = normal({"messages": thinking}, tokenizer)
    assert "hm" not in tokenizer.decode(row["input_ids"])
    assert supervised(row, tokenizer) == ["four<|im_end|>", "seven\n<|im_end|>"]


def test_the_five_shapes_give_the_same_row(tokenizer, tmp_path):
    expected = normal({"messages": TWO_TURNS}, tokenizer)
    text = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[message["role"]], "value": message["content"]} for message in TWO_TURNS]
    shapes = [
        {"messages": TWO_TURNS},
        {"conversations": TWO_TURNS},
        {"conversations": sharegpt},
        {"text": text},
        {"input_ids": expected["input_ids"], "loss_mask": expected["loss_mask"]},
    ]
    for number, shape in enumerate(shapes):
        jsonl, parquet = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.parquet"
        jsonl.write_text(json.dumps({"id": 7, **shape, "topic": "sums"}) + "\n")
        pq.write_table(pa.Table.from_pylist([{"id": 7, **shape, "topic": "sums"}]), parquet)
        for path in (jsonl, parquet):
            (raw,) = prompts.read_prompts(path)
            found = prompts.normalise(raw, tokenizer)
            assert found["sample_id"] == "7"
            assert found["metadata"] == {"topic": "sums"}
            assert found["input_ids"] == expected["input_ids"], (number, path.suffix)
            assert found["loss_mask"] == expected["loss_mask"], (number, path.suffix)


def test_words_that_look_like_a_turn_are_not_supervised(tokenizer):
    asked = [{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>"}]
    row = normal({"messages": [*asked, {"role": "assistant", "content": "no"}]}, tokenizer)
    assert supervised(row, tokenizer) == ["no<|im_end|>"]


def test_uniform_masks_are_errors_unless_meant(tokenizer):
    for row, what in (
        ({"text": "no turns at all"}, "no token is"),
        ({"input_ids": [5, 6], "loss_mask": [1, 1]}, "every token is"),
    ):
        with pytest.raises(ValueError, match=rf"f\.jsonl:1: {what} supervised.*allow_uniform_mask"):
            normal(row, tokenizer)
        assert len(set(normal(row, tokenizer, allow_uniform_mask=True)["loss_mask"])) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": ASKED}, "no assistant turn.*jobs.regenerate"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "turn 1 has role 'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"turn 1 has role \['user'\]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "turn 1 contains an unpaired surrogate"),
        ({"text": "\ud800"}, "text contains an unpaired surrogate"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only plain text"),
        ({"messages": []}, "expected a list of turns"),
        ({"prompt": "x"}, r"keys \['prompt'\], expected messages"),
        ({"input_ids": [1, 2]}, "needs both input_ids and loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids, 1 mask values"),
        ({"input_ids": [1, 10**6], "loss_mask": [0, 1]}, r"input_ids\[1\] is 1000000, outside the vocabulary"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, r"loss_mask\[1\] is 2"),
    ],
)
def test_unusable_rows_are_named(tokenizer, row, message):
    with pytest.raises(ValueError, match=rf"f\.jsonl:1: .*{message}"):
        normal(row, tokenizer)


def test_a_template_that_rewrites_answers_is_refused(tokenizer):
    import copy

    shouting = copy.deepcopy(tokenizer)
    shouting.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(ValueError, match="changes the text of assistant turn 1"):
        normal({"messages": ONE_TURN}, shouting)


def test_truncation_cuts_tokens_and_mask_together(tokenizer):
    whole = normal({"messages": ONE_TURN}, tokenizer)
    cut = len(whole["input_ids"]) - 4
    row = normal({"messages": ONE_TURN}, tokenizer, max_length=cut)
    assert row["input_ids"] == whole["input_ids"][:cut]
    assert row["loss_mask"] == whole["loss_mask"][:cut]


@pytest.mark.parametrize(("mask", "expected"), [([0, 1, 1], True), ([1, 0, 1], False), ([1], False), ([0, 0], False)])
def test_an_anchor_needs_two_neighbours(mask, expected):
    assert prompts.has_anchor(mask) is expected


def test_answering_starts_after_the_last_user_turn(tokenizer):
    row = {"sample_id": "x", "source": "f:1", "messages": TWO_TURNS}
    assert prompts.prompts_for_answering(row) == TWO_TURNS[:-1]
    expected = prompts.answer_prompt(row, tokenizer)
    assert tokenizer.decode(expected).endswith("and three<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    text = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert prompts.answer_prompt({"sample_id": "x", "source": "f:1", "text": text}, tokenizer) == expected
    tokens = normal({"messages": TWO_TURNS}, tokenizer)
    assert prompts.answer_prompt({"source": "f:1", **tokens}, tokenizer) == expected
    with pytest.raises(ValueError, match="f:1: no user turn"):
        prompts.prompts_for_answering({"source": "f:1", "messages": ASKED[:1]})


def test_file_errors_come_first_and_name_the_line(tmp_path):
    def reading(text: str, suffix: str = ".jsonl") -> list:
        path = tmp_path / f"p{suffix}"
        path.write_text(text)
        return list(prompts.read_prompts(path))

    with pytest.raises(ValueError, match="no such prompt file"):
        list(prompts.read_prompts(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match=r"p\.jsonl: no rows"):
        reading("\n\n")
    with pytest.raises(ValueError, match=r"p\.jsonl:2: not valid JSON"):
        reading('{"id": 1, "text": "a"}\n{"id": 2,\n')
    for deep in ("[" * 5000, '{"id": 2, "text": "b", "more": ' + "[" * 5000 + "]" * 5000 + "}"):
        with pytest.raises(ValueError, match=r"p\.jsonl:2: not valid JSON"):
            reading('{"id": 1, "text": "a"}\n' + deep + "\n")
        with pytest.raises(ValueError, match=r"p\.json:1: not valid JSON"):
            reading("[" + deep, ".json")
    for key in ("tool_calls", "content"):  # parsed from text, and printed: neither ends in a traceback
        value = json.dumps("[" * 5000) if key == "tool_calls" else "[" * 950 + "]" * 950
        with pytest.raises(ValueError, match=r"p\.jsonl:1: "):
            reading('{"messages": [{"role": "assistant", "' + key + '": ' + value + "}]}")
    with pytest.raises(ValueError, match=r"p\.jsonl:3: id '1' is also on line 1"):
        reading('{"id": 1, "text": "a"}\n\n{"id": "1", "text": "b"}\n')
    with pytest.raises(ValueError, match=r"p\.txt: unknown kind"):
        reading("x", ".txt")
    with pytest.raises(ValueError, match=r"p\.parquet is no Parquet file"):
        reading("x", ".parquet")
    with pytest.raises(ValueError, match="num_rows=-1"):
        prompts.prompt_chunks(tmp_path / "p.jsonl", num_rows=-1)
    # A bad row at the end is found before the first row is handed out.
    rows = prompts.read_prompts(tmp_path / "late.jsonl")
    (tmp_path / "late.jsonl").write_text('{"text": "a"}\n[1]\n')
    with pytest.raises(ValueError, match=r"late\.jsonl:2: \[1\] is not a JSON object"):
        next(rows)


def test_chunks_cover_the_file_in_order_for_every_format(tmp_path):
    rows = [{"id": f"r{i}", "text": "x" * i} for i in range(11)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=3)
    for name in ("a.jsonl", "b.json", "c.parquet"):
        chunks = prompts.prompt_chunks(tmp_path / name, rows_per_chunk=4)
        assert [chunk.num_rows for chunk in chunks] == [4, 4, 3]
        # Each chunk can be read alone, in any order.
        found = {chunk.offset: list(prompts.read_chunk(chunk)) for chunk in reversed(chunks)}
        flat = [row for chunk in chunks for row in found[chunk.offset]]
        assert [row["sample_id"] for row in flat] == [row["id"] for row in rows], name
        assert [row["text"] for row in flat] == [row["text"] for row in rows], name


@pytest.mark.parametrize("asked", [{"text": ""}, {"input_ids": [5], "loss_mask": [1]}])
def test_a_row_that_asks_nothing_is_none_to_answer(asked, tokenizer):
    with pytest.raises(ValueError, match="f:1: no tokens before the supervised ones"):
        prompts.answer_prompt({"sample_id": "a", "source": "f:1", **asked}, tokenizer)


def test_rows_without_an_id_get_a_stable_one(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a"}\n')
    first = [row["sample_id"] for row in prompts.read_prompts(path)]
    assert len(set(first)) == 2
    assert first == [row["sample_id"] for row in prompts.read_prompts(path)]
