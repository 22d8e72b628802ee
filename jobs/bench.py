"""Decoding with and without a drafter at several concurrencies, by the engine that serves.

    python -m jobs.bench --preset tiny                                  the drafter of the preset's run
    python -m jobs.bench --preset tiny --drafter FOLDER --concurrency 1,4,16 --result docs/results/decode.json

Both arms run in turns in one process, on held-out prompts; medians over evaluate.repeats. The machine is in the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jobs.overrides import describe, job_parser, load, run_job


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--drafter", help="drafter folder (default: the configuration's run)")
    parser.add_argument("--concurrency", default="1,2,4,8", help="rows decoded together, one line of the table each")
    parser.add_argument("--result", type=Path, help="JSON file to write")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=("target", "eval_data"))
    folder = args.drafter or str(Path(job.root) / job.run_name / "drafter")
    concurrencies = [int(text) if text.isdigit() else 0 for text in args.concurrency.split(",")]
    if min(concurrencies) < 1:
        raise ValueError(f"--concurrency {args.concurrency}: expected whole numbers above 0, such as 1,2,4,8")
    if args.plan:
        print(f"{describe(job)}\n\nwill decode with {folder} and without it, {args.concurrency} rows at once")
        return
    from domino_core.checkpoint import read_config
    from jobs.environment import environment
    from pipelines.evaluate import evaluate_drafter

    read_config(folder)  # before the table's head: there may be none
    rows: dict[int, dict[str, float | bool]] = {}
    print("rows   plain tok/s   drafted tok/s   ratio      τ   identical")
    for concurrency in concurrencies:
        # At least one prompt per row, or the batch would never be full.
        settings = replace(
            job.evaluate, concurrency=concurrency, num_prompts=max(job.evaluate.num_prompts, concurrency)
        )
        found = evaluate_drafter(folder, job.target, job.eval_data, settings)
        rows[concurrency] = {
            "plain_tokens_per_s": found.plain_tokens_per_s,
            "tokens_per_s": found.tokens_per_s,
            "speedup": found.speedup,
            "tau": found.tau,
            "identical": found.identical,
        }
        print(
            f"{concurrency:4}   {found.plain_tokens_per_s:11.0f}   {found.tokens_per_s:13.0f}   {found.speedup:5.2f}   "
            f"{found.tau:4.2f}   {found.identical}",
            flush=True,
        )
    if args.result:
        result = {"environment": environment(), "drafter": folder, "target": job.target, "concurrency": rows}
        args.result.parent.mkdir(parents=True, exist_ok=True)
        args.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_job(main))
