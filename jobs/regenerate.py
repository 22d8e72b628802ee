"""Let the target answer a file of prompts: training rows with its own words, its tokens and their mask.

    python -m jobs.regenerate --preset qwen3_8b target=Qwen/Qwen3-8B data=prompts.jsonl --output answers.jsonl
    python -m jobs.regenerate --preset tiny num_rows=20 --output answers.parquet answer.temperature=0.7

Every conversation is answered after its last user turn. The same command again goes on where it was interrupted and
adds prompts that are new; settings and counts are recorded in OUTPUT.info.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.overrides import describe, job_parser, load, run_job, writable


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--output", required=True, type=Path, help="file to write, .jsonl or .parquet")
    args = parser.parse_intermixed_args(argv)
    job = load(args)
    from pipelines.prompts import prompt_chunks
    from pipelines.regenerate import answer_run, regenerate

    if not args.plan:
        writable(args.output)
        writable(f"{args.output}.info.json")
    run = answer_run(
        data=job.data,
        num_rows=job.num_rows,
        target=job.target,
        output=args.output.resolve(),
        answer=job.answer,
        capture=job.capture,
    )
    rows = sum(chunk.num_rows for chunk in prompt_chunks(job.data, num_rows=job.num_rows))
    print(describe(job))
    print(
        f"\nwill have {job.target} answer {rows:,} prompts into {run.output}; thinking: {run.asked['thinking']}",
        flush=True,
    )
    if args.plan:
        return
    from tqdm import tqdm

    from domino_core.atomic_files import sole_writer
    from jobs.ray_session import ray_session

    with sole_writer(Path(run.output)), ray_session(), tqdm(total=rows, unit="row", desc="answer") as bar:
        for done in regenerate(run):
            bar.update(done)
    print(run.summary())


if __name__ == "__main__":
    sys.exit(run_job(main))
