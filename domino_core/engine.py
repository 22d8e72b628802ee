"""The torch engine: requests join and leave a batch between rounds. Plain decoding is this engine without a drafter.

One thread drives it: `add` and `cancel` between calls of `step`. Active rows are kept compact, so a round works on the
first r slots; a prompt is taken in beside them, in the slot behind the last, a piece per step. What a request gets does
not depend on the others, on when it arrived, or on the drafter.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from domino_core.decode import Acceptance, speculative_round
from domino_core.decode_state import PREFILL_CHUNK, DecodeState, DraftModel, first_token, prefill_chunk
from domino_core.drafter import Drafter
from domino_core.fused_drafter import FusedDrafter
from domino_core.sampling import AcceptRule, RowSampling, accept
from domino_core.sampling_params import SamplingParams
from domino_core.target_model import Target
from domino_core.verify_length import VerifyLength

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """stop_token_ids: every id that ends the output; the model's end-of-text ids are the caller's to include.

    logprobs: None, or how many alternatives to report beside each token's own log-probability (0 is fine).
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities under the target's unprocessed logits, as OpenAI and vLLM report them; top: (id, value)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Output:
    """New tokens of a request. A stop token is emitted, nothing behind it is. acceptance: of this request so far."""

    request_id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    acceptance: Acceptance


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All output of a request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    acceptance: Acceptance


@dataclass(kw_only=True)
class _Row:
    """An active request; its slot is its index in Engine._rows."""

    request_id: int
    request: Request
    emitted: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(kw_only=True)
class _Joining:
    """A request whose prompt is being taken in."""

    request_id: int
    request: Request
    prefilled: int = 0


class Engine:
    """max_rows requests decode at once, the rest waits; max_length: prompt and output tokens of one request.

    num_verify: drafts verified per round (None: the whole block; 0: plain decoding, the drafter's context kept up;
    "auto": what gives most tokens per second, see verify_length.py). It may be changed between rounds and changes no
    output but that of rejection sampling. accept: for benchmarks that impose an acceptance. `acceptance` counts all rounds so far; `last_verify`: the last one's drafts.
    """

    def __init__(
        self,
        target: Target,
        drafter: DraftModel | None,
        *,
        max_rows: int,
        max_length: int,
        num_verify: int | Literal["auto"] | None = None,
        accept: AcceptRule = accept,
    ) -> None:
        limit = target.config.max_position_embeddings
        if not 2 <= max_length <= limit:
            raise ValueError(f"max_length={max_length} must be in 2..{limit}, the target's max_position_embeddings")
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        if num_verify != "auto" and num_verify is not None and num_verify < 0:
            raise ValueError(f"num_verify={num_verify} must not be negative; None verifies whole blocks")
        if drafter is not None:
            drafter.config.check_fits(target.config)
        self.target = target
        self.drafter = FusedDrafter(drafter) if isinstance(drafter, Drafter) else drafter
        self.max_rows = max_rows
        self.max_length = max_length
        self.num_verify = num_verify
        self.last_verify = 0
        self._accept = accept
        self._length = VerifyLength(num_drafts=drafter.config.num_drafts if drafter is not None else 0)
        self.acceptance = Acceptance()
        self._state = DecodeState.allocate(target, self.drafter, max_rows + 1, max_length)
        self._rows: list[_Row] = []
        self._joining: _Joining | None = None  # in slot max_rows
        self._waiting: deque[tuple[int, Request]] = deque()
        self._next_id = 0
        self._sampling: RowSampling | None = None  # of the active rows; None: rows came or went

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._joining or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + (self._joining is not None)

    def add(self, request: Request) -> int:
        """Queue a request and return its id. ValueError for one that could never run; a full engine makes it wait."""
        prompt, vocabulary = request.prompt_ids, self.target.config.vocab_size
        if not prompt:
            raise ValueError("the prompt is empty; it needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ValueError(f"prompt token ids {min(prompt)}..{max(prompt)} must be in 0..{vocabulary - 1}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens={request.max_tokens} must be at least 1")
        if len(prompt) + request.max_tokens > self.max_length:
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_tokens={request.max_tokens} exceed max_length={self.max_length}; "
                "shorten the prompt or ask for fewer tokens"
            )
        if request.logprobs is not None and not 0 <= request.logprobs <= vocabulary:
            raise ValueError(f"logprobs={request.logprobs} must be in 0..{vocabulary}")
        outside = [token for token, _ in request.sampling.logit_bias if token >= vocabulary]
        if outside:
            raise ValueError(f"logit_bias names token {outside[0]}; ids are in 0..{vocabulary - 1}")
        self._next_id += 1
        self._waiting.append((self._next_id, request))
        return self._next_id

    def cancel(self, request_id: int) -> None:
        """Drop a request; no output of it follows. One that has finished is no error: the caller cannot know."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)
        if self._joining is not None and self._joining.request_id == request_id:
            self._joining = None
        for index, row in enumerate(self._rows):
            if row.request_id == request_id:
                self._leave(index)
                return

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Take in up to PREFILL_CHUNK prompt tokens (a chunk more at most), then run a round of the rows that decode.

        A request that joins may appear twice in the outputs, or not at all while its prompt is long.
        """
        outputs: list[Output] = []
        budget = PREFILL_CHUNK
        while budget > 0 and len(self._rows) < self.max_rows and (self._joining or self._waiting):
            joining = self._joining or _Joining(request_id=self._waiting[0][0], request=self._waiting.popleft()[1])
            self._joining, begin = joining, joining.prefilled
            prompt = joining.request.prompt_ids
            joining.prefilled, hidden_1D = prefill_chunk(
                self.target, self.drafter, self._state, self.max_rows, prompt, begin
            )
            budget -= joining.prefilled - begin
            if joining.prefilled == len(prompt):
                self._joining = None
                outputs.append(self._join(joining, hidden_1D))
        if self._rows:
            outputs += self._round()
        return outputs

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests to their ends on an idle engine; completions in the order of the requests."""
        assert not self.has_work, "generate needs the engine for itself"
        ids = [self.add(request) for request in requests]
        outputs: dict[int, list[Output]] = {request_id: [] for request_id in ids}
        while self.has_work:
            for output in self.step():
                outputs[output.request_id].append(output)
        return [_join_outputs(outputs[request_id]) for request_id in ids]

    def _join(self, joining: _Joining, hidden_1D: Tensor) -> Output:
        index, request = len(self._rows), joining.request
        sampling = RowSampling.stack([request.sampling], self.target.device)
        token, logits_V = first_token(self.target, self._state, self.max_rows, request.prompt_ids, sampling, hidden_1D)
        self._state.move_row(self.max_rows, index)
        self._rows.append(_Row(request_id=joining.request_id, request=request))
        self._sampling = None
        output = self._emit(self._rows[index], [token], logits_V[None])
        if output.finish_reason:
            self._leave(index)
        return output

    def _round(self) -> list[Output]:
        if self._sampling is None:
            self._sampling = RowSampling.stack([row.request.sampling for row in self._rows], self.target.device)
        num_rows = len(self._rows)
        wanted = self._length.choose(num_rows) if isinstance(self.num_verify, str) else self.num_verify
        started = time.perf_counter()
        result = speculative_round(self.target, self.drafter, self._state, self._sampling, num_rows, wanted, self._accept)
        seconds = time.perf_counter() - started  # the round ended with a wait for the device
        self.last_verify = result.num_drafts
        self._length.observe(num_rows, result.num_drafts, [len(tokens) - 1 for tokens in result.tokens], seconds)
        outputs: list[Output] = []
        for row, tokens, logits_TV in zip(self._rows, result.tokens, result.logits_BTV, strict=True):
            for counts in (row.acceptance, self.acceptance):
                counts.count(result.num_drafts, len(tokens) - 1)
            outputs.append(self._emit(row, tokens, logits_TV))
        # From the back, so that the row that fills a gap is one that stays.
        for index in reversed([index for index, output in enumerate(outputs) if output.finish_reason]):
            self._leave(index)
        return outputs

    def _emit(self, row: _Row, tokens: list[int], logits_TV: Tensor) -> Output:
        """Cut the row's new tokens at its first stop token and its budget."""
        request, reason = row.request, None
        tokens = tokens[: request.max_tokens - row.emitted]
        for index, token in enumerate(tokens):
            if token in request.stop_token_ids:
                tokens, reason = tokens[: index + 1], "stop"
                break
        row.emitted += len(tokens)
        if reason is None and row.emitted == request.max_tokens:
            reason = "length"
        return Output(
            request_id=row.request_id,
            tokens=tokens,
            logprobs=None if request.logprobs is None else _logprobs(logits_TV, tokens, request.logprobs),
            finish_reason=reason,
            acceptance=row.acceptance.copy(),
        )

    def _leave(self, index: int) -> None:
        """Free a slot; the last active row moves into it."""
        last = self._rows.pop()
        if index < len(self._rows):
            self._state.move_row(len(self._rows), index)
            self._rows[index] = last
        self._sampling = None


def _logprobs(logits_TV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    logprobs_TV = logits_TV[: len(tokens)].float().log_softmax(-1)
    own: list[float] = logprobs_TV.gather(1, torch.tensor(tokens, device=logits_TV.device)[:, None])[:, 0].tolist()
    top = logprobs_TV.topk(num_top, dim=-1)
    pairs = [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return [TokenLogprobs(token=t, logprob=v, top=p) for t, v, p in zip(tokens, own, pairs, strict=True)]


def _join_outputs(outputs: list[Output]) -> Completion:
    reason = outputs[-1].finish_reason
    assert reason is not None
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    return Completion(
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=logprobs if outputs[-1].logprobs is not None else None,
        finish_reason=reason,
        acceptance=outputs[-1].acceptance,
    )
