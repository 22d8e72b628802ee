"""Response bodies of the two OpenAI routes, whole and in chunks, made from the same deltas.

A choice says which `seed` gives its answer again: null for a greedy one, which needs none, and under rejection
sampling, where the text also depends on what was drafted, so on the drafter and on the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from domino_core.request import Request as EngineRequest
from domino_core.request import TokenLogprobs
from serve.generation import Delta
from serve.schema import ChatRequest, CompletionRequest
from serve.text import Vocabulary


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass
class _Collected:
    """One answer as far as it has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    offset: int = 0  # characters spelled by the tokens whose log-probabilities are out (text_offset)


class _Shape:
    """What both routes share: collecting deltas, and holding back what cannot be shown yet."""

    def __init__(self, vocabulary: Vocabulary, body: CompletionRequest | ChatRequest) -> None:
        self._vocabulary = vocabulary
        self._wants_logprobs = body.num_logprobs is not None
        self._wants_tokens = body.return_token_ids
        self._requests: list[EngineRequest] = []
        self._answers: list[_Collected] = []

    def begin(self, requests: list[EngineRequest]) -> None:
        self._requests = requests
        self._answers = [_Collected() for _ in requests]

    def add(self, delta: Delta) -> _Collected:
        answer = self._answers[delta.index]
        answer.text += delta.text
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
        answer.finish_reason = delta.finish_reason
        return answer

    def take(self, delta: Delta) -> _Collected | None:
        """What to send now, which then counts as sent; None while nothing can be shown."""
        answer = self.add(delta)
        if not answer.text and answer.finish_reason is None:
            return None
        offset = answer.offset + (self._spelled(answer.tokens) if self._wants_logprobs else 0)
        self._answers[delta.index] = _Collected(offset=offset)
        return answer

    def _extras(self, index: int, answer: _Collected) -> dict[str, Any]:
        sampling = self._requests[index].sampling
        repeatable = not sampling.greedy and sampling.rule != "rejection"
        extras: dict[str, Any] = {"seed": sampling.seed if repeatable else None}
        if self._wants_tokens:
            extras["token_ids"] = answer.tokens
        return extras

    def _name(self, token: int) -> str:
        return self._vocabulary.spelled(token).decode("utf-8", errors="replace")

    def _spelled(self, tokens: list[int]) -> int:
        return sum(len(self._name(token)) for token in tokens)


class CompletionShape(_Shape):
    """/v1/completions."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"

    def opening(self, head: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    def chunk(self, head: dict[str, Any], delta: Delta) -> dict[str, Any] | None:
        answer = self.take(delta)
        return answer and {**head, "object": self.chunk_object, "choices": [self._choice(delta.index, answer)]}

    def whole(self, head: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        return {**head, "object": "text_completion", "choices": choices}

    def _choice(self, index: int, answer: _Collected) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(answer) if self._wants_logprobs else None,
            "finish_reason": answer.finish_reason,
        } | self._extras(index, answer)

    def _logprobs(self, answer: _Collected) -> dict[str, Any]:
        """Four parallel lists, OpenAI's legacy shape."""
        offsets, offset = [], answer.offset
        for entry in answer.logprobs:
            offsets.append(offset)
            offset += len(self._name(entry.token))
        return {
            "tokens": [self._name(entry.token) for entry in answer.logprobs],
            "token_logprobs": [entry.logprob for entry in answer.logprobs],
            "top_logprobs": [{self._name(t): p for t, p in entry.top} for entry in answer.logprobs],
            "text_offset": offsets,
        }


class ChatShape(_Shape):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def opening(self, head: dict[str, Any]) -> list[dict[str, Any]]:
        """The role of each answer, before its first text."""
        return [
            self._chunk(head, i, {"role": "assistant", "content": ""}, _Collected()) for i in range(len(self._requests))
        ]

    def chunk(self, head: dict[str, Any], delta: Delta) -> dict[str, Any] | None:
        answer = self.take(delta)
        return answer and self._chunk(head, delta.index, {"content": answer.text} if answer.text else {}, answer)

    def whole(self, head: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer) if self._wants_logprobs else None,
                "finish_reason": answer.finish_reason,
            }
            | self._extras(index, answer)
            for index, answer in enumerate(self._answers)
        ]
        return {**head, "object": "chat.completion", "choices": choices}

    def _chunk(self, head: dict[str, Any], index: int, delta: dict[str, str], answer: _Collected) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(answer) if self._wants_logprobs else None,
            "finish_reason": answer.finish_reason,
        } | self._extras(index, answer)
        return {**head, "object": self.chunk_object, "choices": [choice]}

    def _logprobs(self, answer: _Collected) -> dict[str, Any]:
        return {
            "content": [
                self._entry(entry.token, entry.logprob) | {"top_logprobs": [self._entry(t, p) for t, p in entry.top]}
                for entry in answer.logprobs
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": logprob, "bytes": list(self._vocabulary.spelled(token))}
