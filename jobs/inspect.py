"""What training makes of a prompt file: tokens with the supervised ones marked, lengths, what is dropped and why.

    python -m jobs.inspect prompts.jsonl --preset qwen3_8b target=Qwen/Qwen3-8B
    python -m jobs.inspect --preset tiny --rows 5
    python -m jobs.inspect prompts.jsonl --preset tiny --json | jq .dropped

Needs the target's tokenizer, no weights, no GPU, no Ray. Supervised text is green on a terminal; otherwise, or with
NO_COLOR set, it stands between [[ and ]]. Exit code 1, with the reason, if nothing would be trained on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from jobs.overrides import describe, job_parser, load, run_job


def main(argv: Sequence[str]) -> int:
    parser = job_parser(__doc__)
    parser.usage = "%(prog)s [PROMPTS] [--preset NAME] [--rows N] [--sample N] [--json] [key=value ...]"
    parser.add_argument("--rows", type=int, default=3, help="rows to show (3)")
    parser.add_argument("--sample", type=int, default=20_000, help="rows to tokenise; all are checked (20000)")
    parser.add_argument("--json", action="store_true", help="print the figures for machines, and nothing else")
    args = parser.parse_intermixed_args(argv)
    if args.rows < 0 or args.sample < 1:
        raise ValueError(
            f"--rows {args.rows} --sample {args.sample}: expected rows of at least 0, a sample of at least 1"
        )
    # A word that sets no key is the file.
    args.overrides = [word if "=" in word else f"data={word}" for word in args.overrides]
    files = [word.removeprefix("data=") for word in args.overrides if word.startswith("data=")]
    if len(files) > 1:
        raise ValueError(f"{len(files)} prompt files, {' and '.join(files)}: give one; training takes one too")
    job = load(args)
    if args.plan:
        print(f"{describe(job)}\n\nwould check {job.data} and tokenise up to {args.sample:,} of its rows")
        return 0
    from domino_core.target import load_tokenizer
    from pipelines.inspect_prompts import describe_inspection, inspect_prompts, printable, printable_id, render_row

    tokenizer = load_tokenizer(job.target)
    found, rows = inspect_prompts(
        job.data, tokenizer, job.answer, job.capture, num_rows=job.num_rows, sample=args.sample, keep=args.rows
    )
    if args.json:
        print(json.dumps(asdict(found) | {"supervised_share": found.supervised_share}, indent=1))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for row in rows:
            what = "the target answers" if row.needs_answer else f"{sum(row.loss_mask):,} supervised"
            say(f"--- {printable_id(row.sample_id)}: {len(row.input_ids):,} tokens, {what}")
            say(render_row(row, tokenizer, colour=colour) + "\n")
        say(describe_inspection(found))
    if found.refusal:
        print(f"error: {printable(found.refusal)}", file=sys.stderr)
    return 1 if found.refusal else 0


def say(text: str) -> None:
    """Print; what the terminal's encoding lacks is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


if __name__ == "__main__":
    sys.exit(run_job(main))
