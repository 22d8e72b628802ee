"""Register a drafter, gate it, and make it champion; or take the champion back.

    python -m jobs.promote --preset tiny                        the drafter of the preset's run
    python -m jobs.promote --preset tiny --run other-name       of another run below ROOT
    python -m jobs.promote --preset tiny --version 3            a version that is registered
    python -m jobs.promote --preset tiny --alias canary         another alias than champion
    python -m jobs.promote --preset tiny --rollback             the previous champion again

The gate reloads the version, checks that it fits the target, and measures it and the champion on held-out prompts. What
fails is printed, the version is tagged with it, no alias of the served versions moves, and the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.overrides import describe, job_parser, load, run_job

if TYPE_CHECKING:
    from jobs.presets import JobConfig


def main(argv: Sequence[str]) -> int:
    parser = job_parser(__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--run", help="name of the run whose drafter is registered (default: the configuration's)")
    choice.add_argument("--version", help="number of a registered version")
    choice.add_argument("--rollback", action="store_true", help="make the previous champion champion again")
    parser.add_argument("--alias", default="champion", help="alias to set (default: champion)")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=("target",) if args.rollback else ("target", "eval_data"))
    from pipelines import registry
    from pipelines.tracking import connect, naming_outages, tracking_uri

    uri, name = tracking_uri(job.tracking_uri, job.root), registry.registered_name(job.target)
    run_dir = Path(job.root) / (args.run or job.run_name)
    if args.plan:
        what = "roll back" if args.rollback else f"gate {f'version {args.version}' if args.version else run_dir}"
        print(f"{describe(job)}\n\nwill {what}, alias {args.alias} of {name} in {uri}")
        return 0
    if args.rollback and args.alias != registry.CHAMPION:
        raise ValueError(f"--rollback brings back the champion and leaves --alias {args.alias} alone: give one of them")
    registry.check_alias(args.alias)
    client = connect(uri)
    with naming_outages(uri):
        if args.rollback:
            gone, back = registry.rollback(client, name)
            print(f"{name}: champion is version {back} again, instead of {gone}")
            return 0
        return promote(job, client, args.version, run_dir, args.alias)


def promote(job: JobConfig, client: Any, given: str | None, run_dir: Path, alias: str) -> int:
    """Register unless a version is given, gate, and set the alias if it holds."""
    from pipelines import registry

    name = registry.registered_name(job.target)
    registry.check_measurable(job.target, job.eval_data, job.evaluate)
    number = given or registry.register_run(client, run_dir, job.target, job.root)
    version = registry.find_version(client, name, version=number)
    result = registry.gate(client, version, job.target, job.eval_data, job.evaluate, job.gate)
    registry.record(client, version, result, Path(job.eval_data).stem)
    print(registry.verdict(name, result))
    if not result.passed:
        return 1
    registry.promote(client, version, alias)
    print(f"{name}: {alias} is version {number} in {client.tracking_uri}")
    return 0


if __name__ == "__main__":
    sys.exit(run_job(main))
