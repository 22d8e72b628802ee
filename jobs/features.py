"""Capture the target's hidden states into a Parquet cache, for many training runs on the same data.

    python -m jobs.features --preset qwen3_8b target=Qwen/Qwen3-8B data=prompts.jsonl features=/data/features
    python -m jobs.train --preset qwen3_8b target=Qwen/Qwen3-8B features=/data/features

Training streams features by itself; a cache is worth its disk when several runs share it. Size and room are checked
before work starts. The same command again goes on where it was interrupted. Without features=, the cache is
ROOT/features.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.overrides import describe, job_parser, load, run_job


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--ignore-disk", action="store_true", help="start although the estimate exceeds the free disk")
    args = parser.parse_intermixed_args(argv)
    job = load(args)
    from jobs.estimate import estimate_job
    from pipelines.build_features import cache_features, feature_source
    from pipelines.estimate import describe_estimate, human_bytes

    folder = Path(job.features or Path(job.root) / "features")
    found, data, drafter = estimate_job(job, folder)
    source = feature_source(
        data=job.data,
        num_rows=job.num_rows,
        target=job.target,
        layer_ids=drafter.target_layer_ids,
        answer=job.answer,
        capture=job.capture,
        cache=folder,
        events=folder / "events",
        ledger=folder / "ledger.json",
    )
    print(describe(job))
    print(f"\nwill capture layers {list(drafter.target_layer_ids)} of {job.target} into {folder}")
    print(describe_estimate(found, data), flush=True)
    if found.feature_bytes > found.free_bytes and not args.ignore_disk:
        need, free = human_bytes(found.feature_bytes), human_bytes(found.free_bytes)
        raise ValueError(
            f"features={folder} would take {need}, {free} are free: use another disk or fewer rows (num_rows=), "
            "train by streaming, or start anyway with --ignore-disk"
        )
    if args.plan:
        return
    from tqdm import tqdm

    from jobs.ray_session import ray_session

    with ray_session(), tqdm(total=data.rows - data.unusable, unit="row", desc="capture") as bar:
        for rows in cache_features(source):
            bar.update(rows)
    from pipelines.feature_store import cached_rows, read_events

    print(f"{len(cached_rows(folder)):,} rows in {folder}\n{read_events(folder / 'events').summary()}")


if __name__ == "__main__":
    sys.exit(run_job(main))
