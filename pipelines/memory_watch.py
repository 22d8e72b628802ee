"""Memory of a Ray and everything that runs on it, watched while something is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

KINDS = ("private_gb", "store_gb", "fallback_gb")


class MemoryWatch(threading.Thread):
    """Samples memory of all processes of this Ray and of its object store, about once a second."""

    def __init__(self, period: float = 0.5) -> None:
        super().__init__(name="memory-watch", daemon=True)
        self.samples: list[dict[str, float]] = []
        self._period, self._done = period, threading.Event()

    def run(self) -> None:
        while not self._done.wait(self._period):
            self.samples.append({"time": time.time(), "private_gb": _private_gb(), **store_stats()})

    def stop(self) -> list[dict[str, float]]:
        self._done.set()
        self.join()
        return self.samples


def _private_gb() -> float:
    """Memory of our descendants without what they share: the object store is counted by itself."""
    import psutil

    total = 0
    for process in psutil.Process().children(recursive=True):
        try:  # processes end while we look at them
            found = process.memory_info()
            total += found.rss - found.shared
        except psutil.Error:
            continue
    return total / 1e9


def store_stats() -> dict[str, float]:
    """What `ray memory --stats-only` prints, as numbers. Ray has no public function for it."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    names = {"store_gb": "object_store_bytes_used", "spilled_gb": "spilled_bytes_total"}
    names |= {"fallback_gb": "object_store_bytes_fallback"}
    return {ours: getattr(stats, theirs) / 1e9 for ours, theirs in names.items()}


def memory_figures(samples: Sequence[dict[str, float]], start: float, end: float) -> dict[str, Any]:
    """Peaks, and means of the first and the last third of the time between: memory is flat if they agree."""
    during = [sample for sample in samples if start <= sample["time"] <= end] or list(samples)
    third = max(1, len(during) // 3)
    figures: dict[str, Any] = {"samples": len(during), "spilled_gb": samples[-1]["spilled_gb"]}
    for name in KINDS:
        values = [sample[name] for sample in during]
        figures[name] = {
            "peak": max(values),
            "first_third": sum(values[:third]) / third,
            "last_third": sum(values[-third:]) / third,
        }
    return figures


def memory_curve(samples: Sequence[dict[str, float]], start: float, points: int = 40) -> list[dict[str, float]]:
    """About so many of the samples, in seconds since `start`."""
    every = max(1, len(samples) // points)
    return [{name: round(value - start * (name == "time"), 2) for name, value in s.items()} for s in samples[::every]]
