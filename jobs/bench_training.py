"""What a training step takes, on random weights and features of real shapes, beside its floor.

    python -m jobs.bench training --shapes qwen3_8b --out docs/results/training_h100.json
    python -m jobs.bench training --shapes tiny --quick

Steps of the trainer at several lengths and batches (256 blocks of 16 a row), their parts, and the slow twins. MFU
counts each operation of the shapes once (pipelines/training_work.py), whatever is computed again, over 989.4 TFLOP/s,
an H100's by its data sheet. The file is written after every line. Exit code 1 if a shape failed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.bench_decode import SHAPE_NAMES, Report, bench_device, measure_rates, names_of


def training(argv: Sequence[str]) -> int:
    """The command. ValueError for a flag that cannot be meant, before anything is measured."""
    args = _parser().parse_args(argv)
    shapes, device = names_of("--shapes", args.shapes, SHAPE_NAMES), bench_device(args.device)
    report = Report(shlex.join(["python", "-m", "jobs.bench", "training", *argv]), shapes, args.out, headline)
    report.measure("ceilings", lambda: report.result.update(ceilings=measure_rates(device)))
    for name in shapes if "ceilings" in report.result else []:
        report.measure(name, lambda name=name: _measure_shape(report, name, device, quick=args.quick))
    return 1 if report.result["errors"] else 0


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """The figures that are quoted: rows of 768 tokens, two a step, of the first shape; None: not measured."""
    tables = result.get("training", {}).get(result["shapes"][0], {})
    line = next(iter(tables.values()), {})
    return {name: line.get(name) for name in ("ms_per_sample", "mfu", "peak_gb")}


def _measure_shape(report: Report, name: str, device: Any, *, quick: bool) -> None:
    from pipelines.bench_shapes import SHAPES, Ceilings
    from pipelines.bench_training import PLANS, training_table

    plan = PLANS["tiny" if name == "tiny" else "quick" if quick else "full"]
    table = report.result.setdefault("training", {}).setdefault(name, {})
    for line, found in training_table(SHAPES[name].drafter, plan, Ceilings(**report.result["ceilings"]), device):
        table[line] = found
        report.write()
        if "ms_per_sample" in found:
            figures = f"{found['ms_per_sample']:8.1f} ms a sample (floor {found['floor_ms_per_sample']:.1f})"
            figures += f"   {found['tflop_per_s']:6.1f} TFLOP/s   MFU {found['mfu']:.1%}"
            print(f"{name} {line:24} {figures}   {found.get('peak_gb', 0.0):.1f} GB", flush=True)
            continue
        for part, each in found.items():
            if isinstance(each, dict) and "ms" in each:
                print(f"   {part:24} {each['ms']:8.2f} ms (floor {each['floor_ms']:.2f})", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen3_8b", help=f"some of {','.join(SHAPE_NAMES)} (default: qwen3_8b)")
    parser.add_argument("--quick", action="store_true", help="one point: does it run, and about how fast?")
    parser.add_argument("--out", type=Path, help="JSON file to write, after each line")
    parser.add_argument("--device", default="auto", help="cuda where there is one")
    return parser
