"""What a drafter will cost before anything runs: bytes, disk, GB/s, hours, and which side of the stream is the slower.

    python -m jobs.estimate --preset qwen3_8b target=Qwen/Qwen3-8B data=prompts.jsonl
    python -m jobs.estimate --preset tiny --answer-tokens 80

Needs config.json and tokenizer of the target, no weights and no GPU. Hours follow from rates measured on one H100 (or,
with capture.gpus_per_actor=0, on one CPU core); give your own where you have them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.overrides import describe, job_parser, load, run_job, writable

if TYPE_CHECKING:
    from domino_core.config import DrafterConfig
    from jobs.presets import JobConfig
    from pipelines.estimate import DataSize, Estimate
    from pipelines.rates import Rates


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--answer-tokens", type=float, help="mean tokens of an answer to come (answer.max_tokens)")
    parser.add_argument("--sample", type=int, default=20_000, help="rows to tokenise; the rest is scaled (20000)")
    parser.add_argument("--prefill-tflops", type=float, help="that one engine reaches while capturing")
    parser.add_argument("--train-tflops", type=float, help="that one training worker reaches")
    parser.add_argument("--bus-gb", type=float, help="GB/s that a worker sends to others while gradients are exchanged")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_intermixed_args(argv)
    for flag in ("answer_tokens", "sample", "prefill_tflops", "train_tflops", "bus_gb"):
        if (value := getattr(args, flag)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{flag.replace('_', '-')} {value:g}: must be a number above 0")
    job = load(args)
    if args.plan:
        print(f"{describe(job)}\n\nwould tokenise up to {args.sample:,} rows of {job.data} and print the estimate")
        return
    from pipelines.estimate import describe_estimate

    file = writable(args.json) if args.json else None
    own = {
        "prefill_flops": (args.prefill_tflops, 1e12),
        "train_flops": (args.train_tflops, 1e12),
        "train_flops_eager": (args.train_tflops, 1e12),
        "bus_bytes_per_s": (args.bus_gb, 1e9),
    }
    given = {name: value * unit for name, (value, unit) in own.items() if value is not None}
    rates = replace(job_rates(job), **given)
    folder = Path(job.features or Path(job.root) / "features")
    found, data, _ = estimate_job(job, folder, rates=rates, mean_answer=args.answer_tokens, sample=args.sample)
    if data.unusable == data.rows:
        raise ValueError(f"none of {data.sampled:,} rows can be trained on: python -m jobs.inspect says why")
    print(describe_estimate(found, data))
    print(f"rates       {rates.source}{'; yours where given' if given else ''}")
    if file:
        figures = {"estimate": asdict(found), "data": asdict(data), "rates": asdict(rates)}
        file.write_text(json.dumps(figures, indent=1))


def job_rates(job: JobConfig) -> Rates:
    """The measured rates of the kind of device that the job names."""
    from pipelines.rates import CPU_RATES, GPU_RATES

    return GPU_RATES if job.capture.gpus_per_actor else CPU_RATES


def estimate_job(
    job: JobConfig, folder: Path, *, rates: Rates | None = None, mean_answer: float | None = None, sample: int = 20_000
) -> tuple[Estimate, DataSize, DrafterConfig]:
    """The estimate of a job whose features would go to `folder`, what it rests on, and the drafter's configuration."""
    from domino_core.target import load_tokenizer, read_target_config
    from pipelines.estimate import estimate, measure_data
    from pipelines.prepare import drafter_config
    from pipelines.prompts import prompt_chunks, read_chunk

    target, tokenizer = read_target_config(job.target), load_tokenizer(job.target)
    drafter = drafter_config(job.drafter, target, tokenizer)
    chunks = prompt_chunks(job.data, num_rows=job.num_rows)
    data = measure_data(
        (row for chunk in chunks for row in read_chunk(chunk)),
        sum(chunk.num_rows for chunk in chunks),
        tokenizer,
        job.answer,
        job.capture,
        mean_answer=mean_answer if mean_answer is not None else job.answer.max_tokens,
        num_anchors=job.train.num_anchors,
        sample=sample,
    )
    rates = rates or job_rates(job)
    found = estimate(target, drafter, data, job.capture, rates=rates, train=job.train, folder=folder)
    return found, data, drafter


if __name__ == "__main__":
    sys.exit(run_job(main))
