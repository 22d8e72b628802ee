"""Rounds as CUDA graphs: one launch from the host instead of some hundreds, and no wait in between.

A graph is captured when its shape first comes up, or ahead by Engine.warm_up. It holds addresses, not values: lengths,
anchors and caches are the DecodeState's own, sampling settings are copied to a place of the graph's, and rows beyond
those that decode are empty slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from domino_core.decode import Drawn, RoundShape
from domino_core.decode_state import DecodeState
from domino_core.sampling import RowSampling
from domino_core.sampling_params import SamplingParams

SHORTEST = 512  # keys of the shortest texts' graphs

MOST_GRAPHS = 256  # of an engine: a graph takes some MB, and clients choose the kinds of sampling

Advance = Callable[[RowSampling, RoundShape], Drawn]
"""decode.advance for given models, without a wait for the device."""


@dataclass(kw_only=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    sampling: RowSampling
    loaded: RowSampling
    """What `sampling` holds the numbers of by now."""
    drawn: Drawn


class RoundGraphs:
    """The graphs of one engine. They share their memory, so one's results are to be read before the next one runs."""

    def __init__(self, advance: Advance, state: DecodeState, max_rows: int) -> None:
        self._advance = advance
        self._state = state
        self.row_counts = row_counts(max_rows)
        self._graphs: dict[tuple[RoundShape, tuple[bool | int, ...]], _Graph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self._settings: Sequence[SamplingParams] = ()
        self._padded: Sequence[SamplingParams] = ()  # the same, and some for the empty slots
        self._stacked: RowSampling | None = None  # the same, on the host

    def run(self, settings: Sequence[SamplingParams], num_drafts: int, num_keys: int) -> Drawn:
        """A round of the first len(settings) rows; what it drew, for a few rows more, is good until the next run.

        The same settings are the same list: nothing is copied then.
        """
        num_rows = next(count for count in self.row_counts if count >= len(settings))
        shape = RoundShape(num_rows, num_drafts, graph_keys(num_keys, self._state.target_cache.length))
        if self._stacked is None or self._settings is not settings:
            self._settings = settings
            self._padded = [*settings, *[SamplingParams()] * (num_rows - len(settings))]
            self._stacked = RowSampling.stack(self._padded)
        key = (shape, self._stacked.kind)
        found = self._graphs.pop(key, None)
        if found is None:
            if len(self._graphs) >= MOST_GRAPHS:
                torch.cuda.synchronize()  # it may be running
                del self._graphs[next(iter(self._graphs))]
            sampling = RowSampling.stack(self._padded, self._state.length_B.device)
            found = self._capture(sampling, self._stacked, shape)
        elif found.loaded is not self._stacked:
            found.sampling.copy_(self._stacked)
            found.loaded = self._stacked
        self._graphs[key] = found  # the last used is last
        found.graph.replay()
        return found.drawn

    def _capture(self, sampling: RowSampling, loaded: RowSampling, shape: RoundShape) -> _Graph:
        state = self._state
        moved = (state.length_B, state.anchor_B, state.drawn_B)
        kept = [values_B.clone() for values_B in moved]
        # Once outside the capture: kernels are compiled and libraries set up. What it leaves in the caches lies behind
        # the lengths, which are put back.
        self._advance(sampling, shape)
        for values_B, before_B in zip(moved, kept, strict=True):
            values_B.copy_(before_B)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # What other threads of the process do with the card meanwhile is not to break the capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            drawn = self._advance(sampling, shape)
        return _Graph(graph=graph, sampling=sampling, loaded=loaded, drawn=drawn)


def graph_keys(num_keys: int, length: int) -> int:
    """The bound on the keys that a graph is captured for: `length` is all that caches hold.

    Powers of two, so that a growing text meets few graphs; programs beyond a text's end have nothing to do.
    """
    return min(length, max(SHORTEST, 1 << (num_keys - 1).bit_length()))


def row_counts(max_rows: int) -> tuple[int, ...]:
    """The batch sizes that are captured: powers of two, and steps of a half power from 8 on, up to max_rows."""
    counts = {1, 2, 4, max_rows}
    step = 8
    while step < max_rows:
        counts |= {step, step * 3 // 2}
        step *= 2
    return tuple(sorted(count for count in counts if count <= max_rows))
