"""Register a drafter, gate it, and make it champion, at once or after a canary; or take the champion back.

    python -m jobs.promote --preset tiny                        the drafter of the preset's run
    python -m jobs.promote --preset tiny --run other-name       of another run below ROOT
    python -m jobs.promote --preset tiny --version 3            a version that is registered
    python -m jobs.promote --preset tiny --canary               first serve.canary_share of the endpoint's requests
    python -m jobs.promote --preset tiny --abandon              end a canary without a verdict
    python -m jobs.promote --preset tiny --alias other          another alias than champion
    python -m jobs.promote --preset tiny --rollback             the previous champion again

The gate reloads the version, checks that it fits the target, and measures it and the champion on held-out prompts. What
fails is printed, the version is tagged with it, no alias of the served versions moves, and the exit code is 1.

A canary waits until the served figures of both versions say which is better (canary.*), and then makes the version
champion, or takes it away and exits with 1. Ended or killed, the same command goes on with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_core.redact import redacted
from jobs.overrides import describe, job_parser, load, run_job

if TYPE_CHECKING:
    from jobs.presets import JobConfig


def main(argv: Sequence[str]) -> int:
    parser = job_parser(__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--run", help="name of the run whose drafter is registered (default: the configuration's)")
    choice.add_argument("--version", help="number of a registered version")
    choice.add_argument("--rollback", action="store_true", help="make the previous champion champion again")
    choice.add_argument("--abandon", action="store_true", help="end the canary that is running, the champion stays")
    parser.add_argument("--canary", action="store_true", help="try it on a share of the traffic before it is champion")
    parser.add_argument("--alias", default="champion", help="alias to set (default: champion)")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=("target",) if args.rollback or args.abandon else ("target", "eval_data"))
    from jobs import canary
    from pipelines import registry
    from pipelines.tracking import connect, naming_outages, tracking_uri

    uri, name = tracking_uri(job.tracking_uri, job.root), registry.registered_name(job.target)
    check_flags(args)
    run_dir = Path(job.root) / (replace(job, name=args.run) if args.run else job).run_name
    if args.plan:
        what = f"gate {f'version {args.version}' if args.version else run_dir}"
        what = "roll back" if args.rollback else "abandon the canary" if args.abandon else what
        tried = f", after a canary at {', '.join(canary.endpoints(job))}" if args.canary else ""
        print(f"{describe(job)}\n\nwill {what}, alias {args.alias} of {name} in {redacted(uri)}{tried}")
        return 0
    registry.check_alias(args.alias)
    client = connect(uri)
    with naming_outages(uri):
        if args.rollback:
            gone, back = registry.rollback(client, name)
            instead = "already, nothing is taken back" if gone == back else f"again, instead of {gone}"
            print(f"{name}: champion is version {back} {instead}")
            return 0
        if args.abandon:
            return canary.abandon(client, name)
        return promote(job, client, args, run_dir)


def promote(job: JobConfig, client: Any, args: argparse.Namespace, run_dir: Path) -> int:
    """Register unless a version is given, gate, and set the alias if it holds; with --canary only once it is tried."""
    from jobs import canary
    from pipelines import gate, registry
    from pipelines.canary import running

    name, uri = registry.registered_name(job.target), client.tracking_uri
    gate.check_measurable(job.target, job.eval_data, job.evaluate)
    if args.canary and not running(client, name):  # one that runs waits for its endpoint
        canary.check_endpoints(job, name)
    number = args.version or registry.register_run(client, run_dir, job.target, job.root)
    version = registry.find_version(client, name, version=number)
    number = str(version.version)  # as everybody else writes it: 03 is 3
    if args.canary and canary.check_free(client, name, number):
        print(f"{name}: version {number} is being tried out already, going on with that", flush=True)
        return canary.watch(job, client, uri, name, number)
    result = gate.examine(client, version, job.target, job.eval_data, job.evaluate, job.gate)
    gate.record(client, version, result, Path(job.eval_data).stem)
    print(gate.verdict(name, result), flush=True)
    if not result.passed:
        return 1
    if args.canary:
        if not canary.check_free(client, name, number):  # the gate took minutes, in which another may have begun
            canary.begin(client, name, number)
        return canary.watch(job, client, uri, name, number)
    registry.promote(client, version, args.alias)
    print(f"{name}: {args.alias} is version {number} in {redacted(uri)}")
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """ValueError for flags that do not go together, or that name nothing."""
    for flag, value in (("--version", args.version), ("--run", args.run)):
        if value == "":  # a shell's variable that is not set: another drafter than the one that was meant
            raise ValueError(f"{flag} is empty: name one, or leave it out for the configuration's run")
    if args.rollback and args.alias != "champion":
        raise ValueError(f"--rollback brings back the champion and leaves --alias {args.alias} alone: give one of them")
    if args.canary and (args.rollback or args.abandon or args.alias != "champion"):
        raise ValueError("--canary tries out what is to be champion: give it without --rollback, --abandon and --alias")


if __name__ == "__main__":
    sys.exit(run_job(main))
