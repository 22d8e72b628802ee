"""The torch engine: requests join and leave a batch between rounds. Plain decoding is this engine without a drafter.

One thread drives it: `add` and `cancel` between calls of `step`. Active rows are kept compact, so a round works on the
first r slots; a prompt is taken in beside them, in the slot behind the last, a piece per step. What a request gets does
not depend on the others, on when it arrived, or on the drafter.

On a card a round is a CUDA graph, and the host reads a round behind: it launches the next one before it looks at what
the last one gave, so a row that has ended goes through one more, whose tokens are dropped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from domino_core.decode import Acceptance, drafts_to_verify
from domino_core.decode_state import PASS_LENGTHS, PREFILL_CHUNK, DecodeState, DraftModel, first_token, prefill_chunk
from domino_core.drafter import Drafter
from domino_core.fused_drafter import FusedDrafter
from domino_core.memory import EngineMemory, free_bytes
from domino_core.request import Completion, Output, Request, join_outputs, read_logprobs
from domino_core.round_graphs import SHORTEST, row_counts
from domino_core.rounds import Launched, Rounds
from domino_core.sampling import AcceptRule, RowSampling
from domino_core.sampling_params import SamplingParams
from domino_core.target_model import Target
from domino_core.verify_length import VerifyLength, candidates


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
class _Flight:
    """A round that has not been read, and the rows that it is of. late: the next one may be launched before."""

    rows: list[_Row]
    launched: Launched
    late: bool


class Engine:
    """max_rows requests decode at once, the rest waits; max_length: prompt and output tokens of one request.

    max_rows None: as many as fit into `memory`, see memory.py; more than fit are a ValueError. memory: bytes that
    caches and rounds may take; None: what is free on a card once the drafter is there. A CPU's is not looked at.

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
        max_rows: int | None,
        max_length: int,
        num_verify: int | Literal["auto"] | None = None,
        accept: AcceptRule | None = None,
        memory: int | None = None,
    ) -> None:
        limit = target.config.max_position_embeddings
        if not 2 <= max_length <= limit:
            raise ValueError(f"max_length={max_length} must be in 2..{limit}, the target's max_position_embeddings")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        if num_verify != "auto" and num_verify is not None and (isinstance(num_verify, str) or num_verify < 0):
            raise ValueError(f'num_verify={num_verify!r} must be 0 or more, "auto", or None for whole blocks')
        if drafter is not None:
            drafter.config.check_fits(target.config)
        self.target = target
        self.drafter = FusedDrafter(drafter) if isinstance(drafter, Drafter) else drafter
        free = free_bytes(target.device) if memory is None else memory
        config = drafter.config if drafter is not None else None
        self.max_rows = EngineMemory.of(target.config, config, max_length, target.dtype.itemsize).plan(max_rows, free)
        self.max_length = max_length
        self.num_verify = num_verify
        self.last_verify = 0
        self._length: VerifyLength | None = None
        self.acceptance = Acceptance()
        self._state = DecodeState.allocate(target, self.drafter, self.max_rows + 1, max_length)
        self._state.active_B.zero_()
        self._rounds = Rounds(target, self.drafter, self._state, self.max_rows, accept)
        self._prompts = self._rounds.prompt_graphs(self.max_rows)
        self._flights: deque[_Flight] = deque()
        self._rows: list[_Row] = []
        self._joining: _Joining | None = None  # in slot max_rows
        self._waiting: deque[tuple[int, Request]] = deque()
        self._next_id = 0
        self._settings: list[SamplingParams] | None = None  # of the active rows; None: rows came or went

    @property
    def has_work(self) -> bool:
        return self._busy or bool(self._waiting)

    @property
    def _busy(self) -> bool:
        return bool(self._rows or self._joining or self._flights)

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + (self._joining is not None)

    def add(self, request: Request) -> int:
        """Queue a request and return its id. ValueError for one that could never run; a full engine makes it wait."""
        request.check(self.target.config.vocab_size, self.max_length)
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
        if self._adapts and self._length is None and not self._busy:
            self.warm_up()
        outputs: list[Output] = []
        budget = PREFILL_CHUNK
        while budget > 0 and len(self._rows) < self.max_rows and (self._joining or self._waiting):
            joining = self._joining or _Joining(request_id=self._waiting[0][0], request=self._waiting.popleft()[1])
            self._joining, begin = joining, joining.prefilled
            prompt = joining.request.prompt_ids
            joining.prefilled, hidden_1D = prefill_chunk(
                self.target, self.drafter, self._state, self.max_rows, prompt, begin, self._prompts
            )
            budget -= joining.prefilled - begin
            if joining.prefilled == len(prompt):
                self._joining = None
                outputs.append(self._join(joining, hidden_1D))
        # A round that could only run beyond the end of every row is not worth its launch.
        behind = 0
        if any(row.emitted + row.in_flight < row.request.max_tokens for row in self._rows):
            self._launch()
            behind = int(self._flights[-1].late)
        while len(self._flights) > behind:
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
        return [join_outputs(outputs[request_id]) for request_id in ids]

    def _join(self, joining: _Joining, hidden_1D: Tensor) -> Output:
        index, request = len(self._rows), joining.request
        sampling = RowSampling.stack([request.sampling], self.target.device)
        token, logits_V = first_token(self.target, self._state, self.max_rows, request.prompt_ids, sampling, hidden_1D)
        self._state.move_row(self.max_rows, index)
        self._state.active_B[index] = 1
        self._rows.append(_Row(request_id=joining.request_id, request=request, slot=index))
        self._settings = None
        output = self._emit(self._rows[index], [token], logits_V[None] if request.logprobs is not None else None)
        if output.finish_reason:
            self._leave(index)
        return output

    def _launch(self) -> None:
        if self._settings is None:
            self._settings = [row.request.sampling for row in self._rows]
        num_rows = len(self._rows)
        num_drafts = self._num_drafts(num_rows)
        num_keys = max(self._state.lengths[:num_rows]) + num_drafts + 1
        launched = self._rounds.launch(self._settings, num_drafts, num_keys)
        self._state.reserve(num_rows, num_drafts + 1)
        for row in self._rows:
            row.in_flight += 1
        # Log-probabilities are read from logits that the next round overwrites.
        late = launched.by_graph and all(row.request.logprobs is None for row in self._rows)
        self._flights.append(_Flight(rows=list(self._rows), launched=launched, late=late))

    @property
    def _adapts(self) -> bool:
        return self.num_verify == "auto" and self.drafter is not None

    def _num_drafts(self, num_rows: int) -> int:
        if not isinstance(self.num_verify, str):
            return drafts_to_verify(self.drafter, self.num_verify)
        if self._length is None:  # asked for while rows decode: it is measured when they are through
            return drafts_to_verify(self.drafter, None)
        return self._length.choose(num_rows)

    def _read(self) -> list[Output]:
        """The outputs of the oldest round whose tokens have not been looked at."""
        flight = self._flights.popleft()
        num_drafts, logits_BTV = flight.launched.num_drafts, flight.launched.drawn.logits_BTV
        self.last_verify = num_drafts
        outputs: list[Output] = []
        accepted: list[int] = []
        for number, (row, tokens) in enumerate(zip(flight.rows, flight.launched.tokens(), strict=True)):
            row.in_flight -= 1
            if row.slot is None:  # ended or cancelled while this round was on its way
                continue
            self._state.commit(row.slot, tokens, num_drafts + 1)
            accepted.append(len(tokens) - 1)
            for counts in (row.acceptance, self.acceptance):
                counts.count(num_drafts, len(tokens) - 1)
            outputs.append(self._emit(row, tokens, logits_BTV[number] if row.request.logprobs is not None else None))
        if self._length is not None and accepted:
            self._length.observe(num_drafts, accepted)
        ended = {output.request_id for output in outputs if output.finish_reason}
        # From the back, so that the row that fills a gap is one that stays.
        for index in reversed([i for i, row in enumerate(self._rows) if row.request_id in ended]):
            self._leave(index)
        return outputs

    def _emit(self, row: _Row, tokens: list[int], logits_TV: Tensor | None) -> Output:
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
            logprobs=None if logits_TV is None else read_logprobs(logits_TV, tokens, request.logprobs or 0),
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

    def warm_up(self, kinds: Sequence[SamplingParams] = ()) -> None:
        """Capture graphs ahead, and measure what num_verify="auto" chooses by. For an idle engine.

        Without it the first requests wait for that. Captured are passes over prompts, greedy rounds and those of
        `kinds`, of texts up to 512 tokens. A text that passes 512, 1,024, … waits once for the graphs of longer ones,
        as does another kind of sampling. On a CPU there is nothing to do unless the length adapts.
        """
        for step in self.warm_up_steps(kinds):
            step()

    def warm_up_steps(self, kinds: Sequence[SamplingParams] = ()) -> list[Callable[[], object]]:
        """warm_up in its pieces, for a caller that has other engines to run in between. All of them, in order."""
        assert not self._busy, "warm_up needs the engine for itself"
        available = drafts_to_verify(self.drafter, None)
        lengths = candidates(available) if self._adapts else (self._num_drafts(1),)
        counts = row_counts(self.max_rows) if self._adapts or self._rounds.by_graphs else ()
        seconds: dict[int, dict[int, float]] = {rows: {} for rows in counts}

        def measure(rows: int, length: int) -> None:
            text = max(1, min(self.max_length // 4, SHORTEST - available - 1))
            seconds[rows][length] = self._rounds.seconds(rows, length, text, kinds)

        def adapt() -> None:
            self._length = VerifyLength(num_drafts=available, seconds=seconds)

        # The largest first: the others find room in the memory that it has left.
        steps: list[Callable[[], object]] = [
            partial(measure, rows, length) for rows in reversed(counts) for length in reversed(lengths)
        ]
        if self._prompts is not None:
            prompts = [length for length in reversed(PASS_LENGTHS) if length <= self.max_length]
            steps += [partial(self._prompts, [0] * length + [0, length - 1], length) for length in prompts]
        return [*steps, adapt] if self._adapts else [*steps]
