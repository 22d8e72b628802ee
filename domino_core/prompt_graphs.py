"""Passes over prompts as CUDA graphs: a short prompt takes a card a millisecond, and the host thirty to describe.

A graph is captured for a pass length and a bound on the keys when they first come up, or ahead by Engine.warm_up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from domino_core.decode_state import PromptChunk
from domino_core.round_graphs import graph_keys


@dataclass(frozen=True, kw_only=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs_X: Tensor
    hidden_1D: Tensor


class PromptGraphs:
    """take_in for one slot, whose caches hold `length` tokens.

    Memory is shared with the graphs of `pool`: what one returns is to be read, on this stream, before another one runs.
    """

    def __init__(self, take_in: Callable[[PromptChunk], Tensor], length: int, device: torch.device, pool: Any) -> None:
        self._take_in, self._length, self._device, self._pool = take_in, length, device, pool
        self._graphs: dict[tuple[int, int], _Graph] = {}

    @torch.inference_mode()
    def __call__(self, inputs: list[int], num_keys: int) -> Tensor:
        """decode_state.TakeIn. The result is good until the next graph runs."""
        key = (len(inputs), graph_keys(num_keys, self._length))
        inputs_X = torch.tensor(inputs)
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._capture(inputs_X.to(self._device), key[1])
        found.inputs_X.copy_(inputs_X)
        found.graph.replay()
        return found.hidden_1D

    def _capture(self, inputs_X: Tensor, num_keys: int) -> _Graph:
        chunk = PromptChunk.of(inputs_X, num_keys)
        self._take_in(chunk)  # once outside: kernels are compiled, and the library's products compared with ours
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden_1D = self._take_in(chunk)
        return _Graph(graph=graph, inputs_X=inputs_X, hidden_1D=hidden_1D)
