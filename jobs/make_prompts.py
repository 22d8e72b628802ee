"""Prompts for when there are none: the target writes them itself, where its chat template lets a user speak (Magpie).

    python -m jobs.make_prompts --preset qwen3_8b target=Qwen/Qwen3-8B --num 100000 --output prompts.jsonl
    python -m jobs.make_prompts --preset tiny --num 500 --output p.jsonl --heldout 64 --heldout-output heldout.jsonl

--num counts what is left when all filters have been passed. The same command again goes on where it was interrupted;
draws are kept in OUTPUT.draws, so a larger --num or other filters draw only what is missing. Settings, counts, examples
of what was dropped and figures of the prompts are in OUTPUT.info.json. The file is what data= takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.overrides import describe, job_parser, load, run_job, writable


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--num", required=True, type=int, help="prompts to write, after all filters")
    parser.add_argument("--output", required=True, type=Path, help="file to write, .jsonl or .parquet")
    parser.add_argument("--heldout", default=0, type=int, help="prompts to write to a second file, for evaluation")
    parser.add_argument("--heldout-output", type=Path, help="that file; none of its prompts is near to one of --output")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=["target"])
    from pipelines.self_prompts import make_prompts, prompt_run

    if not args.plan:
        for path in (args.output, args.heldout_output, f"{args.output}.info.json"):
            if path:
                writable(path)
    run = prompt_run(
        target=job.target,
        num=args.num,
        output=args.output.resolve(),
        heldout=args.heldout,
        heldout_output=args.heldout_output.resolve() if args.heldout_output else None,
        config=job.self_prompts,
        capture=job.capture,
    )
    print(describe(job))
    held = f" and {run.heldout:,} held out" if run.heldout else ""
    print(f"\nwill have {job.target} write {run.num:,} prompts{held} into {run.output}")
    print(f"each goes on from {run.turn.prefix!r}, up to {run.turn.end!r}; {run.max_draws:,} draws at most", flush=True)
    if not run.turn.ends_answers:
        print(f"note: answers of this target do not end with {run.turn.end!r}; a base model writes poor prompts")
    if args.plan:
        return
    from tqdm import tqdm

    from jobs.ray_session import ray_session

    with ray_session(), tqdm(total=run.wanted, unit="prompt", desc="draw") as bar:
        for prompts, draws in make_prompts(run):
            bar.set_postfix(draws=draws, refresh=False)
            bar.update(prompts - bar.n)
    print(run.summary())


if __name__ == "__main__":
    sys.exit(run_job(main))
