"""One HTTP request's answers while they are made: engine outputs become text, counted tokens and figures.

The same deltas feed a streamed and a whole response, so the two cannot differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from domino_core.decode import Acceptance
from domino_core.request import Output, Request, TokenLogprobs
from serve import request_log
from serve.metrics import Metrics, acceptance_report
from serve.replica import EngineLoop, Member, Ticket
from serve.text import TextStream, Vocabulary


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one round added to answer `index`. Tokens behind a stop string are in no delta."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one per token where they were asked for, else empty
    finish_reason: str | None


@dataclass(eq=False)
class Answer:
    """One answer on its way: its text so far, what it drafted, and how many tokens were committed."""

    request: Request
    text: TextStream
    ticket: Ticket | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_tokens: int = 0
    first_token_s: float = 0.0
    finished: bool = False
    ended: str = ""  # stop, length, abort or error, once it is over

    def take(self, index: int, output: Output) -> Delta:
        """Cut the output at a stop string. The token that completes it is the last that counts."""
        text, count, reason = "", 0, output.finish_reason
        for token in output.tokens:
            count += 1
            if count == len(output.tokens) and reason == "stop":
                break  # the engine stopped at this token (end of sequence or stop_token_ids): counted, not shown
            text += self.text.push(token)
            if self.text.stopped:
                reason = "stop"
                break
        if reason is not None and not self.text.stopped:
            text += self.text.finish()
            # An unfinished character that became U+FFFD may complete a stop string.
            reason = "stop" if self.text.stopped else reason
        self.num_tokens += count
        self.finished = reason is not None
        logprobs = tuple(output.logprobs[:count]) if output.logprobs else ()
        return Delta(
            index=index, text=text, tokens=tuple(output.tokens[:count]), logprobs=logprobs, finish_reason=reason
        )


class Generation:
    """All answers (prompts x n) of one HTTP request, on one engine: a swap in between does not split them."""

    def __init__(
        self,
        loop: EngineLoop,
        member: Member,
        metrics: Metrics,
        vocabulary: Vocabulary,
        requests: Sequence[Request],
        stops: Sequence[str],
        request_id: str,
    ) -> None:
        self._loop = loop
        self._request_id = request_id
        self._closed = False
        self._metrics = metrics
        self._member = member
        self._received: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()
        self._started = time.monotonic()
        self.version = self._member.version
        self.answers = [Answer(request, TextStream(vocabulary, stops)) for request in requests]

    def start(self) -> None:
        """Queue the requests; `close` must follow. EngineError when the engine is down."""
        event_loop = asyncio.get_running_loop()

        def receive(index: int, output: Output | Exception) -> None:
            # A closed event loop means that nobody listens any more (the server is going down).
            if not event_loop.is_closed():
                event_loop.call_soon_threadsafe(self._received.put_nowait, (index, output))

        for index, answer in enumerate(self.answers):
            answer.ticket = self._loop.submit(answer.request, partial(receive, index), self._member)
            self._metrics.admitted(self.version, len(answer.request.prompt_ids))

    async def deltas(self) -> AsyncIterator[Delta]:
        """Deltas of all answers as they come, until each is finished. EngineError or ValueError from the engine."""
        while not all(answer.finished for answer in self.answers):
            index, output = await self._received.get()
            answer = self.answers[index]
            if isinstance(output, Exception):
                self._count_end(answer, "error")
                raise output
            if answer.finished:
                continue  # a stop string ended it while the engine was in the next round
            if not answer.num_tokens and output.tokens:
                answer.first_token_s = time.monotonic() - self._started
                self._metrics.first_token(self.version, answer.first_token_s)
            delta = answer.take(index, output)
            self._metrics.progressed(self.version, len(delta.tokens), answer.acceptance, output.acceptance)
            answer.acceptance = output.acceptance
            if answer.finished:
                if output.finish_reason is None and answer.ticket is not None:
                    self._loop.cancel(answer.ticket)
                self._count_end(answer, delta.finish_reason or "stop")
            yield delta

    def close(self) -> None:
        """Free the rows of answers that are not finished: the client left, or something failed. May be called again."""
        for answer in self.answers:
            if not answer.finished and answer.ticket is not None:
                self._loop.cancel(answer.ticket)
                self._count_end(answer, "abort")
        if not self._closed:
            self._closed = True
            self._log_end()

    def _log_end(self) -> None:
        acceptance = Acceptance()
        for answer in self.answers:
            acceptance.merge(answer.acceptance)
        request_log.finished(
            self._request_id,
            tokens=self.completion_tokens,
            acceptance=acceptance,
            seconds=time.monotonic() - self._started,
            reason=",".join(sorted({answer.ended or "error" for answer in self.answers})),  # "": it never started
            version=self.version,
        )

    def _count_end(self, answer: Answer, reason: str) -> None:
        answer.finished, answer.ended = True, reason
        seconds, figures = time.monotonic() - self._started, self._member.figures
        self._metrics.finished(self.version, reason, seconds)
        if reason == "error":
            figures.failed()
        elif reason != "abort":  # that client has left: nobody knows how its answer would have ended
            figures.answered(answer.acceptance, answer.first_token_s, seconds - answer.first_token_s, answer.num_tokens)

    def figures(self) -> dict[str, Any]:
        """vLLM's `metrics` of a response: acceptance of a single answer, when there was a drafter."""
        drafter = self._member.engine.drafter
        if drafter is None or len(self.answers) != 1:
            return {"speculative_decoding": None}
        fixed, most = self._member.engine.num_verify, drafter.config.num_drafts
        report = acceptance_report(self.answers[0].acceptance, min(fixed, most) if isinstance(fixed, int) else most)
        return {"speculative_decoding": report}

    @property
    def completion_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)
