"""Hidden states from an engine to the device of a training worker: how fast, where the time goes, and in what memory.

    python -m jobs.bench features --shapes qwen3_8b --out docs/results/features_h100.json
    python -m jobs.bench features --shapes tiny --seconds 3             on a CPU, in a minute

engine    the stock engine alone: prefills of one token, no hidden states; what the other arms are compared with
capture   our engine: states of five layers reach the host's memory, and are dropped there
stream    the same engine through Ray Data and the training worker's collate to tensors on its device

Random weights of real shapes, rows of random tokens. On one card, engine and worker share it. The stages of the stream
work at the same time: a share is the part of the stream's time that a stage was at work, so the largest is the
narrowest place, and shares of more than 1 come from several threads. The file is written after each arm.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.bench_decode import SHAPE_NAMES, Report, check_positions
from jobs.overrides import run_job

if TYPE_CHECKING:
    from pipelines.bench_features import FeaturePlan

NOTE = (
    "The engine arm is vLLM as it comes: its own scheduling, chunked prefill, no connector. The stock connector is no "
    "arm: it would need one more engine start."
)


def bench_features(argv: Sequence[str]) -> int:
    """The command. ValueError for a flag that cannot be meant, before anything is measured."""
    args = _parser().parse_args(argv)
    if args.shapes not in SHAPE_NAMES:
        raise ValueError(f"--shapes {args.shapes}: expected one of {', '.join(SHAPE_NAMES)}")
    tiny = args.shapes == "tiny"
    args.row_tokens = (200 if tiny else 1000) if args.row_tokens is None else args.row_tokens
    args.store_gb = (1.0 if tiny else 12.0) if args.store_gb is None else args.store_gb
    args.slice_mb = (1.0 if tiny else 256.0) if args.slice_mb is None else args.slice_mb
    for flag in ("seconds", "row_tokens", "batched_tokens", "rows_per_call", "train_batch", "slice_mb", "store_gb"):
        if not 0 < getattr(args, flag) < math.inf:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag):g}: must be a number above 0")
    report = Report(
        shlex.join(["python", "-m", "jobs.bench", "features", *argv]), [args.shapes], args.out, headline=headline
    )
    report.result["note"] = NOTE
    with tempfile.TemporaryDirectory(prefix="domino-bench-") as scratch:
        _measure(report, _plan(args, Path(scratch)), args.store_gb)
    return 1 if report.result["errors"] else 0


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """The figures that are quoted; None: not measured."""
    engine, stream = result.get("engine", {}), result.get("stream", {})
    offered, delivered = engine.get("tokens_per_s"), stream.get("steady_tokens_per_s")
    return {
        "engine_tokens_per_s": offered,
        "capture_tokens_per_s": result.get("capture", {}).get("tokens_per_s"),
        "delivered_tokens_per_s": delivered,
        "delivered_ratio": delivered / offered if offered and delivered else None,
        "gb_per_s": stream.get("gb_per_s"),
    }


def _measure(report: Report, plan: FeaturePlan, store_gb: float) -> None:
    import ray

    from jobs.ray_session import own_ray
    from pipelines.bench_features import engine_arm, stream_arm

    report.result |= {"settings": asdict(plan.capture) | {"row_tokens": plan.row_tokens}}
    with own_ray(store_gb):
        gpus = 1 if plan.capture.gpus_per_actor else 0

        def engine() -> None:
            # A process of its own, which gives the card back.
            work: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_calls=1, max_retries=0)(engine_arm)
            found: Any = ray.get(work.remote(plan))
            report.result["engine"] = found
            _tell("engine", found["tokens_per_s"])

        def stream() -> None:
            report.result |= stream_arm(plan, report.result["engine"]["tokens_per_s"])
            _tell("capture", report.result["capture"]["tokens_per_s"])
            _tell("stream", report.result["stream"]["tokens_per_s"])
            report.result["stages"] = stages(report.result, plan)
            for name, found in report.result["stages"].items():
                figures = [f"{found[key]:8.3f}" if key in found else " " * 8 for key in ("alone", "stream", "share")]
                print(f"{name:14} {'   '.join(figures)}", flush=True)

        report.measure("engine", engine)
        if "engine" in report.result:
            report.measure("stream", stream)
    print(f"delivered ratio {headline(report.result)['delivered_ratio']}, memory {report.result.get('memory')}")


def stages(result: dict[str, Any], plan: FeaturePlan) -> dict[str, dict[str, float]]:
    """Seconds per GB of features, of each stage for itself and at work in the stream, and the share of its time."""
    gb_per_token = plan.source.meta.bytes_per_token / 1e9
    engine, capture = (1 / (result[arm]["tokens_per_s"] * gb_per_token) for arm in ("engine", "capture"))
    alone, stream = result["alone"], result["stream"]

    def at_work(name: str) -> dict[str, float]:
        return {"stream": stream["busy_seconds_per_gb"][name], "share": stream["busy_share"][name]}

    return {
        "engine": {"alone": engine} | at_work("engine"),
        "hand-over": {"alone": capture - engine},  # what capturing adds to the engine's own time
        "to Arrow": {"alone": alone["to_arrow"]},
        "put": {"alone": alone["put"]} | at_work("taken"),  # in the stream with the wait for somebody to take it
        "get": {"alone": alone["get"]},
        "collate": at_work("collate"),
        "copy": at_work("copy"),
        "engine waits": at_work("engine_blocked"),
    }


def _tell(arm: str, tokens_per_s: float) -> None:
    print(f"{arm:8} {tokens_per_s:10,.0f} tokens/s", flush=True)


def _plan(args: argparse.Namespace, scratch: Path) -> FeaturePlan:
    import torch

    from domino_core.config import default_target_layer_ids
    from domino_core.target import read_target_config
    from pipelines.bench_features import FeaturePlan, write_config
    from pipelines.bench_shapes import SHAPES
    from pipelines.capture import CaptureConfig

    if args.shapes == "tiny":  # the heads of the other tiny shapes are too narrow for vLLM
        target = read_target_config("assets/tiny-qwen3")
        layer_ids = default_target_layer_ids(target.num_hidden_layers, 3)
    else:
        target, layer_ids = SHAPES[args.shapes].target, SHAPES[args.shapes].drafter.target_layer_ids
    check_positions("--row-tokens", args.row_tokens + 1, target)  # of which one is the engine's own
    write_config(scratch / "model", target)
    gpu = torch.cuda.is_available()
    batched = max(args.batched_tokens, args.row_tokens + 1)
    capture = CaptureConfig(
        max_length=args.row_tokens,
        batch_size=args.rows_per_call,
        weights="random",
        max_num_batched_tokens=batched if gpu else min(batched, 4096),
        slice_bytes=int(args.slice_mb * 2**20),
        gpus_per_actor=0.7 if gpu else 0,
        gpu_memory_utilization=0.8,
        kv_cache_bytes=256 << 20,
    )
    return FeaturePlan(
        folder=str(scratch / "model"),
        layer_ids=layer_ids,
        target=target,
        capture=capture,
        row_tokens=args.row_tokens,
        seconds=args.seconds,
        train_batch=args.train_batch,
        scratch=str(scratch),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench features", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen3_8b", help=f"one of {', '.join(SHAPE_NAMES)} (default: qwen3_8b)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm, about (default: 20)")
    parser.add_argument("--row-tokens", type=int, help="tokens of a row (default: 1000, tiny 200)")
    parser.add_argument("--batched-tokens", type=int, default=16384, help="of an engine's step, all arms (16384)")
    parser.add_argument("--rows-per-call", type=int, default=128, help="rows of a call of the actor (default: 128)")
    parser.add_argument("--slice-mb", type=float, help="MiB of features of a block (default: 256, tiny 1)")
    parser.add_argument("--train-batch", type=int, default=2, help="rows of a batch of the worker (default: 2)")
    parser.add_argument("--store-gb", type=float, help="object store (default: 12, tiny 1)")
    parser.add_argument("--out", type=Path, help="JSON file to write, after each arm")
    return parser


if __name__ == "__main__":
    sys.exit(run_job(bench_features))
