"""Faults, each as a drill that can be repeated: real processes are killed, and what must hold is looked at.

    python -m jobs.drill                                    all of them, half an hour to an hour on two cores
    python -m jobs.drill train-worker-killed alias-moved    these two
    python -m jobs.drill --list                             what each does, what must hold, how it is observed
    python -m jobs.drill --out docs/results/drills.json     where the result goes

Drills run the commands that a user runs, on the embedded target and a CPU, in a temporary folder, on a Ray and servers
of their own; only these processes are killed. Exit code 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from domino_core.json_files import read_object
from jobs.drill_cluster import driver_killed, ray_job_stop
from jobs.drill_ground import Ground, Outcome
from jobs.drill_hosts import two_hosts
from jobs.drill_serving import alias_moved, client_disconnects, serve_controller_or_proxy_killed, serve_replica_killed
from jobs.drill_storage import checkpoint_half_written, disk_full
from jobs.drill_tracking import (
    mlflow_down_at_promotion,
    mlflow_down_at_start,
    mlflow_down_in_training,
    mlflow_down_while_serving,
)
from jobs.drill_training import described, train_worker_killed, vllm_actor_killed, workers_resized
from jobs.interrupts import as_interrupts
from jobs.overrides import run_job, writable

Drill = Callable[[Ground], Outcome]
DRILLS: dict[str, Drill] = {
    drill.__name__.replace("_", "-"): drill
    for drill in (
        vllm_actor_killed,
        train_worker_killed,
        driver_killed,
        workers_resized,
        checkpoint_half_written,
        mlflow_down_at_start,
        mlflow_down_in_training,
        mlflow_down_at_promotion,
        mlflow_down_while_serving,
        disk_full,
        serve_replica_killed,
        serve_controller_or_proxy_killed,
        alias_moved,
        client_disconnects,
        ray_job_stop,
        two_hosts,
    )
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="drills to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print them and stop")
    parser.add_argument(
        "--out", type=Path, default=Path("report/drills.json"), help="JSON file; other drills in it stay"
    )
    parser.add_argument("--report", type=Path, default=Path("report/drills.html"), help="where the page goes")
    args = parser.parse_intermixed_args(argv)
    if unknown := [name for name in args.names if name not in DRILLS]:
        raise ValueError(f"no drill is called {', '.join(unknown)}; there are {', '.join(DRILLS)}")
    chosen = {name: DRILLS[name] for name in args.names or DRILLS}
    if args.list:
        for name, drill in chosen.items():
            what, holds, observed = described(drill)
            print(f"{name}: {what}\n  must hold: {holds}\n  observed:  {observed}")
        return 0
    from jobs.drill_report import write_page

    out, page = writable(args.out), writable(args.report)
    command = shlex.join(["python", "-m", "jobs.drill", *argv])
    with as_interrupts(), tempfile.TemporaryDirectory(prefix="drill-") as scratch:
        result = run(chosen, Path(scratch), command, out)
    write_page(page, result)
    bad = [name for name in chosen if not (result["drills"][name]["held"] or result["drills"][name]["skipped"])]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} hold or are skipped; written to {args.out} and {args.report}")
    return 1 if bad else 0


def run(chosen: Mapping[str, Drill], scratch: Path, command: str, out: Path) -> dict[str, Any]:
    """Each drill in a folder of its own; told and written as they are done, so that a run that is killed keeps them.

    Drills that an earlier run has left in `out` stay there.
    """
    from jobs.environment import environment

    result: dict[str, Any] = {"environment": environment(), "drills": earlier(out)}
    for number, (name, drill) in enumerate(chosen.items(), 1):
        print(f"\n[{number}/{len(chosen)}] {name}: {described(drill)[0]}", flush=True)
        ground = Ground(folder=scratch / name, inputs=scratch / "inputs", tell=tell)
        started = time.monotonic()
        outcome = carried_out(drill, ground)
        verdict = "held" if outcome.held else f"skipped: {outcome.skipped}" if outcome.skipped else "DOES NOT HOLD"
        print(f"      {verdict}, {time.monotonic() - started:.0f} s; {json.dumps(outcome.seen)}", flush=True)
        for problem in outcome.problems:
            print(f"      {problem}", flush=True)
        entry = {"held": outcome.held} | vars(outcome) | {"seconds": round(time.monotonic() - started)}
        entry |= {"command": command} | {key: result["environment"][key] for key in ("cpu", "commit")}
        result["drills"][name] = json.loads(json.dumps(entry).replace(f"{scratch}/", ""))  # no paths of this machine
        out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def earlier(out: Path) -> dict[str, Any]:
    """What an earlier run has left in `out`. ValueError for a file that holds something else."""
    if not out.exists():
        return {}
    drills = read_object(out).get("drills")
    entry = {"held", *(each.name for each in fields(Outcome))}
    if not isinstance(drills, dict) or not all(
        isinstance(found, dict) and entry <= found.keys() for found in drills.values()
    ):
        raise ValueError(f"{out} holds no result of drills: name another file")
    return drills


def carried_out(drill: Drill, ground: Ground) -> Outcome:
    """A drill's outcome, after which none of its processes is left. What it could not carry out does not hold."""
    try:  # whatever it raises, the next drill starts from nothing
        return drill(ground)
    except Exception as error:  # a command that never ends, an answer without what a drill looks for
        return Outcome(problems=[f"{type(error).__name__}: {error}"])
    finally:
        ground.end()


def tell(line: str) -> None:
    print(f"      {line}", flush=True)


if __name__ == "__main__":
    sys.exit(run_job(main))
