"""Whole training runs over two GPUs, at steady state, beside what `jobs.estimate` says of them.

    python -m jobs.bench pipeline --shapes qwen3_8b --minutes 2 --out docs/results/pipeline_h100.json
    python -m jobs.bench pipeline --shapes qwen3_8b --arms stream,whole,sharded --scratch FOLDER
    python -m jobs.bench pipeline --shapes tiny --minutes 0.1           on a CPU, in some minutes

stream    one GPU extracts, the other one trains, and what is extracted is written to a Parquet cache
whole     all GPUs train from that cache, the drafter whole on each (DDP)
sharded   the same with train.shard

Random weights of real shapes, rows of random tokens; the runs are those of jobs.train. Rates are of the log lines after
the first quarter. trained_ and extracted_: of each side while it does not wait for the other. A ratio is the measured
figure over the estimate's. An arm without the stream before it needs its cache: give the same --scratch. The file is
written after each arm.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.bench_decode import SHAPE_NAMES, Report, check_positions, names_of
from jobs.overrides import writable

if TYPE_CHECKING:
    from pipelines.bench_pipeline import PipelinePlan

ARMS = ("stream", "whole", "sharded")
TINY_TARGET = "assets/tiny-qwen3"  # its tokenizer serves all shapes: rows are random


def bench_pipeline(argv: Sequence[str]) -> int:
    """The command. ValueError for a flag that cannot be meant, before anything is measured."""
    args = _parser().parse_args(argv)
    if args.shapes not in SHAPE_NAMES:
        raise ValueError(f"--shapes {args.shapes}: expected one of {', '.join(SHAPE_NAMES)}")
    arms = names_of("--arms", args.arms, ARMS)
    tiny = args.shapes == "tiny"
    args.row_tokens = (96 if tiny else 768) if args.row_tokens is None else args.row_tokens
    args.store_gb = (1.0 if tiny else 12.0) if args.store_gb is None else args.store_gb
    for flag in ("minutes", "batch", "workers", "steps", "store_gb", "bus_gb"):
        if getattr(args, flag) is not None and not 0 < getattr(args, flag) < math.inf:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag):g}: must be a number above 0")
    if args.row_tokens < 64:
        raise ValueError(f"--row-tokens {args.row_tokens}: give at least 64, the first 32 are a prompt")
    report = Report(
        shlex.join(["python", "-m", "jobs.bench", "pipeline", *argv]), [args.shapes], args.out, headline=headline
    )
    if args.scratch:
        writable(args.scratch / ".new")
        _measure(report, pipeline_plan(args, args.scratch.resolve()), arms, args)
    else:
        with tempfile.TemporaryDirectory(prefix="domino-bench-") as scratch:
            _measure(report, pipeline_plan(args, Path(scratch)), arms, args)
    return 1 if report.result["errors"] else 0


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """The figures that are quoted; None: not measured."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        figures = result.get(arm, {})
        found[f"{arm}_samples_per_s"] = figures.get("samples_per_s")
        found[f"{arm}_ratio"] = figures.get("ratios", {}).get("samples_per_s")
    return found


def _measure(report: Report, plan: PipelinePlan, arms: Sequence[str], args: argparse.Namespace) -> None:
    from jobs.ray_session import own_ray
    from pipelines.bench_pipeline import run_arm, write_target

    report.result["settings"] = {"row_tokens": plan.row_tokens, "minutes": plan.minutes, "batch": args.batch}
    report.measure("target", lambda: write_target(plan))
    if report.result["errors"]:
        return
    needed, free = plan.disk_bytes(), shutil.disk_usage(plan.root).free
    if needed > free:
        raise ValueError(
            f"{plan.root} has {free / 1e9:.0f} GB free, {needed / 1e9:.0f} are needed: take less --minutes"
        )
    if "stream" not in arms and not plan.cache.exists():
        raise ValueError(f"--arms {args.arms}: there is no {plan.cache}; run the arm stream with this --scratch first")
    with own_ray(args.store_gb):
        for arm in ARMS:
            if arm not in arms:
                continue

            def measure(arm: str = arm) -> None:
                workers = 1 if arm == "stream" else args.workers or default_workers()
                report.result[arm] = run_arm(plan, arm, num_workers=workers, shard=arm == "sharded", steps=args.steps)
                _tell(arm, report.result[arm])

            report.measure(arm, measure)


def _tell(arm: str, found: dict[str, Any]) -> None:
    print(f"{arm:8} {found['samples_per_s']:8.2f} rows/s, {found['tokens_per_s']:,.0f} tokens/s", flush=True)
    for name, ratio in found["ratios"].items():
        print(f"   {name:24} {found[name]:12,.2f}   estimate {found['estimate'][name]:12,.2f}   ratio {ratio:.2f}")
    waits = {name: found[name] for name in ("trainer_waited_share", "engine_blocked_share") if name in found}
    told = [f"{name} {value:.0%}" for name, value in waits.items()]
    memory = found["memory"]
    told += [f"{part} at most {memory[f'{part}_gb']['peak']:.1f} GB" for part in ("private", "store")]
    print(f"   {', '.join(told)}, spilled {memory['spilled_gb']:.1f} GB", flush=True)


def default_workers() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def pipeline_plan(args: argparse.Namespace, root: Path) -> PipelinePlan:
    """ValueError if there is one GPU: engine and trainer would share it, and the estimate says nothing of that."""
    from dataclasses import replace

    import torch

    from domino_core.target import read_target_config
    from pipelines.bench_pipeline import PipelinePlan
    from pipelines.bench_shapes import SHAPES
    from pipelines.capture import CaptureConfig
    from pipelines.prepare import DrafterShape
    from pipelines.rates import CPU_RATES, GPU_RATES
    from pipelines.train_config import TrainConfig

    gpu, tiny = torch.cuda.is_available(), args.shapes == "tiny"
    if gpu and torch.cuda.device_count() < 2:
        raise ValueError("torch sees one GPU here; one to extract and one to train are needed")
    if tiny:  # the heads of the other tiny shapes are too narrow for vLLM
        target = read_target_config(TINY_TARGET)
        shape = DrafterShape(block_size=4, num_hidden_layers=3, emb_dim=8, gru_hidden_dim=16)
    else:
        target, drafter = SHAPES[args.shapes].target, SHAPES[args.shapes].drafter
        shape = DrafterShape(target_layer_ids=drafter.target_layer_ids, mask_token_id=drafter.mask_token_id)
    check_positions("--row-tokens", args.row_tokens + 1, target)  # of which one is the engine's own
    rates = GPU_RATES if gpu else CPU_RATES
    return PipelinePlan(
        root=str(root),
        tokenizer=TINY_TARGET,
        shape=shape,
        target=target,
        capture=CaptureConfig(
            max_length=args.row_tokens,
            batch_size=32 if tiny else 128,
            max_num_batched_tokens=4096 if tiny else 16384,
            slice_bytes=(1 if tiny else 256) << 20,
            weights="random",
            gpus_per_actor=1 if gpu else 0,
            kv_cache_bytes=256 << 20,
        ),
        train=TrainConfig(
            batch_size=args.batch,
            num_anchors=16 if tiny else 256,
            precision="bfloat16" if gpu else "float32",
            use_gpu=gpu,
            cpus_per_worker=1.0 if gpu else 0.5,
        ),
        row_tokens=args.row_tokens,
        minutes=args.minutes,
        rates=replace(rates, bus_bytes_per_s=args.bus_gb * 1e9) if args.bus_gb else rates,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen3_8b", help=f"one of {', '.join(SHAPE_NAMES)} (default: qwen3_8b)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each arm's steps, by the estimate (default: 2)")
    parser.add_argument("--arms", default="stream,whole", help=f"some of {','.join(ARMS)} (default: stream,whole)")
    parser.add_argument("--row-tokens", type=int, help="tokens of a row (default: 768, tiny 96)")
    parser.add_argument("--batch", type=int, default=2, help="rows of a worker's step (default: 2)")
    parser.add_argument("--workers", type=int, help="that train from the cache (default: all GPUs; 2 on a CPU)")
    parser.add_argument("--steps", type=int, help="of each arm, in place of --minutes")
    parser.add_argument("--bus-gb", type=float, help="GB/s that the estimate takes for what passes between GPUs (300)")
    parser.add_argument("--store-gb", type=float, help="object store (default: 12, tiny 1)")
    parser.add_argument("--scratch", type=Path, help="folder that stays, with the cache (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file to write, after each arm")
    return parser
