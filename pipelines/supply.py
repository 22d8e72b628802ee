"""Supply and demand of a training run: what the engines offer, what the trainer takes, and which side to scale.

Each engine keeps one small file of totals up to date beside the record of its rows; whoever wants rates reads twice.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from domino_core.atomic_files import write_atomically
from domino_core.json_files import read_json
from pipelines.capture_stream import EngineClock

FOLDER = "engines"  # inside the folder of events
PERIOD_SECONDS = 1.0
WORTH_MENTIONING = 0.1  # a share of waiting that is not noise


class SupplyFile:
    """Where one engine tells its totals."""

    def __init__(self, events: str | Path) -> None:
        self.path = Path(events) / FOLDER / f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
        self.written = 0.0

    def write(self, clock: EngineClock, *, at_once: bool = False) -> None:
        """Tell it, about once a second."""
        if at_once or time.monotonic() > self.written + PERIOD_SECONDS:
            write_atomically(self.path, json.dumps(asdict(clock)).encode())
            self.written = time.monotonic()


def read_supply(events: str | Path) -> EngineClock:
    """The totals of all engines that ever wrote to this folder of events."""
    total = EngineClock()
    for path in (Path(events) / FOLDER).glob("*.json"):
        found = read_json(path)
        for field in fields(EngineClock):
            setattr(total, field.name, getattr(total, field.name) + found[field.name])
    return total


class SupplyWindow:
    """What the engines did since it was last asked."""

    def __init__(self, events: str | Path) -> None:
        self.events = events
        self.before, self.since = read_supply(events), time.perf_counter()

    def reduce(self) -> dict[str, float]:
        """Metrics of all engines together. The blocked share is of the time in which they had something to do."""
        now, at = read_supply(self.events), time.perf_counter()
        past = {field.name: getattr(now, field.name) - getattr(self.before, field.name) for field in fields(now)}
        elapsed = max(at - self.since, 1e-6)
        self.before, self.since = now, at
        busy = past["working"] + past["blocked"]
        return {
            "offered_samples_per_s": past["rows"] / elapsed,
            "offered_tokens_per_s": past["tokens"] / elapsed,
            "engine_work_s": past["working"],
            "engine_blocked_s": past["blocked"],
            "engine_blocked_share": past["blocked"] / busy if busy else 0.0,
        }


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Shares of time that each side waited for the other: the trainer for data, the engines for somebody to take it."""

    trainer_waited: float
    engines_blocked: float

    @classmethod
    def of(cls, history: Sequence[Mapping[str, float]]) -> Balance | None:
        """Of the logged metrics of a run; None if it did not stream. The first entry waits for engines to start."""
        streamed = [entry for entry in history if "engine_work_s" in entry]
        streamed = streamed[1:] or streamed
        if not streamed:
            return None
        total = {
            name: sum(entry[name] for entry in streamed)
            for name in ("window_s", "data_wait_s", "engine_work_s", "engine_blocked_s")
        }
        busy = total["engine_work_s"] + total["engine_blocked_s"]
        return cls(
            trainer_waited=total["data_wait_s"] / max(total["window_s"], 1e-6),
            engines_blocked=total["engine_blocked_s"] / busy if busy else 0.0,
        )

    @classmethod
    def between(cls, engine_seconds: float, train_seconds: float) -> Balance:
        """Of sides that would take so long by themselves: the faster one waits for the rest of the time."""
        longer = max(engine_seconds, train_seconds, 1e-9)
        return cls(trainer_waited=1 - train_seconds / longer, engines_blocked=1 - engine_seconds / longer)

    def advice(self, num_actors: int, num_workers: int) -> str:
        """One sentence: which side to scale, and about how far."""
        waited, blocked = f"{self.trainer_waited:.0%}", f"{self.engines_blocked:.0%}"
        if max(self.trainer_waited, self.engines_blocked) < WORTH_MENTIONING:
            return f"supply and demand are in balance: the trainer waits {waited} of the time, the engines {blocked}"
        if self.trainer_waited >= self.engines_blocked:
            enough = _scaled(num_actors, self.trainer_waited)
            return (
                f"the trainer waits for data {waited} of the time, the engines for the trainer {blocked}: "
                f"add engines (capture.num_actors={num_actors}; about {enough} would keep the trainer busy)"
            )
        enough = _scaled(num_workers, self.engines_blocked)
        return (
            f"the engines wait for the trainer {blocked} of the time, the trainer for data {waited}: "
            f"add workers (train.num_workers={num_workers}; about {enough} would take all that is offered)"
        )


def _scaled(count: int, waited: float) -> int:
    """So many more that the other side is never idle: it works for 1 - waited of the time now."""
    return math.ceil(count / max(1 - waited, 0.01) - 1e-9)
