"""Measure a drafter on held-out prompts: acceptance, speed against plain decoding, and whether the output is the same.

    python -m jobs.evaluate --preset tiny                       the drafter of the preset's run
    python -m jobs.evaluate --preset qwen3_8b target=Qwen/Qwen3-8B eval_data=heldout.jsonl --drafter path/to/drafter
    python -m jobs.evaluate --preset tiny --head-off            the backbone's own drafts

Writes ROOT/NAME/evaluation.json, or --out, and for the run's own drafter the figures into its provenance.json. Exit
code 1 if an output differs from plain decoding; in bfloat16 near-ties within gate.max_tie_gap are no difference.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.overrides import describe, job_parser, load, run_job, writable


def main(argv: Sequence[str]) -> int:
    parser = job_parser(__doc__)
    parser.add_argument("--drafter", help="folder of the drafter (default: the one of the run, ROOT/NAME/drafter)")
    parser.add_argument("--head-off", action="store_true", help="measure the backbone without the head")
    parser.add_argument("--out", help="where the figures go (JSON)")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=("target", "eval_data"))
    run_dir = Path(job.root) / job.run_name
    folder = Path(args.drafter or run_dir / "drafter")
    out = Path(args.out or run_dir / ("evaluation-head-off.json" if args.head_off else "evaluation.json"))
    if args.plan:
        print(f"{describe(job)}\n\nwill measure {folder} on {job.eval_data}, to {out}")
        return 0
    from pipelines.evaluate import evaluate_drafter
    from pipelines.gate import identity_failure
    from pipelines.measurement import note_measurement, summary, write_measurement

    writable(out)
    measurement = evaluate_drafter(folder, job.target, job.eval_data, job.evaluate, head=not args.head_off)
    write_measurement(out, measurement)
    if not args.drafter and not args.head_off:
        note_measurement(folder, measurement, job.eval_data)
    print(f"{summary(measurement)}\nwritten to {out}")
    failure = identity_failure(measurement, job.gate)
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(run_job(main))
