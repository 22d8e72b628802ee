"""Rows to tokens: the chat template, and which tokens the drafter may learn from.

Five row shapes come in (messages, conversations in two dialects, text, tokens); one comes out: sample_id, input_ids,
loss_mask, metadata. Only what the target itself would generate is supervised: an assistant's words and its end-of-turn
token. What the template writes (headers, empty think blocks, the newline after the turn) is not.

Roles come from rendering, not from generation tags, which Qwen3's template does not have: the conversation is rendered
once with marks in place of the answers, so everything between marks is the template's or the user's. Answers are
tokenised apart from what precedes them, exactly as they meet at serving time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from domino_core.target import render_chat
from pipelines.prompt_files import ID_KEYS, Row, check_shape, prompt_chunks, read_chunk, read_prompts, turns

__all__ = [
    "answer_prompt",
    "has_anchor",
    "normalise",
    "prompt_chunks",
    "prompts_for_answering",
    "read_chunk",
    "read_prompts",
]

Segment = tuple[str, bool]  # text, whether the target generated it
_RESERVED = {*ID_KEYS, "source", "messages", "conversations", "text", "input_ids", "loss_mask"}


def normalise(
    row: Row,
    tokenizer: Any,
    *,
    enable_thinking: bool = False,
    max_length: int | None = None,
    allow_uniform_mask: bool = False,
) -> Row:
    """{sample_id, input_ids, loss_mask, metadata} of a raw row of `read_prompts`, cut to `max_length` tokens.

    ValueError naming file and line when the row cannot be used: no assistant turn, a template that changes the
    answers, or a mask that is all 0 or all 1 (before the cut) without `allow_uniform_mask`.
    """
    check_shape(row)
    where = row["source"]
    if row.get("input_ids") is not None:
        input_ids, loss_mask = _pretokenised(row, len(tokenizer))
    elif row.get("messages") is not None or row.get("conversations") is not None:
        segments = conversation_segments(turns(row), tokenizer, enable_thinking=enable_thinking, where=where)
        input_ids, loss_mask = encode_segments(segments, tokenizer)
    else:
        input_ids, loss_mask = encode_segments(text_segments(row["text"], tokenizer), tokenizer)
    if not input_ids:
        raise ValueError(f"{where}: no tokens; remove the row")
    if not allow_uniform_mask and len(set(loss_mask)) == 1:
        what = "every token is" if loss_mask[0] else "no token is"
        remedy = "check roles and chat template, or set capture.allow_uniform_mask=true if this is meant"
        raise ValueError(f"{where}: {what} supervised; {remedy}")
    metadata = {key: value for key, value in row.items() if key not in _RESERVED}
    input_ids, loss_mask = input_ids[:max_length], loss_mask[:max_length]
    return {"sample_id": row["sample_id"], "input_ids": input_ids, "loss_mask": loss_mask, "metadata": metadata}


def has_anchor(loss_mask: list[int]) -> bool:
    """Whether a block can start in this row: two neighbouring supervised tokens, as in `blocks.anchor_candidates`."""
    return any(a and b for a, b in pairwise(loss_mask))


def has_answer(row: Row) -> bool:
    """Whether a row brings something to learn from, so that the target need not answer first."""
    if row.get("input_ids") is None and (row.get("messages") is not None or row.get("conversations") is not None):
        return turns(row)[-1]["role"] == "assistant"
    return True  # tokens and rendered texts are used as they are


def prompts_for_answering(row: Row) -> list[dict[str, str]]:
    """The messages up to and including the last user turn. ValueError if the row has no such turn."""
    if row.get("messages") is None and row.get("conversations") is None:
        raise ValueError(f"{row['source']}: only messages or conversations can be cut at their last user turn")
    messages = turns(row)
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last_user is None:
        raise ValueError(f"{row['source']}: no user turn, so there is nothing to answer; remove the row")
    return messages[: last_user + 1]


def answer_prompt(row: Row, tokenizer: Any, *, enable_thinking: bool = False) -> list[int]:
    """Tokens after which the target's answer begins: what serving would send for this conversation.

    A text is cut after its last assistant header, tokens are cut before their last supervised run.
    """
    check_shape(row)
    if row.get("messages") is not None or row.get("conversations") is not None:
        return render_chat(tokenizer, prompts_for_answering(row), enable_thinking=enable_thinking)
    if row.get("input_ids") is not None:
        input_ids, loss_mask = _pretokenised(row, len(tokenizer))
        starts = [i for i, value in enumerate(loss_mask) if value and (i == 0 or not loss_mask[i - 1])]
        cut = starts[-1] if starts else len(input_ids)
        if not cut:
            raise ValueError(f"{row['source']}: no tokens before the supervised ones, so there is nothing to answer")
        return input_ids[:cut]
    segments = text_segments(row["text"], tokenizer)
    answers = [i for i, (_, supervised) in enumerate(segments) if supervised]
    return encode_segments(segments[: answers[-1]] if answers else segments, tokenizer)[0]


def encode_segments(segments: list[Segment], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens and mask. A special token right after an answer is its end of turn, which the target generates too."""
    input_ids: list[int] = []
    loss_mask: list[int] = []
    after_answer = False
    for text, supervised in segments:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        mask = [int(supervised)] * len(tokens)
        if after_answer and not supervised and tokens and tokens[0] in tokenizer.added_tokens_decoder:
            mask[0] = 1
        input_ids += tokens
        loss_mask += mask
        after_answer = supervised
    return input_ids, loss_mask


def conversation_segments(
    messages: list[dict[str, str]], tokenizer: Any, *, enable_thinking: bool, where: str
) -> list[Segment]:
    """Cut a rendered conversation into what template and user wrote (unsupervised) and the answers (supervised)."""
    if not any(message["role"] == "assistant" for message in messages):
        remedy = "let the target answer first (answer.when=missing, or `python -m jobs.regenerate`)"
        raise ValueError(f"{where}: no assistant turn to learn from; {remedy}")
    full = _render(tokenizer, messages, enable_thinking=enable_thinking)
    final = messages[-1]
    if final["role"] == "assistant" and _reasoning(final) and _reasoning(final) in full:
        # The target thought before it answered: thought and answer are its own, from the bare header on.
        opening = _between_marks(tokenizer, messages[:-1], add_generation_prompt=True, enable_thinking=True)
        closing = _between_marks(tokenizer, messages, enable_thinking=enable_thinking)[-1]
        segments, start = _walk(full, opening, messages[:-1], where)
        if not full.endswith(closing):
            raise ValueError(
                f"{where}: the chat template renders thoughts in a way that cannot be told from its own text"
            )
        return [*segments, (full[start : len(full) - len(closing)], True), (closing, False)]
    return _walk(full, _between_marks(tokenizer, messages, enable_thinking=enable_thinking), messages, where)[0]


def text_segments(text: str, tokenizer: Any) -> list[Segment]:
    """The same for a text that was already rendered, by the template's assistant header and end of turn."""
    header, inserted, end_of_turn = _template_marks(tokenizer)
    segments: list[Segment] = []
    start = 0
    while header and (found := text.find(header, start)) >= 0:
        answer = found + len(header)
        if inserted and text.startswith(inserted, answer):
            answer += len(inserted)
        end = text.find(end_of_turn, answer) if end_of_turn else -1
        end = len(text) if end < 0 else end
        segments += [(text[start:answer], False), (text[answer:end], True)]
        start = end
    return [*segments, (text[start:], False)] if start < len(text) else segments


def _walk(full: str, pieces: list[str], messages: list[dict[str, str]], where: str) -> tuple[list[Segment], int]:
    """Match a rendering against the text between its answers. Returns segments and how far they reach into `full`."""
    answers = [_without_reasoning(message) for message in messages if message["role"] == "assistant"]
    if len(pieces) != len(answers) + 1 or not full.startswith(pieces[0]):
        raise ValueError(
            f"{where}: the chat template drops or reorders assistant turns; split the conversation into rows"
        )
    segments: list[Segment] = [(pieces[0], False)]
    position = len(pieces[0])
    for number, (answer, piece) in enumerate(zip(answers, pieces[1:], strict=True), 1):
        # Templates trim answers in different ways; what they rendered decides.
        trimmed = (answer, answer.strip(), answer.lstrip("\n"), answer.rstrip(), answer.lstrip())
        rendered = next((text for text in trimmed if full.startswith(text + piece, position)), None)
        if rendered is None:
            raise ValueError(f"{where}: the chat template changes the text of assistant turn {number} ({answer!r:.60})")
        segments += [(rendered, True), (piece, False)]
        position += len(rendered) + len(piece)
    return segments, position


def _between_marks(
    tokenizer: Any, messages: list[dict[str, str]], *, enable_thinking: bool, add_generation_prompt: bool = False
) -> list[str]:
    """Render with a mark in place of every answer; the text before, between and after the marks."""
    mark = "\ue000\ue001\ue002"  # private use: nothing trims or upper-cases them, and no text has them
    marked = [{"role": "assistant", "content": mark} if m["role"] == "assistant" else m for m in messages]
    text = _render(tokenizer, marked, enable_thinking=enable_thinking, add_generation_prompt=add_generation_prompt)
    return text.split(mark)


def _template_marks(tokenizer: Any) -> tuple[str, str, str]:
    """(assistant header, what the template inserts after it before an answer without thoughts, end of turn)."""
    asked = [{"role": "user", "content": "?"}]
    plain = _render(tokenizer, asked, enable_thinking=False)
    thinking = _render(tokenizer, asked, enable_thinking=True, add_generation_prompt=True)
    direct = _render(tokenizer, asked, enable_thinking=False, add_generation_prompt=True)
    header = min(thinking, direct, key=len)[len(plain) :]
    answered = [*asked, {"role": "assistant", "content": ""}]
    before, after = _between_marks(tokenizer, answered, enable_thinking=False)
    inserted = before.removeprefix(plain + header) if before.startswith(plain + header) else ""
    return header, inserted, after.rstrip()


def _render(
    tokenizer: Any, messages: list[dict[str, str]], *, enable_thinking: bool, add_generation_prompt: bool = False
) -> str:
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
    )


def _reasoning(message: dict[str, str]) -> str:
    """The thought of an assistant turn, from its own field or from a <think> block; "" if there is none."""
    if message.get("reasoning_content"):
        return message["reasoning_content"].strip()
    thought, separator, _ = message["content"].partition("</think>")
    return thought.removeprefix("<think>").strip() if separator else ""


def _without_reasoning(message: dict[str, str]) -> str:
    _, separator, answer = message["content"].partition("</think>")
    return answer.lstrip("\n") if separator else message["content"]


def _pretokenised(row: Row, vocab_size: int) -> tuple[list[int], list[int]]:
    """Tokens and mask as given. ValueError for a token outside the vocabulary or a mask value that is not 0 or 1."""
    where = row["source"]
    for position, token in enumerate(row["input_ids"]):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"{where}: input_ids[{position}] is {token!r}, outside the vocabulary of {vocab_size}")
    for position, value in enumerate(row["loss_mask"]):
        if value not in (0, 1):
            raise ValueError(f"{where}: loss_mask[{position}] is {value!r}, expected 0 or 1")
    return list(row["input_ids"]), [int(value) for value in row["loss_mask"]]
