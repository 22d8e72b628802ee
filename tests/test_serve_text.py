"""Streamed text against decoding everything at once, with the real tokenizer; stop strings against brute force."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from serve.text import TextStream, Vocabulary, read_vocabulary

SAMPLES = [
    "héllo wörld",
    "日本語のテキスト",
    "👩‍👩‍👧 family 🏳️‍🌈",
    "def f(x):\n    return x\n\n",
    "a\u0301\u0327",
    "<|im_end|>x",
]
TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=40) | st.sampled_from(SAMPLES)


@pytest.fixture(scope="module")
def tokenizer(embedded_target):
    return AutoTokenizer.from_pretrained(embedded_target)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return read_vocabulary(tokenizer)


def decode(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def run(vocabulary: Vocabulary, tokens: list[int], stops=()) -> tuple[list[str], int]:
    """The pieces shown, and how many tokens were taken."""
    stream, pieces = TextStream(vocabulary, stops), []
    for count, token in enumerate(tokens, start=1):
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, count
    pieces.append(stream.finish())
    return pieces, len(tokens)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, data=st.data())
def test_pieces_join_to_what_decoding_at_once_gives(tokenizer, vocabulary, text, data):
    tokens = tokenizer.encode(text)
    # Random ids as well: byte tokens in any order make malformed UTF-8; special ones and ids past the end show nothing.
    tokens += data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=12))
    assert "".join(run(vocabulary, tokens)[0]) == decode(tokenizer, tokens)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_no_piece_ends_in_half_a_character(tokenizer, vocabulary, text):
    pieces, _ = run(vocabulary, tokenizer.encode(text))
    # The text holds no U+FFFD, so one in a piece would be half a character that got out.
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_out_once_and_whole(tokenizer, vocabulary):
    tokens = tokenizer.encode("🦖")
    assert len(tokens) > 1
    pieces, _ = run(vocabulary, tokens)
    assert pieces == [*[""] * (len(tokens) - 1), "🦖", ""]


def test_unfinished_character_at_the_end_is_flushed_as_decode_does(tokenizer, vocabulary):
    tokens = tokenizer.encode("🦖")[:-1]
    assert "".join(run(vocabulary, tokens)[0]) == decode(tokenizer, tokens) != ""


STOPS = st.lists(st.text(alphabet="ab🦖 \n", min_size=1, max_size=5), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(text=st.text(alphabet="ab🦖 \n", max_size=40), stops=STOPS)
def test_stop_strings_equal_brute_force(tokenizer, vocabulary, text, stops):
    tokens = tokenizer.encode(text)
    pieces, taken = run(vocabulary, tokens, stops)
    # Brute force: the first token after which some stop string is in the text; cut at its earliest start.
    shown, count = decode(tokenizer, tokens), len(tokens)
    for length in range(1, len(tokens) + 1):
        so_far = stable(vocabulary, tokens[:length])
        found = [so_far.find(stop) for stop in stops if stop in so_far]
        if found:
            shown, count = so_far[: min(found)], length
            break
    assert ("".join(pieces), taken) == (shown, count)
    assert not any(stop in "".join(pieces) for stop in stops)


def stable(vocabulary: Vocabulary, tokens: list[int]) -> str:
    """Text of the tokens without the bytes of an unfinished character."""
    data = b"".join(vocabulary.shown(token) for token in tokens)
    return data.decode("utf-8", errors="ignore")


def test_held_back_start_of_a_stop_string_is_shown_when_it_does_not_come(tokenizer, vocabulary):
    stream = TextStream(vocabulary, ["END."])
    shown = "".join(stream.push(token) for token in tokenizer.encode("the EN"))
    assert shown == "the "
    assert stream.finish() == "EN"


def test_text_behind_a_stop_string_inside_one_token_is_cut(tokenizer, vocabulary):
    token = max(tokenizer.encode("return self"), key=lambda t: len(vocabulary.shown(t)))
    text = vocabulary.shown(token).decode()
    stream = TextStream(vocabulary, [text[1]])
    assert stream.push(token) == text[0]
    assert stream.stopped
    assert stream.finish() == ""


def test_added_tokens_that_are_not_special_are_shown_and_special_ones_are_not(tokenizer, vocabulary):
    for token, added in tokenizer.added_tokens_decoder.items():
        assert vocabulary.shown(token) == (b"" if added.special else added.content.encode())
        assert vocabulary.spelled(token) == added.content.encode()


def test_a_tokenizer_of_another_kind_is_refused():
    from tokenizers import Tokenizer, decoders, models

    other = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    other.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match=r"Metaspace.*byte-level"):
        read_vocabulary(PreTrainedTokenizerFast(tokenizer_object=other))
