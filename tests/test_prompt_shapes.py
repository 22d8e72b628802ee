"""Every public shape of a prompt file, from a file to the exact tokens and mask, under the templates of Qwen3."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import prompts
from pipelines.chat_template import turn_marks
from tests.chat_templates import HYBRID, INSTRUCT, THINKING, small_tokenizer

FILES = Path(__file__).resolve().parent / "data" / "prompts"
TEMPLATES = {"hybrid": HYBRID, "instruct": INSTRUCT, "thinking": THINKING}
USER, ANSWER, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
NONE = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizers():
    """One for each template."""
    return {name: small_tokenizer(template) for name, template in TEMPLATES.items()}


def rows_of(name: str, tokenizer, **options) -> dict[str, dict]:
    """Normalised rows of a file, by id."""
    raw = prompts.read_prompts(FILES / name)
    return {row["sample_id"]: prompts.normalise(row, tokenizer, **options) for row in raw}


def exactly(tokenizer, *parts: str) -> tuple[list[int], list[int]]:
    """Tokens and mask of texts that are unsupervised and supervised in turn."""
    ids, mask = [], []
    for number, part in enumerate(parts):
        tokens = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids += tokens
        mask += [number % 2] * len(tokens)
    return ids, mask


def check(row: dict, tokenizer, *parts: str) -> None:
    shown = [(tokenizer.decode([i]), m) for i, m in zip(row["input_ids"], row["loss_mask"], strict=True)]
    assert (row["input_ids"], row["loss_mask"]) == exactly(tokenizer, *parts), shown


def test_conversations(tokenizers):
    hybrid = tokenizers["hybrid"]
    rows = rows_of("conversations.jsonl", hybrid)
    system = "<|im_start|>system\nAnswer in one line.<|im_end|>\n"
    asked = f"{system}{USER}How long does green tea steep?{END}\n{ANSWER}{NONE}"
    check(rows["tea-1"], hybrid, asked, f"Two minutes at 80 degrees.{END}", "\n")
    # An earlier turn has no empty thought; the last has one, which is not supervised.
    first, then = f"{USER}And black tea?{END}\n{ANSWER}", f"\n{USER}With milk?{END}\n{ANSWER}{NONE}"
    check(rows["tea-2"], hybrid, first, f"Four minutes.{END}", then, f"Then five.{END}", "\n")


def test_sharegpt(tokenizers):
    instruct = tokenizers["instruct"]
    rows = rows_of("sharegpt.json", instruct)
    system = "<|im_start|>system\nAnswer in one line.<|im_end|>\n"
    asked = f"{system}{USER}Is the ridge path open?{END}\n{ANSWER}"
    check(rows["walk_0"], instruct, asked, f"Yes, since May.{END}", "\n")
    check(rows["walk_1"], instruct, f"{USER}And the ferry?{END}\n{ANSWER}", f"Only at weekends.{END}", "\n")


def test_messages(tokenizers):
    hybrid = tokenizers["hybrid"]
    first, second = prompts.read_prompts(FILES / "messages.jsonl")
    row = prompts.normalise(first, hybrid)
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    check(row, hybrid, f"{system}{USER}Name a prime above ten.{END}\n{ANSWER}{NONE}", f"Eleven.{END}", "\n")
    assert row["sample_id"] == "c-17"
    assert row["metadata"] == {"generation": None, "source_set": "numbers"}
    assert not prompts.has_answer(second)
    assert hybrid.decode(prompts.answer_prompt(second, hybrid)) == f"{USER}Name an even prime.{END}\n{ANSWER}{NONE}"


def test_text(tokenizers):
    hybrid = tokenizers["hybrid"]
    row = rows_of("text.jsonl", hybrid)["1"]
    second = f"\n{USER}Another.{END}\n{ANSWER}{NONE}"
    check(row, hybrid, f"{USER}Name a river.{END}\n{ANSWER}", f"The Elbe.{END}", second, f"The Po.{END}", "\n")
    # A Thinking model's prompt opens the thought, and earlier turns have none.
    thinking = tokenizers["thinking"]
    text = f"{USER}a{END}\n{ANSWER}b{END}\n{USER}c{END}\n{ANSWER}<think>\nhm\n</think>\n\nd{END}\n"
    row = prompts.normalise({"sample_id": "x", "source": "f:1", "text": text}, thinking)
    then = f"\n{USER}c{END}\n{ANSWER}<think>\n"
    check(row, thinking, f"{USER}a{END}\n{ANSWER}", f"b{END}", then, f"hm\n</think>\n\nd{END}", "\n")


def test_tokens_are_taken_as_they_are(tokenizers):
    rows = rows_of("tokens.jsonl", tokenizers["hybrid"])
    assert list(rows) == ["0b3e_gen0", "0b3e_gen1", "0b3f"]
    # The conversation beside the tokens is for people: its tool has no definition, and nobody renders it.
    assert rows["0b3e_gen0"]["input_ids"] == [1, 88, 72, 2, 1, 70, 80, 2]
    assert rows["0b3e_gen0"]["loss_mask"] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert rows["0b3e_gen0"]["metadata"] == {"idx": 0, "finish_reason": "tool_calls", "is_tool_call": True}
    assert (rows["0b3f"]["input_ids"], rows["0b3f"]["loss_mask"]) == ([1, 88, 2, 80, 81], [0, 0, 0, 1, 1])


@pytest.mark.parametrize("thinks", [False, True])
def test_thoughts(tokenizers, thinks):
    asked = f"{USER}Is 91 prime?{END}\n{ANSWER}"
    thought, answer = "7 times 13 is 91.\n</think>\n\n", f"No.{END}"
    last = f"Nothing up to 9 divides it.\n</think>\n\nYes.{END}"
    for name, opened in (("hybrid", ""), ("thinking", "<think>\n")):
        fast = tokenizers[name]
        rows = rows_of("reasoning.jsonl", fast, enable_thinking=thinks)
        begun = "" if opened else "<think>\n"
        for sample_id in ("r-1", "r-2"):
            check(rows[sample_id], fast, asked + opened, begun + thought + answer, "\n")
        # The thought of the earlier turn is gone, its answer stays.
        then = f"\n{USER}And 97?{END}\n{ANSWER}{opened}"
        check(rows["r-3"], fast, asked, answer, then, begun + last, "\n")


def test_instruct_models_leave_a_thought_out_or_take_it_as_words(tokenizers):
    rows = rows_of("reasoning.jsonl", tokenizers["instruct"])
    asked = f"{USER}Is 91 prime?{END}\n{ANSWER}"
    check(rows["r-1"], tokenizers["instruct"], asked, f"No.{END}", "\n")
    written = "<think>\n7 times 13 is 91.\n</think>\n\n"
    check(rows["r-2"], tokenizers["instruct"], asked, f"{written}No.{END}", "\n")


def test_thinking_models_empty_thought_is_not_supervised(tokenizers):
    row = rows_of("sharegpt.json", tokenizers["thinking"])["walk_1"]
    asked = f"{USER}And the ferry?{END}\n{ANSWER}{NONE}"
    check(row, tokenizers["thinking"], asked, f"Only at weekends.{END}", "\n")


def test_tools(tokenizers):
    hybrid = tokenizers["hybrid"]
    raw = {row["sample_id"]: row for row in prompts.read_prompts(FILES / "tools.jsonl")}
    rows = {sample_id: prompts.normalise(row, hybrid) for sample_id, row in raw.items()}
    definition = json.dumps(raw["w-1"]["tools"][0])
    prompt = (
        f"<|im_start|>system\nBe brief.\n\n<tools>\n{definition}\n</tools>{END}\n{USER}Rain in Oslo?{END}\n{ANSWER}"
    )
    # The call is the target's own, and so is the thought before it: no user has asked since.
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
    result = f'\n{USER}<tool_response>\n{{"rain": true}}\n</tool_response>{END}\n{ANSWER}{NONE}'
    called = f"<think>\nLook it up.\n</think>\n\n{call}{END}"
    check(rows["w-1"], hybrid, prompt, called, result, f"Yes, rain.{END}", "\n")
    calls = [
        '<tool_call>\n{"name": "get_weather", "arguments": {"place":"Oslo"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    ]
    text = hybrid.decode(rows["w-2"]["input_ids"])
    prompt = text[: text.index(NONE) + len(NONE)]
    check(rows["w-2"], hybrid, prompt, "\n".join(["Looking.", *calls]) + END, "\n")
    # Asked again, the target sees the tools and the result.
    asked = hybrid.decode(prompts.answer_prompt(raw["w-1"], hybrid, enable_thinking=True))
    assert asked.startswith(f"<|im_start|>system\nBe brief.\n\n<tools>\n{definition}")
    assert asked.endswith(f"</tool_response>{END}\n{ANSWER}")


@pytest.mark.parametrize("name", ["conversations.jsonl", "sharegpt.json", "reasoning.jsonl", "tools.jsonl"])
def test_parquet_gives_the_same_rows(tokenizers, tmp_path, name):
    raw = [{**row, "id": row["sample_id"]} for row in prompts.read_prompts(FILES / name)]
    raw = [{k: v for k, v in row.items() if k not in ("sample_id", "source")} for row in raw]
    if name == "tools.jsonl":  # one type a column; a table fills in what other objects have
        raw = raw[:1]
        raw[0]["tools"].append({"type": "function", "function": {"name": "get_time", "strict": True}})
        other = {"type": "function", "function": {"name": "get_time", "arguments": {"zone": "CET"}}}
        raw[0]["messages"][2]["tool_calls"].append(other)
    pq.write_table(pa.Table.from_pylist(raw), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in raw))
    hybrid = tokenizers["hybrid"]
    found, expected = (
        [prompts.normalise(row, hybrid) for row in prompts.read_prompts(tmp_path / f"rows{suffix}")]
        for suffix in (".parquet", ".jsonl")
    )
    assert found == expected


@pytest.mark.parametrize("template", list(TEMPLATES))
@pytest.mark.parametrize("thinks", [False, True])
def test_a_row_begins_with_the_prompt_that_serving_sends(tokenizers, template, thinks):
    """The prefix property, but for rows whose thoughts are of the mode that was not asked for."""
    fast = tokenizers[template]
    checked = 0
    for name in ("conversations.jsonl", "sharegpt.json", "messages.jsonl", "reasoning.jsonl", "tools.jsonl"):
        for raw in prompts.read_prompts(FILES / name):
            if not prompts.has_answer(raw):
                continue
            row = prompts.normalise(raw, fast, enable_thinking=thinks)
            prompt = prompts.answer_prompt(raw, fast, enable_thinking=thinks)
            other_mode = template == "hybrid" and not thinks and name == "reasoning.jsonl"
            assert (row["input_ids"][: len(prompt)] == prompt) is not other_mode, raw["sample_id"]
            checked += 1
    assert checked == 10


def test_marks_of_the_templates(tokenizers):
    for name, empty, thinking, direct in (
        ("hybrid", NONE, ANSWER, ANSWER + NONE),
        ("instruct", "", ANSWER, ANSWER),
        ("thinking", NONE, ANSWER + "<think>\n", ANSWER + "<think>\n"),
    ):
        marks = turn_marks(tokenizers[name], tokenizers[name].chat_template, False)
        assert (marks.header, marks.end, marks.empty_thought) == (ANSWER, END, empty)
        assert (marks.thinking_prompt, marks.direct_prompt) == (thinking, direct)


TOOLS = [{"name": "look"}]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHATML, {"tools": TOOLS}, "leaves out the tools"),
        (CHATML, {"calls": [{"name": "look", "arguments": "{}"}]}, "changes the text of assistant turn 1"),
        (HYBRID.replace('turn.role == "system"', "false"), {"system": "be brief"}, r"leaves out or changes turn 1"),
        # The prompt opens a thought that the rendering of an answer never has.
        (INSTRUCT + '{{- "<think>\\n" if add_generation_prompt -}}', {}, "serving never sends; let the target answer"),
        (HYBRID + "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}", {}, "refuses.*no x"),
        (HYBRID, {"answer": "a <|im_end|> b"}, r"turn 2 has <\|im_end\|> inside its text"),
        (HYBRID, {"calls": [{"arguments": "{}"}]}, "names no function"),
        (HYBRID, {"calls": "[{"}, "tool_calls is no JSON"),
        (HYBRID, {"tools": ["look"]}, "tools is .*give a list of objects"),
    ],
)
def test_what_cannot_be_rendered_rightly_is_refused(template, row, message):
    fast = small_tokenizer(template)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": row.get("answer", "y")}]
    if "system" in row:
        messages.insert(0, {"role": "system", "content": row["system"]})
    if "calls" in row:
        messages[-1]["tool_calls"] = row["calls"]
    raw = {"sample_id": "x", "source": "f.jsonl:1", "messages": messages, "tools": row.get("tools")}
    with pytest.raises(ValueError, match=rf"f\.jsonl:1: .*{message}"):
        prompts.normalise(raw, fast)


def test_regenerated_rows_keep_their_tools_in_every_file_kind(tokenizers, tmp_path):
    from pipelines.answer_files import write_parquet
    from pipelines.regenerate import answered_row

    hybrid = tokenizers["hybrid"]
    raw = list(prompts.read_prompts(FILES / "tools.jsonl")) + list(prompts.read_prompts(FILES / "text.jsonl"))
    answered = []
    for row in raw:
        prompt = prompts.answer_prompt(row, hybrid)
        answered.append(answered_row(row, prompt, [*hybrid("Rain.")["input_ids"], 2], "stop", hybrid))
    lines = [json.dumps(row) + "\n" for row in answered]
    # A row without turns and tools first: what a later one has must not be lost to the first one's schema.
    write_parquet(tmp_path / "rows.parquet", iter(reversed(lines)))
    (tmp_path / "rows.jsonl").write_text("".join(reversed(lines)))
    for suffix in (".parquet", ".jsonl"):
        for before, row in zip(reversed(raw), prompts.read_prompts(tmp_path / f"rows{suffix}"), strict=True):
            assert prompts.answer_prompt(row, hybrid) == prompts.answer_prompt(before, hybrid)
            found = prompts.normalise(row, hybrid)
            assert hybrid.decode([t for t, m in zip(found["input_ids"], found["loss_mask"], strict=True) if m]) == (
                f"Rain.{END}"
            )
            # Rendered anew, without its tokens, the conversation is the same text.
            if row.get("messages"):
                again = prompts.normalise({**row, "input_ids": None, "loss_mask": None}, hybrid)
                assert hybrid.decode(again["input_ids"]) == hybrid.decode(found["input_ids"]) + "\n"
