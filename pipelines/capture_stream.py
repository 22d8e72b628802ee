"""What stands between an engine and whoever takes its states: memory that fills up, and a thread that runs ahead.

Letters: S tokens of a sequence · T tokens of all sequences of a slice · N sequences of a slice · L tapped layers in
ascending depth · D hidden size.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor

from domino_core.features import quantize

T = TypeVar("T")


@dataclass(kw_only=True)
class EngineClock:
    """What an engine has done since it started, and what it waited for."""

    rows: int = 0
    tokens: int = 0  # whose states were handed on
    working: float = 0.0  # seconds with something to do, answering included
    blocked: float = 0.0  # seconds in which nobody took what was ready

    def totals(self) -> dict[str, float]:
        return asdict(self)


class Slice:
    """The states of some sequences, one after the other in one piece of memory, complete when the last has come.

    dtype: in which they are stored; float8 states have scales. pinned: the engine is on a GPU, which then writes here
    by itself while it goes on computing.
    """

    def __init__(self, sequences: Sequence[list[int]], shape_LD: tuple[int, int], dtype: torch.dtype, pinned: bool):
        self.sequences = sequences
        self.num_tokens = sum(map(len, sequences))
        layers, hidden = shape_LD
        self.values_TLD = torch.empty(self.num_tokens, layers, hidden, dtype=dtype, pin_memory=pinned)
        self.scales_TL: Tensor | None = None
        if dtype == torch.float8_e4m3fn:
            self.scales_TL = torch.empty(self.num_tokens, layers, pin_memory=pinned)
        self._finite_N = torch.empty(len(sequences), dtype=torch.bool, pin_memory=pinned)
        self._missing = len(sequences)
        self._copied: torch.Event | None = None

    @property
    def complete(self) -> bool:
        """Whether everything is there or on its way: `wait` will not wait for the engine."""
        return self._missing == 0

    def receivers(self) -> Iterator[Callable[[list[int], Tensor], None]]:
        """One for each sequence, to be called with its tokens and states_SLD, on the device where those are."""
        start = 0
        for index, sequence in enumerate(self.sequences):
            yield self._receiver(index, sequence, slice(start, start + len(sequence)))
            start += len(sequence)

    def _receiver(self, index: int, sequence: list[int], place: slice) -> Callable[[list[int], Tensor], None]:
        values_SLD = self.values_TLD[place]
        scales_SL = None if self.scales_TL is None else self.scales_TL[place]

        def receive(token_ids: list[int], states_SLD: Tensor) -> None:
            assert token_ids == sequence, f"vLLM captured other tokens than it was sent: {len(token_ids)} of them"
            assert states_SLD.shape == values_SLD.shape, f"states {states_SLD.shape}, expected {values_SLD.shape}"
            # The extremes are finite if all are. One pass where the states are: on a host it would take the longest.
            extremes_2 = torch.stack(states_SLD.aminmax())
            self._finite_N[index].copy_(extremes_2.isfinite().all(), non_blocking=True)
            if scales_SL is not None:
                states_SLD, found_SL = quantize(states_SLD)
                scales_SL.copy_(found_SL, non_blocking=True)
            # The type is changed before the copy, on the device, so that no more than needed crosses the bus.
            values_SLD.copy_(states_SLD.to(values_SLD.dtype), non_blocking=True)
            if states_SLD.is_cuda:
                self._copied = torch.cuda.current_stream().record_event()
            self._missing -= 1

        return receive

    def wait(self) -> list[bool]:
        """Until all states are in memory; whether those of each sequence are finite."""
        assert self.complete
        if self._copied is not None:
            self._copied.synchronize()
        return self._finite_N.tolist()


def run_ahead(
    engine: concurrent.futures.Executor, source: Generator[T, None, None], depth: int, clock: EngineClock
) -> Generator[T, None, None]:
    """The items of `source`, which runs in the thread of `engine`, up to `depth` items ahead of the reader.

    Whoever stops reading early closes `source`, in that thread. Errors of `source` are raised here.
    """
    ready: queue.SimpleQueue[list[T]] = queue.SimpleQueue()  # an empty list: no more
    free, stopped = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        since = time.perf_counter()
        try:  # the reader waits for the last word, whatever happened
            for item in source:
                clock.working += time.perf_counter() - since
                ready.put([item])
                del item
                since = time.perf_counter()
                free.acquire()
                clock.blocked += time.perf_counter() - since
                since = time.perf_counter()
                if stopped.is_set():
                    break
            source.close()
        finally:
            clock.working += time.perf_counter() - since
            ready.put([])

    future = engine.submit(work)
    try:  # a reader may go away at any item
        while found := ready.get():
            yield found.pop()
            free.release()
        future.result()
    finally:
        stopped.set()
        free.release()
        future.cancel()
        concurrent.futures.wait([future])
