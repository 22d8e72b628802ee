"""The torch engine: requests join and leave a batch between rounds. Plain decoding is this engine without a drafter.

One thread drives it: `add` and `cancel` between calls of `step`. Active rows are kept compact, so a round works on the
first r slots; a prompt is taken in beside them, in the slot behind the last, a piece per step. What a request gets does
not depend on the others, on when it arrived, or on the drafter.

On a card a round is a CUDA graph, and the host reads a round behind: it launches the next one before it looks at what
the last one gave, so a row that has ended goes through one more, whose tokens are dropped.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from domino_core.decode import Acceptance, Drawn, RoundShape, advance, drafts_to_verify, tokens_of
from domino_core.decode_state import PREFILL_CHUNK, DecodeState, DraftModel, first_token, prefill_chunk
from domino_core.drafter import Drafter
from domino_core.fused import on_card
from domino_core.fused_drafter import FusedDrafter
from domino_core.round_graphs import RoundGraphs, row_counts
from domino_core.sampling import AcceptRule, RowSampling, accept
from domino_core.sampling_params import SamplingParams
from domino_core.target_model import Target
from domino_core.verify_length import VerifyLength, candidates

TIMED_ROUNDS = 3

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
    """An active request. slot: its index in Engine._rows, None once it has left. in_flight: rounds not yet read."""

    request_id: int
    request: Request
    slot: int | None
    emitted: int = 0
    in_flight: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(kw_only=True)
class _Joining:
    """A request whose prompt is being taken in."""

    request_id: int
    request: Request
    prefilled: int = 0


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """A round that runs or has run, and the rows that it was of. ready: None where nothing is left to wait for."""

    rows: list[_Row]
    num_drafts: int
    drawn: Drawn
    ready: torch.cuda.Event | None


class Engine:
    """max_rows requests decode at once, the rest waits; max_length: prompt and output tokens of one request.

    num_verify: drafts verified per round (None: the whole block; 0: plain decoding, the drafter's context kept up;
    "auto": what gives most tokens per second, see verify_length.py). It may be changed between rounds and changes no
    output but that of rejection sampling. accept: for benchmarks that impose an acceptance. `acceptance` counts all
    rounds so far; `last_verify`: the last one's drafts.
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
        self._length: VerifyLength | None = None
        self.acceptance = Acceptance()
        self._state = DecodeState.allocate(target, self.drafter, max_rows + 1, max_length)
        self._state.active_B.zero_()
        graphs = on_card(target.embed_VD) and not isinstance(self.drafter, Drafter)
        self._graphs = RoundGraphs(self._advance, self._state, max_rows) if graphs else None
        self._launched: deque[_Launched] = deque()
        self._rows: list[_Row] = []
        self._joining: _Joining | None = None  # in slot max_rows
        self._waiting: deque[tuple[int, Request]] = deque()
        self._next_id = 0
        self._settings: list[SamplingParams] | None = None  # of the active rows; None: rows came or went
        self._sampling: RowSampling | None = None  # the same, stacked for rounds that are no graph

    @property
    def has_work(self) -> bool:
        return self._busy or bool(self._waiting)

    @property
    def _busy(self) -> bool:
        return bool(self._rows or self._joining or self._launched)

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
        if self.num_verify == "auto" and self._length is None and not self._busy:
            self.warm_up()
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
        # A round that could only run beyond the end of every row is not worth its launch.
        if any(row.emitted + row.in_flight < row.request.max_tokens for row in self._rows):
            self._launch()
            behind = int(self._graphs is not None and self._launched[-1].ready is not None)
        else:
            behind = 0
        while len(self._launched) > behind:
            outputs += self._read()
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
        self._state.active_B[index] = 1
        self._rows.append(_Row(request_id=joining.request_id, request=request, slot=index))
        self._settings = None
        output = self._emit(self._rows[index], [token], logits_V[None])
        if output.finish_reason:
            self._leave(index)
        return output

    def _advance(self, sampling: RowSampling, shape: RoundShape, settle: bool = True) -> Drawn:
        return advance(self.target, self.drafter, self._state, sampling, shape, accept=self._accept, settle=settle)

    def _launch(self) -> None:
        if self._settings is None:
            self._settings = [row.request.sampling for row in self._rows]
            self._sampling = RowSampling.stack(self._settings, self.target.device)
        assert self._sampling is not None
        num_rows = len(self._rows)
        num_drafts = self._num_drafts(num_rows)
        num_keys = max(self._state.lengths[:num_rows]) + num_drafts + 1
        ready = None
        if self._graphs is not None and self._sampling.adjustment is None:
            drawn = self._graphs.run(self._settings, num_drafts, num_keys)
            # Off the graph's memory and over to the host; whoever wants logits reads them before the next round runs.
            host = [t[:num_rows].to("cpu", non_blocking=True) for t in (drawn.accepted_B, drawn.tokens_BT)]
            drawn = Drawn(accepted_B=host[0], tokens_BT=host[1], logits_BTV=drawn.logits_BTV)
            if all(row.request.logprobs is None for row in self._rows):
                ready = torch.cuda.Event()
                ready.record()
            else:
                torch.cuda.current_stream().synchronize()
        else:
            drawn = self._advance(self._sampling, RoundShape(num_rows, num_drafts, num_keys))
        self._state.reserve(num_rows, num_drafts + 1)
        for row in self._rows:
            row.in_flight += 1
        self._launched.append(_Launched(rows=list(self._rows), num_drafts=num_drafts, drawn=drawn, ready=ready))

    def _num_drafts(self, num_rows: int) -> int:
        if not isinstance(self.num_verify, str):
            return drafts_to_verify(self.drafter, self.num_verify)
        if self._length is None:  # asked for while rows decode: it is measured when they are through
            return drafts_to_verify(self.drafter, None)
        return self._length.choose(num_rows)

    def _read(self) -> list[Output]:
        """The outputs of the oldest round whose tokens have not been looked at."""
        launched = self._launched.popleft()
        if launched.ready is not None:
            launched.ready.synchronize()
        self.last_verify = launched.num_drafts
        outputs: list[Output] = []
        accepted: list[int] = []
        for row, tokens, logits_TV in zip(
            launched.rows, tokens_of(launched.drawn), launched.drawn.logits_BTV, strict=False
        ):
            row.in_flight -= 1
            if row.slot is None:  # ended or cancelled while this round was on its way
                continue
            self._state.commit(row.slot, tokens, launched.num_drafts + 1)
            accepted.append(len(tokens) - 1)
            for counts in (row.acceptance, self.acceptance):
                counts.count(launched.num_drafts, len(tokens) - 1)
            outputs.append(self._emit(row, tokens, logits_TV))
        if self._length is not None and accepted:
            self._length.observe(launched.num_drafts, accepted)
        ended = {output.request_id for output in outputs if output.finish_reason}
        # From the back, so that the row that fills a gap is one that stays.
        for index in reversed([i for i, row in enumerate(self._rows) if row.request_id in ended]):
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
        self._rows[index].slot = None
        last = self._rows.pop()
        if index < len(self._rows):
            self._state.move_row(len(self._rows), index)
            self._rows[index], last.slot = last, index
        # The slot behind the last row is empty now. A graph may still work on it: let it stay where it is, and small.
        self._state.active_B[len(self._rows)] = 0
        self._state.length_B[len(self._rows)] = 0
        self._settings = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs of greedy rounds, and measure what num_verify="auto" chooses by. For an idle engine.

        Without it the first requests wait for that. Times are of rows with texts of a quarter of max_length.
        """
        assert not self._busy, "warm_up needs the engine for itself"
        available = drafts_to_verify(self.drafter, None)
        if isinstance(self.num_verify, str):
            lengths, counts = candidates(available), row_counts(self.max_rows)
        else:
            lengths = (drafts_to_verify(self.drafter, self.num_verify),)
            counts = row_counts(self.max_rows) if self._graphs is not None else ()
        seconds = {rows: {length: self._round_seconds(rows, length) for length in lengths} for rows in counts}
        if isinstance(self.num_verify, str):
            self._length = VerifyLength(num_drafts=available, seconds=seconds)

    def _round_seconds(self, num_rows: int, num_drafts: int) -> float:
        """Of a greedy round, the median of a few."""
        settings, state = [SamplingParams()] * num_rows, self._state
        sampling = RowSampling.stack(settings, self.target.device)
        text = max(1, self.max_length // 4)
        state.length_B[:num_rows] = text
        state.drawn_B.zero_()
        state.anchor_B.zero_()
        times: list[float] = []
        for _ in range(1 + TIMED_ROUNDS):  # the first one compiles
            started = time.perf_counter()
            if self._graphs is not None:
                tokens_of(self._graphs.run(settings, num_drafts, text + num_drafts + 1))
            else:
                shape = RoundShape(num_rows, num_drafts, text + num_drafts + 1)
                tokens_of(self._advance(sampling, shape, settle=False))
            times.append(time.perf_counter() - started)
        state.length_B.zero_()
        return statistics.median(times[1:])


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
