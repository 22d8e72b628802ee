"""How an engine's rounds are run: as CUDA graphs that are read later, or operation by operation.

Nothing here refers back to the engine, so that its memory is free when it is dropped, and not when Python next looks
for circles.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from domino_core.decode import Drawn, RoundShape, advance, drafts_to_verify, tokens_of
from domino_core.decode_state import DecodeState, DraftModel, take_in
from domino_core.fused import on_card
from domino_core.prompt_graphs import PromptGraphs
from domino_core.round_graphs import RoundGraphs
from domino_core.sampling import AcceptRule, RowSampling
from domino_core.sampling_params import SamplingParams
from domino_core.target_model import Target

TIMED_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A round that runs or has run. ready: None where nothing is left to wait for."""

    num_drafts: int
    drawn: Drawn
    by_graph: bool
    ready: torch.cuda.Event | None

    def tokens(self) -> list[list[int]]:
        """Of each row, those that count. Waits for this round, not for later ones."""
        if self.ready is not None:
            self.ready.synchronize()
        return tokens_of(self.drawn)


class Rounds:
    """Rounds of the first rows of a state. by_graphs: the tokens of one may be read when the next is on its way."""

    def __init__(
        self, target: Target, drafter: DraftModel | None, state: DecodeState, max_rows: int, accept: AcceptRule | None
    ) -> None:
        self._target, self._drafter, self._state, self._accept = target, drafter, state, accept
        self._graphs: RoundGraphs | None = None
        # A drafter in another type would run outside the kernels, which need to know no length exactly.
        if on_card(target.embed_VD) and (drafter is None or drafter.dtype == target.dtype):
            size = max_rows * (drafts_to_verify(drafter, None) + 1) * target.config.vocab_size
            logits_X = torch.empty(size, dtype=target.dtype, device=target.device)
            advance_by_graph = partial(_graph_round, target, drafter, state, accept, logits_X)
            self._graphs = RoundGraphs(advance_by_graph, state, max_rows)
        self._settings: Sequence[SamplingParams] = ()
        self._sampling: RowSampling | None = None  # the same, stacked for rounds that are no graph

    @property
    def by_graphs(self) -> bool:
        return self._graphs is not None

    def prompt_graphs(self, slot: int) -> PromptGraphs | None:
        """For prompts that are taken into a slot, where rounds are graphs, too."""
        if self._graphs is None:
            return None
        take = partial(take_in, self._target, self._drafter, self._state, slot)
        return PromptGraphs(take, self._state.target_cache.length, self._target.device, self._graphs.pool)

    def launch(
        self, settings: Sequence[SamplingParams], num_drafts: int, num_keys: int, settle: bool = True
    ) -> Launched:
        """A round of the first len(settings) rows. num_keys: no row's length + num_drafts + 1 exceeds it.

        The same settings are the same list. Logits are good until the next round.
        """
        if self._graphs is not None and not any(each.logit_bias or each.penalised for each in settings):
            drawn = self._graphs.run(settings, num_drafts, num_keys)
            # Off the graph's memory, which the next round writes to, and over to the host.
            drawn = replace(drawn, drawn_BX=drawn.drawn_BX[: len(settings)].to("cpu", non_blocking=True))
            ready = None
            if self._target.device.type == "cuda":
                ready = torch.cuda.Event()
                ready.record()
            return Launched(num_drafts=num_drafts, drawn=drawn, by_graph=True, ready=ready)
        if self._sampling is None or self._settings is not settings:
            self._settings, self._sampling = settings, RowSampling.stack(settings, self._target.device)
        shape = RoundShape(len(settings), num_drafts, num_keys)
        drawn = advance(
            self._target, self._drafter, self._state, self._sampling, shape, rule=self._accept, settle=settle
        )
        return Launched(num_drafts=num_drafts, drawn=drawn, by_graph=False, ready=None)

    @torch.inference_mode()
    def seconds(self, num_rows: int, num_drafts: int, text: int, kinds: Sequence[SamplingParams] = ()) -> float:
        """Of a greedy round of rows with texts of this length, the median of a few. For a state that holds no rows.

        Afterwards its graph is there, and those of rows that are sampled as `kinds` say.
        """
        state, num_keys = self._state, text + num_drafts + 1
        settings = [SamplingParams()] * num_rows
        state.length_B[:num_rows] = text
        state.drawn_B.zero_()
        state.anchor_B.zero_()
        times: list[float] = []
        for _ in range(1 + TIMED_ROUNDS):  # the first one compiles
            started = time.perf_counter()
            self.launch(settings, num_drafts, num_keys, settle=False).tokens()
            times.append(time.perf_counter() - started)
        if self.by_graphs:
            for kind in kinds:
                self.launch([kind] * num_rows, num_drafts, num_keys).tokens()
        state.length_B.zero_()
        return statistics.median(times[1:])


def _graph_round(
    target: Target,
    drafter: DraftModel | None,
    state: DecodeState,
    accept: AcceptRule | None,
    logits_X: Tensor,
    sampling: RowSampling,
    shape: RoundShape,
) -> Drawn:
    """The round that is captured. Its logits go where those of all graphs do: else each graph would keep its own."""
    drawn = advance(target, drafter, state, sampling, shape, rule=accept, settle=False)
    place_BTV = logits_X[: drawn.logits_BTV.numel()].view_as(drawn.logits_BTV)
    place_BTV.copy_(drawn.logits_BTV)
    return replace(drawn, logits_BTV=place_BTV)
