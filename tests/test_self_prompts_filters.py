"""Filters one by one: each by its name, in order, with examples; and the figures of what is kept."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from pipelines.self_prompts import SelfPromptConfig
from pipelines.self_prompts_filters import FILTERS, Draw, Prompt, Sieve, distinct_share, printable, statistics
from pipelines.self_prompts_turn import user_turn
from tests.chat_templates import HYBRID, QWEN_SPECIAL, small_tokenizer

END, TEXT_END, MARK = 2, 0, 1
CONFIG = SelfPromptConfig(max_tokens=200, min_tokens=3, longest=150)


@pytest.fixture(scope="module")
def fast():
    return small_tokenizer(HYBRID)


@pytest.fixture
def sieve(fast):
    return Sieve(config=CONFIG, turn=user_turn(fast, (END, TEXT_END)), tokenizer=fast)


def judge(sieve: Sieve, text: str, *, end: int = END, reason: str = "stop", index: int = 0) -> str:
    """The filter that drops a text, "" if none does."""
    before = Counter(sieve.counts)
    tokens = [*sieve.tokenizer(text)["input_ids"], *([end] if reason == "stop" else [])]
    kept = sieve.take(Draw(index=index, token_ids=tokens, finish_reason=reason))
    (found,) = (sieve.counts - before) or ("",)
    assert kept is (found == "")
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("what is two and two", ""),
        ("日本の首都はどこですか", ""),
        ("mark:\n\tzero\u200djoiner and \U0001f600", ""),
        ("see <|im_start|>user", "control_tokens"),
        ("<think>what is it</think>", "control_tokens"),
        ("said <|user|> so there", "control_tokens"),
        ("a bell \x07 rings here", "unprintable"),
        ("private \ue123 character", "unprintable"),
        ("broken \ufffd bytes", "unprintable"),
        ("a", "too_short"),
        ("   \n   \n  ", "too_short"),
        (" ".join(f"{number * 37 % 89}q{number}" for number in range(60)), "too_long"),
        ("seven\n" * 20, "repetitive"),
    ],
)
def test_each_filter_by_its_name(sieve, text, expected):
    assert judge(sieve, text) == expected
    if expected:
        (example,) = sieve.examples[expected]
        assert example["text"] == text.strip()[:200]
    else:
        assert [prompt.text for prompt in sieve.kept] == [text]


def test_how_a_draw_ended(sieve):
    assert judge(sieve, "what is two and one", reason="length") == "unfinished"
    assert judge(sieve, "what is two and two", end=MARK) == "control_tokens"
    assert judge(sieve, "what is two and three", end=TEXT_END) == ""
    assert judge(sieve, "what is two and four", end=END) == ""
    # The end is no part of the prompt, neither of its text nor of its length.
    assert sieve.kept[1].text == "what is two and four"
    assert sieve.kept[1].num_tokens == len(sieve.tokenizer("what is two and four")["input_ids"])


def test_a_control_token_with_a_plain_name():
    named = small_tokenizer(HYBRID, (*QWEN_SPECIAL, "HALT"))
    sieve = Sieve(config=CONFIG, turn=user_turn(named, (END,)), tokenizer=named)
    assert judge(sieve, "what is two and two", end=3) == "control_tokens"


def test_bytes_that_are_no_text(sieve):
    # Half of a character: the byte-level vocabulary can write it, nobody can send it.
    half = sieve.tokenizer("é and then more")["input_ids"][1:]
    assert not sieve.take(Draw(index=5, token_ids=[*half, END], finish_reason="stop"))
    assert sieve.counts == {"unprintable": 1}


def test_lengths_are_limits_that_are_allowed(sieve):
    sieve.config = replace(CONFIG, min_tokens=5, longest=6)
    for count, expected in ((4, "too_short"), (5, ""), (6, ""), (7, "too_long")):
        text = "".join("qzxvjkwy"[i] for i in range(count))
        assert len(sieve.tokenizer(text)["input_ids"]) == count
        assert judge(sieve, text) == expected


def test_duplicates(sieve):
    first = "please tell me how many legs a spider has and why it has so many"
    assert judge(sieve, first, index=1) == ""
    assert judge(sieve, "  Please tell me\nhow many legs a spider has and why it has so MANY ", index=2) == "duplicate"
    assert judge(sieve, first + " of them", index=3) == "near_duplicate"
    assert judge(sieve, first.replace("spider", "beetle").replace("legs", "eyes"), index=4) == ""
    # What was dropped is nothing to compare with.
    assert judge(sieve, first + " of them all, on both sides", index=5) == ""
    assert [prompt.index for prompt in sieve.kept] == [1, 4, 5]
    assert (sieve.num_draws, sieve.counts) == (5, {"duplicate": 1, "near_duplicate": 1})
    assert sieve.examples["near_duplicate"] == [{"draw": 3, "text": first + " of them"}]


def test_evaluation_prompts_are_left_out(fast, tmp_path):
    asked = "Natalia sold clips to forty eight of her friends in April, and then she sold half as many in May."
    rows = [{"messages": [{"role": "system", "content": "Answer with a single number and no words at all."},
                          {"role": "user", "content": "Name the capital of France and its river."},
                          {"role": "assistant", "content": "Paris lies on the river Seine in the north."},
                          {"role": "user", "content": asked}]}]  # fmt: skip
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(CONFIG, exclude=(str(path),))
    sieve = Sieve(config=config, turn=user_turn(fast, (END,)), tokenizer=fast)
    assert judge(sieve, asked.replace("half as many", "half as much")) == "excluded"
    assert judge(sieve, asked) == "excluded"
    assert judge(sieve, "name the capital of france, and its river") == "excluded"
    assert judge(sieve, "Paris lies on the river Seine in the north.") == ""
    assert judge(sieve, "Answer with a single number and no words at all.") == ""
    path.write_text('{"text": "Natalia"}\n')
    with pytest.raises(ValueError, match=r"eval\.jsonl:1: self_prompts\.exclude takes messages"):
        Sieve(config=config, turn=sieve.turn, tokenizer=fast)


def test_few_examples_of_many(sieve):
    for index in range(10):
        judge(sieve, "a" * 5, reason="length", index=index)
    assert sieve.counts["unfinished"] == 10
    assert [example["draw"] for example in sieve.examples["unfinished"]] == [0, 1, 2]


def test_repetition():
    assert distinct_share(list(range(50))) == 1.0
    assert distinct_share([1, 2, 3] * 10) == 3 / 28
    assert distinct_share([7] * 9) == 1.0  # seven n-grams say too little
    assert distinct_share([7] * 10) == 1 / 8
    assert distinct_share([*range(20), *range(20)]) == 20 / 38


def test_printable():
    assert printable("naïve café\r\n\t\u200f\u200d 𝔘")
    for character in ("\x00", "\x1b", "\x85", "\ufffd", "\ue000", "\U000e0fff", "\ud800"):
        assert not printable(f"a{character}b"), repr(character)


def test_figures():
    prompts = [Prompt(index=i, text=f"What is {'the' if i < 15 else 'a'} {i}?", num_tokens=i + 1) for i in range(20)]
    prompts.append(Prompt(index=20, text="Tell me more", num_tokens=101))
    found = statistics(prompts, Counter(near_duplicate=9, duplicate=30, unfinished=140))
    assert found["yield"] == round(21 / 200, 4)
    assert list(found["rejected_share"]) == list(FILTERS)
    assert (found["rejected_share"]["unfinished"], found["rejected_share"]["too_long"]) == (0.7, 0.0)
    assert (found["duplicate_share"], found["near_duplicate_share"]) == (0.5, 0.15)
    assert found["tokens"] == {"min": 1, "p5": 2, "p25": 6, "p50": 11, "p75": 16, "p95": 20, "max": 101}
    assert found["distinct_first_words"] == round(2 / 21, 4)
    assert found["distinct_openings"] == round(3 / 21, 4)
    assert list(found["frequent_openings"].items()) == [("what is the", 15), ("what is a", 5), ("tell me more", 1)]
    assert statistics([], Counter())["tokens"] == {}
