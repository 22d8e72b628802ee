"""The endpoint for hours: clients of every kind, some of whom leave, while memory and open files are watched.

    python -m jobs.soak                                     half an hour
    python -m jobs.soak --minutes 2 --out report/soak.json
    python -m jobs.soak --out docs/results/soak.json        where the result goes

Serves the embedded target with an untrained drafter as the drills do (jobs.drill), on a Ray of its own. Exit code 1 if
a request got an error that is not its sender's, an answer was not that of a quiet endpoint, a process was replaced, a
request stayed behind, or memory or open files of a replica, proxy or controller grew beyond the limits once warm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.drill_ground import Ground, wait_until
from jobs.drill_load import CONTROLLER, PROXY, REPLICA, TARGET, endpoint, health
from jobs.interrupts import as_interrupts
from jobs.overrides import run_job, writable
from jobs.soak_load import Soak, asks

CLIENTS = 64
REPLICAS = 2
EVERY_S = 5.0
WARM = 0.25  # the share of the run that is not looked at, up to WARM_S
WARM_S = 300.0
# Between the medians of the first and the last fifth of what is looked at.
MAX_RSS_GROWTH_MB = 48.0
MAX_FD_GROWTH = 8
TITLES = {"replica": REPLICA, "proxy": PROXY, "controller": CONTROLLER}


@dataclass(frozen=True)
class Sample:
    """One process at one moment. seconds: since the load began; fds: without the connections of clients."""

    seconds: float
    rss_mb: float
    fds: int
    threads: int


@dataclass(kw_only=True)
class Watched:
    """A process of the endpoint, from the beginning of the load to its end. port: where its clients connect."""

    name: str
    process: Any  # psutil.Process
    port: int
    samples: list[Sample] = field(default_factory=list)
    fds_at_rest: list[int] = field(default_factory=list)  # before the load and after it

    def look(self, seconds: float) -> Sample | None:
        """The process now; None once it has ended."""
        from psutil import CONN_ESTABLISHED, NoSuchProcess

        try:  # it may end while we look at it
            with self.process.oneshot():
                rss, fds = self.process.memory_info().rss, self.process.num_fds()
                connections = self.process.net_connections("tcp")
                # Clients hold as many as they like; those that they have left behind are counted.
                held = [each for each in connections if (each.laddr[1], each.status) == (self.port, CONN_ESTABLISHED)]
                return Sample(round(seconds, 1), round(rss / 1e6, 1), fds - len(held), self.process.num_threads())
        except NoSuchProcess:
            return None

    def growth(self, of: str) -> float:
        """Of `rss_mb`, `fds` or `threads`, once warm: the median of the last fifth less that of the first."""
        warm = min(WARM_S, WARM * self.samples[-1].seconds)
        values = [getattr(sample, of) for sample in self.samples if sample.seconds >= warm]
        fifth = max(1, len(values) // 5)
        return round(statistics.median(values[-fifth:]) - statistics.median(values[:fifth]), 1)

    def told(self) -> dict[str, Any]:
        """JSON-ready, with at most some thirty samples."""
        step = max(1, len(self.samples) // 30)
        few = [*self.samples[:-1:step], self.samples[-1]]
        growth = {f"{of}_growth": self.growth(of) for of in ("rss_mb", "fds", "threads")}
        series = {of: [getattr(sample, of) for sample in few] for of in ("seconds", "rss_mb", "fds", "threads")}
        return {"process": self.name} | growth | {"fds_at_rest": self.fds_at_rest} | series


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--out", type=Path, default=Path("report/soak.json"), help="where the result goes")
    args = parser.parse_args(argv)
    if not 0.2 <= args.minutes <= 10_000:  # nor "nan"
        raise ValueError(f"--minutes {args.minutes}: expected 0.2 to 10000")
    from jobs.environment import environment

    out = writable(args.out)
    found: dict[str, Any] = {"environment": environment(), "command": shlex.join(["python", "-m", "jobs.soak", *argv])}
    with as_interrupts(), tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        ground = Ground(folder=Path(scratch) / "soak", inputs=Path(scratch))
        try:
            with endpoint(ground, f"serve.min_replicas={REPLICAS}", f"serve.max_replicas={REPLICAS}") as url:
                found |= soaked(ground, url, args.minutes * 60)
        finally:
            ground.end()
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'held' if found['held'] else 'DOES NOT HOLD'}; written to {args.out}")
    return 0 if found["held"] else 1


def soaked(ground: Ground, url: str, seconds: float) -> dict[str, Any]:
    """The load for so long, and what was seen."""
    import httpx

    processes = watched(ground, httpx.URL(url).port or 0)
    began = time.monotonic()
    load = asyncio.run(under_load(url, seconds, processes))
    took, stayed = time.monotonic() - began, list[str]()
    try:  # requests that stay behind are a finding
        for _ in range(REPLICAS * 4):  # whichever replica answers
            wait_until(lambda: not any(under_way(url)), 30, "the end of all requests")
    except RuntimeError as error:
        stayed.append(f"{error}: {under_way(url)} running and waiting")
    look_at_rest(processes)
    problems = judged(load, processes) + stayed
    for problem in problems:
        print(problem, flush=True)
    return {
        "held": not problems,
        "problems": problems[:20],
        "minutes": round(took / 60, 1),
        "clients": CLIENTS,
        "requests": load.requests,
        "answered": load.answered,
        "tokens": load.tokens,
        "refused_rightly": load.refused,
        "clients_left": load.left,
        "asked_again": dict(load.busy),
        "errors": len(load.errors),
        "wrong": len(load.wrong),
        "rss_growth_mb": max(each.growth("rss_mb") for each in processes),
        "fd_growth": max(each.growth("fds") for each in processes),
        "limits": {"rss_growth_mb": MAX_RSS_GROWTH_MB, "fd_growth": MAX_FD_GROWTH},
        "processes": [each.told() for each in processes],
    }


def watched(ground: Ground, port: int) -> list[Watched]:
    """The processes that a leak would show in."""
    found: list[Watched] = []
    for kind, title in TITLES.items():
        processes = ground.family(title)
        found += [Watched(name=f"{kind} {number}", process=each, port=port) for number, each in enumerate(processes, 1)]
    return found


async def under_load(url: str, seconds: float, processes: Sequence[Watched]) -> Soak:
    import httpx

    limits = httpx.Limits(max_connections=2 * CLIENTS, max_keepalive_connections=CLIENTS)
    timeout = httpx.Timeout(120.0)
    async with httpx.AsyncClient(base_url=f"{url}/", limits=limits, timeout=timeout, trust_env=False) as http:
        load = Soak(http=http, asks=asks(TARGET.name))
        await load.learn()
        look_at_rest(processes)
        await asyncio.gather(load.run(CLIENTS, seconds), keep_sampling(processes, load, seconds))
        return load


async def keep_sampling(processes: Sequence[Watched], load: Soak, seconds: float) -> None:
    """For so long: while the load lasts, and not while the last clients go."""
    began, told_at = time.monotonic(), -60.0
    while (now := time.monotonic() - began) < seconds:
        for each in processes:
            if (sample := each.look(now)) is not None:
                each.samples.append(sample)
        if now - told_at >= 60:
            told_at = now
            seen = [f"{each.name} {each.samples[-1].rss_mb:.0f} MB {each.samples[-1].fds}" for each in processes]
            counts = f"{load.answered} answered, {len(load.errors)} errors, {len(load.wrong)} wrong"
            print(f"{now:6.0f} s: {counts}; {', '.join(seen)} open", flush=True)
        await asyncio.sleep(EVERY_S)


def look_at_rest(processes: Sequence[Watched]) -> None:
    for each in processes:
        if (sample := each.look(0)) is not None:
            each.fds_at_rest.append(sample.fds)


def judged(load: Soak, processes: Sequence[Watched]) -> list[str]:
    """Everything that did not hold."""
    told = [f"error: {each}" for each in load.errors] + [f"wrong: {each}" for each in load.wrong]
    if not load.answered:
        told.append("nothing was answered")
    for each in processes:
        if not each.process.is_running():
            told.append(f"{each.name} was replaced")
        for of, limit in (("rss_mb", MAX_RSS_GROWTH_MB), ("fds", MAX_FD_GROWTH)):
            if (growth := each.growth(of)) > limit:
                told.append(f"{each.name}: {of} grew by {growth}, more than {limit}")
        if max(each.fds_at_rest) - each.fds_at_rest[0] > MAX_FD_GROWTH:
            told.append(f"{each.name}: files that were open before and after: {each.fds_at_rest}")
    return told


def under_way(url: str) -> tuple[int, int]:
    """Requests that run and wait in the replica that answers."""
    requests = health(url).get("requests", {"running": 0, "waiting": 0})
    return requests["running"], requests["waiting"]


if __name__ == "__main__":
    sys.exit(run_job(main))
