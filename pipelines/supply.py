"""Supply and demand of a training run: what the engines offer, what the trainer takes, and which side to scale.

Each engine keeps one small file of totals up to date beside the record of its rows; whoever wants rates reads twice.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pipelines.capture_stream import EngineClock
from pipelines.feature_store import write_atomically

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
        found = json.loads(path.read_text())
        for field in fields(EngineClock):
            setattr(total, field.name, getattr(total, field.name) + found[field.name])
    return total


class SupplyWindow:
    """What the engines did since it was last asked."""

    def __init__(self, events: str | Path) -> None:
        self.events = events
        self.before, self.since = read_supply(events), time.perf_counter()

    def reduce(self) -> dict[str, float]:
        """Metrics of all engines together; capacity is what they would offer if nobody kept them waiting."""
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

    def advice(self, num_actors: int, num_workers: int) -> str:
        """One sentence: which side to scale, and about how far."""
        waited, blocked = f"{self.trainer_waited:.0%}", f"{self.engines_blocked:.0%}"
        if max(self.trainer_waited, self.engines_blocked) < WORTH_MENTIONING:
            return f"supply and demand are in balance: the trainer waited {waited} of the time, the engines {blocked}"
        if self.trainer_waited >= self.engines_blocked:
            enough = _scaled(num_actors, self.trainer_waited)
            return (
                f"the trainer waited {waited} of the time, the engines {blocked}: "
                f"add engines (capture.num_actors={num_actors}; about {enough} would keep the trainer busy)"
            )
        enough = _scaled(num_workers, self.engines_blocked)
        return (
            f"the engines waited {blocked} of the time, the trainer {waited}: "
            f"add workers (train.num_workers={num_workers}; about {enough} would take all that is offered)"
        )


def _scaled(count: int, waited: float) -> int:
    """So many more that the other side is never idle: it works for 1 - waited of the time now."""
    return math.ceil(count / max(1 - waited, 0.01) - 1e-9)
