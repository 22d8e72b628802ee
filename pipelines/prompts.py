"""Rows to tokens: what a row is to training, and which of its tokens the drafter may learn from.

Five row shapes come in (messages, conversations in two dialects, text, tokens); one comes out: sample_id, input_ids,
loss_mask, metadata. Only what the target itself would generate is supervised: an assistant's words and its end-of-turn
token (`pipelines/chat_template.py`). Answers are tokenised apart from what precedes them, exactly as they meet at
serving time.

`prepare_row` is the one place that decides whether a row is trained on; the stream, the estimate and `jobs.inspect`
all ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from domino_core.target import render_chat
from pipelines.chat_template import Segment, conversation_segments, text_segments
from pipelines.prompt_files import prompt_chunks, read_chunk, read_prompts
from pipelines.prompt_rows import ID_KEYS, Row, check_shape, is_conversation, token_lists, tools, turns

if TYPE_CHECKING:
    from pipelines.capture import CaptureConfig
    from pipelines.regenerate import AnswerConfig

__all__ = [
    "TokenRow",
    "UnusableRow",
    "answer_prompt",
    "has_anchor",
    "normalise",
    "prepare_row",
    "prompt_chunks",
    "prompts_for_answering",
    "read_chunk",
    "read_prompts",
]

_RESERVED = {*ID_KEYS, "source", "messages", "conversations", "text", "tools", "input_ids", "loss_mask", "metadata"}


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A row as the engines get it, cut to capture.max_length."""

    sample_id: str
    input_ids: list[int]
    loss_mask: list[int]  # empty if the target has to answer first
    needs_answer: bool
    full_length: int  # tokens before the cut


@dataclass(frozen=True, kw_only=True)
class UnusableRow:
    """A row that is not trained on. `failed`: it is wrong; otherwise it only does not fit these settings."""

    sample_id: str
    reason: str
    failed: bool
    full_length: int | None = None  # None: it has no tokens


def prepare_row(row: Row, tokenizer: Any, answer: AnswerConfig, capture: CaptureConfig) -> TokenRow | UnusableRow:
    """What training makes of a raw row of `read_prompts`: tokens, a prompt to answer, or the reason why neither."""
    sample_id, limit = row["sample_id"], capture.max_length
    needs_answer = answer.when == "always" or (answer.when == "missing" and not has_answer(row))
    try:  # the boundary to a user's data: one bad row must not end a run of days
        if needs_answer:
            input_ids, loss_mask = answer_prompt(row, tokenizer, enable_thinking=answer.enable_thinking), []
        else:
            uniform = capture.allow_uniform_mask
            found = normalise(row, tokenizer, enable_thinking=answer.enable_thinking, allow_uniform_mask=uniform)
            input_ids, loss_mask = found["input_ids"], found["loss_mask"]
    except ValueError as error:
        return UnusableRow(sample_id=sample_id, reason=str(error), failed=True)
    length, reason = len(input_ids), None
    if needs_answer and length > limit - 2:
        reason = f"prompt of {length} tokens, no room in capture.max_length={limit}"
    elif not needs_answer and not has_anchor(loss_mask[:limit]):
        reason = f"no two neighbouring supervised tokens in the first {min(length, limit)}"
    if reason:
        return UnusableRow(sample_id=sample_id, reason=reason, failed=False, full_length=length)
    return TokenRow(
        sample_id=sample_id,
        input_ids=input_ids[:limit],
        loss_mask=loss_mask[:limit],
        needs_answer=needs_answer,
        full_length=length,
    )


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
    elif is_conversation(row):
        asked: dict[str, Any] = {"tools": tools(row), "enable_thinking": enable_thinking}
        segments = conversation_segments(turns(row), tokenizer, where=where, **asked)
        input_ids, loss_mask = encode_segments(segments, tokenizer)
    else:
        input_ids, loss_mask = encode_segments(text_segments(row["text"], tokenizer), tokenizer)
    if not input_ids:
        raise ValueError(f"{where}: no tokens; remove the row")
    if not allow_uniform_mask and len(set(loss_mask)) == 1:
        what = "every token is" if loss_mask[0] else "no token is"
        remedy = "check roles and chat template, or set capture.allow_uniform_mask=true if this is meant"
        raise ValueError(f"{where}: {what} supervised; {remedy}")
    metadata = row["metadata"] if isinstance(row.get("metadata"), dict) else {}
    metadata = metadata | {key: value for key, value in row.items() if key not in _RESERVED}
    input_ids, loss_mask = input_ids[:max_length], loss_mask[:max_length]
    return {"sample_id": row["sample_id"], "input_ids": input_ids, "loss_mask": loss_mask, "metadata": metadata}


def has_anchor(loss_mask: list[int]) -> bool:
    """Whether a block can start in this row: two neighbouring supervised tokens, as in `blocks.anchor_candidates`."""
    return any(a and b for a, b in pairwise(loss_mask))


def has_answer(row: Row) -> bool:
    """Whether a row brings something to learn from, so that the target need not answer first."""
    if row.get("input_ids") is None and is_conversation(row):
        return turns(row)[-1]["role"] == "assistant"
    return True  # tokens and rendered texts are used as they are


def prompts_for_answering(row: Row) -> list[dict[str, Any]]:
    """The messages up to the last turn of a user or a tool. ValueError if the row has no user turn."""
    if not is_conversation(row):
        raise ValueError(f"{row['source']}: only messages or conversations can be cut at their last user turn")
    messages = turns(row)
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"{row['source']}: no user turn, so there is nothing to answer; remove the row")
    last = max(i for i, message in enumerate(messages) if message["role"] in ("user", "tool"))
    return messages[: last + 1]


def answer_prompt(row: Row, tokenizer: Any, *, enable_thinking: bool = False) -> list[int]:
    """Tokens after which the target's answer begins: what serving would send for this conversation.

    A text is cut after its last assistant header, tokens are cut before their last supervised run.
    """
    check_shape(row)
    if is_conversation(row):
        messages = prompts_for_answering(row)
        try:
            return render_chat(tokenizer, messages, tools=tools(row), enable_thinking=enable_thinking)
        except ValueError as error:  # which does not know the row
            raise ValueError(f"{row['source']}: {error}") from error
    if row.get("input_ids") is not None:
        input_ids, loss_mask = _pretokenised(row, len(tokenizer))
        starts = [i for i, value in enumerate(loss_mask) if value and (i == 0 or not loss_mask[i - 1])]
        prompt = input_ids[: starts[-1] if starts else None]
    else:
        segments = text_segments(row["text"], tokenizer)
        answers = [i for i, (_, supervised) in enumerate(segments) if supervised]
        prompt, _ = encode_segments(segments[: answers[-1]] if answers else segments, tokenizer)
    if not prompt:
        raise ValueError(f"{row['source']}: no tokens before the supervised ones, so there is nothing to answer")
    return prompt


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


def _pretokenised(row: Row, vocab_size: int) -> tuple[list[int], list[int]]:
    """Tokens and mask as given. ValueError for a token outside the vocabulary or a mask value that is not 0 or 1."""
    where = row["source"]
    ids, mask = token_lists(row)
    for position, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool):
            kind = type(token).__name__
            raise ValueError(f"{where}: input_ids[{position}] is {token!r:.60} ({kind}); tokens are whole numbers")
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where}: input_ids[{position}] is {token!r}, outside the vocabulary of {vocab_size}")
    for position, value in enumerate(mask):
        if value not in (0, 1):
            raise ValueError(f"{where}: loss_mask[{position}] is {value!r}, expected 0 or 1")
    return list(ids), [int(value) for value in mask]
