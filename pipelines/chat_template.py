"""Where the answers are in a rendered conversation: which text the target generates, and which the template writes.

Qwen3's template has no generation tags, so the places are found by rendering. The conversation is rendered as it is,
and once more with marks in place of the answers; what stands between marks is the template's or the user's. Supervised
is what lies between a turn's beginning, as a generation prompt leaves it, and its end: words, tool calls, and a thought
that the template keeps. Not supervised is an empty think block that the template puts in, or a <think> that the prompt
has opened already. A rendering that cannot be explained in this way is a ValueError, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from pipelines.prompt_rows import answer_text, reasoning

Segment = tuple[str, bool]  # text, whether the target generated it
Messages = list[dict[str, Any]]
MARK = "\ue000\ue001\ue002"  # private use: nothing trims or upper-cases them, and no text has them


@dataclass(frozen=True, kw_only=True)
class TurnMarks:
    """How a template writes an assistant's turn, found by rendering small conversations."""

    header: str  # begins every such turn: "<|im_start|>assistant\n"
    empty_thought: str  # comes after it where the last answer has no thought: "<think>\n\n</think>\n\n", or nothing
    thinking_prompt: str  # a generation prompt with thinking on: the header, or the header and "<think>\n"
    direct_prompt: str  # and off: the header, or the header and the empty thought
    end: str  # "<|im_end|>"

    @property
    def opened_thought(self) -> str:
        """What a generation prompt has written of a thought already."""
        return self.thinking_prompt.removeprefix(self.header)


def conversation_segments(
    messages: Messages, tokenizer: Any, *, tools: Messages | None = None, enable_thinking: bool, where: str
) -> list[Segment]:
    """Cut a rendered conversation into what template and user wrote (unsupervised) and the answers (supervised)."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        remedy = "let the target answer first (answer.when=missing, or `python -m jobs.regenerate`)"
        raise ValueError(f"{where}: no assistant turn to learn from; {remedy}")
    marks = turn_marks(tokenizer, tokenizer.chat_template, enable_thinking)
    full = _render(tokenizer, messages, tools, enable_thinking, where=where)
    for number, message in enumerate(messages, 1):
        said = (message["content"], message.get("reasoning_content", ""))
        if message["role"] == "assistant" and marks.end and any(marks.end in text for text in said):
            raise ValueError(f"{where}: turn {number} has {marks.end} inside its text; cut the answer there")
    marked = [{"role": "assistant", "content": MARK} if m["role"] == "assistant" else m for m in messages]
    pieces = _render(tokenizer, marked, tools, enable_thinking, where=where).split(MARK)
    closing = pieces.pop()
    # The marked rendering has an empty thought where the real one may have a thought.
    fixed = [
        p.removesuffix(marks.empty_thought) if p.endswith(marks.header + marks.empty_thought) else p for p in pieces
    ]
    if len(fixed) != len(answers) or not full.startswith(fixed[0]) or not full.endswith(closing):
        remedy = "split the conversation into rows"
        raise ValueError(f"{where}: the chat template drops or reorders assistant turns; {remedy}")
    segments: list[Segment] = []
    position = 0
    for number, answer in enumerate(answers, 1):
        begin = position + len(fixed[number - 1])
        last = number == len(answers)
        end = len(full) - len(closing) if last else full.find(fixed[number], begin)
        turn = full[begin:end] if end >= begin else ""
        if end < begin or not _says(turn, answer):
            text = answer_text(answer)
            raise ValueError(f"{where}: the chat template changes the text of assistant turn {number} ({text!r:.60})")
        inserted = _inserted(turn, answer, marks)
        segments += [(full[position : begin + inserted], False), (turn[inserted:], True)]
        position = end
        if last and messages[-1]["role"] == "assistant":
            _check_continues(full[begin - len(marks.header) :], marks, where)
    _check_complete(full, messages, tools, where)
    return [*segments, (closing, False)]


def text_segments(text: str, tokenizer: Any) -> list[Segment]:
    """The same for a text that was already rendered, by the template's assistant header and end of turn."""
    marks = turn_marks(tokenizer, tokenizer.chat_template, False)
    segments: list[Segment] = []
    start = 0
    while marks.header and (found := text.find(marks.header, start)) >= 0:
        answer = found + len(marks.header)
        opening = (marks.empty_thought, marks.opened_thought)
        answer += next((len(o) for o in opening if o and text.startswith(o, answer)), 0)
        end = text.find(marks.end, answer) if marks.end else -1
        end = len(text) if end < 0 else end
        segments += [(text[start:answer], False), (text[answer:end], True)]
        start = end
    return [*segments, (text[start:], False)] if start < len(text) else segments


@lru_cache(maxsize=8)
def turn_marks(tokenizer: Any, template: str | None, enable_thinking: bool) -> TurnMarks:
    """The marks of a tokenizer's `template` (named for the cache). ValueError if its prompts do not continue turns."""
    asked = [{"role": "user", "content": "?"}]
    answered = [*asked, {"role": "assistant", "content": MARK}]
    plain = _render(tokenizer, asked, None, enable_thinking)
    last, end = _render(tokenizer, answered, None, enable_thinking).split(MARK)
    earlier = _render(tokenizer, [*answered, *asked], None, enable_thinking).split(MARK)[0]
    thinking, direct = (_render(tokenizer, asked, None, on, prompt=True) for on in (True, False))
    if not all(text.startswith(plain) for text in (last, earlier, thinking, direct)):
        raise ValueError("the chat template renders a question in another way once it is answered; it cannot be used")
    last, earlier, thinking, direct = (text[len(plain) :] for text in (last, earlier, thinking, direct))
    begins = (last, earlier, thinking, direct)
    shared = takewhile(lambda characters: len(set(characters)) == 1, zip(*begins, strict=False))
    header = "".join(characters[0] for characters in shared)
    return TurnMarks(
        header=header,
        empty_thought=last[len(header) :],
        thinking_prompt=thinking,
        direct_prompt=direct,
        end=end.rstrip(),
    )


def _inserted(turn: str, message: dict[str, Any], marks: TurnMarks) -> int:
    """Characters at the beginning of a rendered turn that the template wrote."""
    thought = reasoning(message)
    before, closed, _ = turn.partition("</think>")
    opening = marks.opened_thought if thought and closed and thought in before else marks.empty_thought
    return len(opening) if turn.startswith(opening) else 0


def _says(turn: str, message: dict[str, Any]) -> bool:
    """Whether a rendered turn is the message: its answer at the end, or its answer and then all its tool calls."""
    answer = answer_text(message).strip()
    if message.get("tool_calls"):
        at = turn.find(answer)
        return at >= 0 and all(_name(call) in turn[at + len(answer) :] for call in message["tool_calls"])
    return turn.rstrip().endswith(answer)


def _check_complete(full: str, messages: Messages, tools: Messages | None, where: str) -> None:
    """ValueError for what a template leaves out of a prompt without a word."""
    for number, message in enumerate(messages, 1):
        if message["role"] in ("system", "user") and message["content"].strip() not in full:
            raise ValueError(f"{where}: the chat template leaves out or changes turn {number} (role {message['role']})")
    for tool in tools or ():
        if _name(tool) not in full:
            raise ValueError(f"{where}: the chat template leaves out the tools; remove `tools` from the row")


def _check_continues(rest: str, marks: TurnMarks, where: str) -> None:
    """ValueError unless the last turn goes on from where a generation prompt, as serving sends it, ends."""
    if not rest.startswith((marks.thinking_prompt, marks.direct_prompt)):
        prompts = f"{marks.thinking_prompt!r} or {marks.direct_prompt!r}"
        remedy = "let the target answer anew (answer.when=always, or `python -m jobs.regenerate`)"
        raise ValueError(
            f"{where}: a prompt for this answer ends with {prompts}, the chat template writes the answer as "
            f"{rest[: len(marks.thinking_prompt) + 20]!r}, so training would see what serving never sends; {remedy}"
        )


def _name(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _render(
    tokenizer: Any,
    messages: Messages,
    tools: Messages | None,
    enable_thinking: bool,
    *,
    prompt: bool = False,
    where: str = "",
) -> str:
    from domino_core.target import apply_chat_template

    try:
        return apply_chat_template(
            tokenizer, messages, tools=tools, enable_thinking=enable_thinking, add_generation_prompt=prompt
        )
    except ValueError as error:  # which does not know the row
        raise ValueError(f"{where}: {error}" if where else str(error)) from error
