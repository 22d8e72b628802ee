"""What a round costs and what it gives, on random weights of real shapes; and a real drafter beside transformers.

    python -m jobs.bench decode --shapes qwen3_8b,qwen3_4b --out docs/results/decode_h100.json
    python -m jobs.bench decode --shapes qwen3_8b --tables single,load --quick
    python -m jobs.bench decode --tables real --drafter runs/tiny-qwen3-domino-b4/drafter

parts    every part of a round beside its floor: bytes or operations at the rates that the device gave in this run
single   one row at several contexts, plain decoding against Domino
load     rows decoded together: plain, whole blocks verified, and as much as pays
real     a trained drafter, end to end: this engine with and without it, and transformers' generate; outputs compared

In single and load the acceptance is imposed (pipelines/imposed.py), and the result says so. parts is measured for every
shape, single and load for the first. The file is written after each table. Exit code 1 if a table failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.overrides import writable

if TYPE_CHECKING:
    import torch

    from domino_core.target_model import TargetConfig
    from pipelines.bench_decode import Plan
    from pipelines.bench_real import RealPlan

TABLES = ("parts", "single", "load", "real")
SHAPE_NAMES = ("qwen3_8b", "qwen3_4b", "qwen3_0_6b", "tiny")
VLLM_TOKENS_PER_S = 147.0  # vLLM 0.26.0, Qwen3-8B in bfloat16, plain decoding of one request, measured on an H100
IMPOSED = (
    "imposed in single and load: random weights of real shapes, and drafts kept at random so that a round gives `aim` "
    "tokens on average; `tau` is what was had. Only the table real shows a trained drafter."
)


def decode(argv: Sequence[str]) -> int:
    """The command. ValueError for a flag that cannot be meant, before anything is measured."""
    args = _parser().parse_args(argv)
    shapes, tables = names_of("--shapes", args.shapes, SHAPE_NAMES), names_of("--tables", args.tables, TABLES)
    real = _real_plan(args) if "real" in tables else None
    if real is None and (args.drafter or args.prompts):
        raise ValueError("--drafter and --prompts are of the table real: name it in --tables")
    device = bench_device(args.device)
    report = Report(shlex.join(["python", "-m", "jobs.bench", "decode", *argv]), shapes, args.out, headline)
    report.result["acceptance"] = IMPOSED
    report.measure("ceilings", lambda: report.result.update(ceilings=measure_rates(device)))
    for number, name in enumerate(shapes):
        wanted = [table for table in tables if table == "parts" or (number == 0 and table in ("single", "load"))]
        if wanted:
            _measure_shape(report, name, wanted, device, quick=args.quick)
    if real is not None:
        report.measure("real", lambda: report.result.update(real=_real(real, device)))
    return 1 if report.result["errors"] else 0


class Report:
    """The result so far, written after every table: a run that is killed keeps what it has."""

    def __init__(
        self,
        command: str,
        shapes: Sequence[str],
        out: Path | None,
        headline: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        from jobs.environment import environment

        self.out, self.headline = writable(out) if out else None, headline
        self.result: dict[str, Any] = {
            "command": command,
            "environment": environment(),
            "shapes": list(shapes),
            "seconds": {},
            "errors": {},
        }

    def measure(self, name: str, work: Callable[[], None]) -> None:
        """Fill a table. One that fails on a machine that is lent by the minute must not take the others along."""
        started = time.perf_counter()
        try:  # the device is the boundary, and CUDA, Triton and their compilers raise all kinds of errors
            work()
        except Exception as error:
            self.result["errors"][name] = f"{type(error).__name__}: {error}"
            print(f"{name} FAILED\n{traceback.format_exc()}", flush=True)
        self.result["seconds"][name] = round(time.perf_counter() - started, 1)
        self.write()

    def write(self) -> None:
        """What there is by now, if a file was asked for."""
        if self.out:
            self.out.write_text(json.dumps(self.headline(self.result) | self.result, indent=1) + "\n")


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """The figures that are quoted, of the first shape: one row behind the shortest context; None: not measured."""
    from pipelines.bench_decode import HEADLINE_TAU
    from pipelines.bench_parts import HEAD_PART

    aim, parts, single = f"{HEADLINE_TAU:g}", result.get("parts", {}), result.get("single", {})
    context = min(single, default=None)
    plain = single[context]["plain"]["tokens_per_s"] if single else None
    domino = single[context]["domino"].get(aim, {}) if single else {}
    tokens_per_s = domino.get("tokens_per_s")
    return {
        "headline_context": context,
        "plain_tokens_per_s_b1": plain,
        f"domino_tokens_per_s_b1_tau{aim}": tokens_per_s,
        "head_ms": parts.get(result["shapes"][0], {}).get(HEAD_PART, {}).get("ms"),
        "round_ms": domino.get("ms_per_round"),
        "speedup_by_rows": {
            rows: arms["auto"][aim]["speedup"] for rows, arms in result.get("load", {}).items() if aim in arms["auto"]
        },
        "ratio_over_vllm_147": tokens_per_s / VLLM_TOKENS_PER_S if tokens_per_s else None,
        "plain_ratio_over_vllm_147": plain / VLLM_TOKENS_PER_S if plain else None,
    }


def _measure_shape(report: Report, name: str, wanted: Sequence[str], device: torch.device, *, quick: bool) -> None:
    """The tables of one shape. Its gigabytes are given back when this returns."""
    import torch

    from domino_core.target_model import random_target
    from pipelines.bench_decode import PLANS, load_table, single_table
    from pipelines.bench_shapes import SHAPES, random_drafter

    shape, result = SHAPES[name], report.result
    plan = PLANS["tiny" if name == "tiny" else "quick" if quick else "full"]
    started = time.perf_counter()
    target = random_target(shape.target, device=device, dtype=bench_dtype(device))
    drafter = random_drafter(shape.drafter, target)
    print(f"\n{name}: random weights in {time.perf_counter() - started:.1f} s", flush=True)
    tables: dict[str, Callable[[], None]] = {
        "parts": lambda: _parts(result, name, plan, target, drafter),
        "single": lambda: single_table(target, drafter, plan, result.setdefault("single", {}), _tell),
        "load": lambda: load_table(target, drafter, plan, result.setdefault("load", {}), _tell),
    }
    for table in wanted:
        if table != "parts" or "ceilings" in result:
            report.measure(f"parts {name}" if table == "parts" else table, tables[table])
        gc.collect()  # engines hold their graphs, and those hold memory
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _parts(result: dict[str, Any], name: str, plan: Plan, target: Any, drafter: Any) -> None:
    from pipelines.bench_parts import parts_table
    from pipelines.bench_shapes import SHAPES, Ceilings

    ceilings, table = Ceilings(**result["ceilings"]), result.setdefault("parts", {}).setdefault(name, {})
    _tell(f"{'part':28}       ms   floor ms   ratio   eager ms")
    context, repeats = plan.parts_context, plan.parts_repeats
    for part, found in parts_table(SHAPES[name], target, drafter, ceilings, context=context, repeats=repeats):
        table[part] = found
        figures = f"{found['ms']:8.3f}   {found['floor_ms']:8.3f}   {found['ratio']:5.2f}   {found['eager_ms']:8.3f}"
        _tell(f"{part:28} {figures}")


def measure_rates(device: torch.device) -> dict[str, float]:
    from dataclasses import asdict

    from pipelines.bench_parts import measure_ceilings

    found = measure_ceilings(device, bench_dtype(device))
    _tell(f"ceilings: {found.bytes_per_s / 1e9:.0f} GB/s, {found.operations_per_s / 1e12:.1f} T operations/s")
    return asdict(found)


def _real(plan: RealPlan, device: torch.device) -> dict[str, Any]:
    from pipelines.bench_real import real_table

    table = real_table(plan, device)
    for dtype, arms in table.items():
        for name, found in arms.items():
            same = f", {found['identical']} of {found['outputs']} outputs identical" if "outputs" in found else ""
            tau = f", τ {found['tau']:.2f}" if "tau" in found else ""
            _tell(f"{dtype} {name:12} {found['tokens_per_s']:8.1f} tokens/s{tau}{same}")
    return table


def _tell(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen3_8b", help=f"some of {','.join(SHAPE_NAMES)} (default: qwen3_8b)")
    parser.add_argument(
        "--tables", default="parts,single,load", help=f"some of {','.join(TABLES)}; default: the first 3"
    )
    parser.add_argument("--quick", action="store_true", help="few points, once: does it run, and about how fast?")
    parser.add_argument("--out", type=Path, help="JSON file to write, after each table")
    parser.add_argument("--device", default="auto", help="cuda where there is one")
    parser.add_argument("--drafter", help="of the table real: a trained drafter's folder")
    parser.add_argument("--target", default="assets/tiny-qwen3", help="of the table real (default: assets/tiny-qwen3)")
    parser.add_argument("--prompts", help="of the table real (default: TARGET/prompts/heldout.jsonl)")
    return parser


def names_of(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"{flag} {text}: expected some of {', '.join(known)}, each once, with commas between")
    return names


def _real_plan(args: argparse.Namespace) -> RealPlan:
    if not args.drafter:
        raise ValueError("the table real needs a trained drafter: give --drafter FOLDER, or leave real out of --tables")
    from pipelines.bench_real import RealPlan

    prompts = args.prompts or str(Path(args.target) / "prompts" / "heldout.jsonl")
    plan = RealPlan(target=args.target, prompts=prompts, drafter=args.drafter)
    plan.check()
    return plan


def check_positions(flags: str, wanted: int, target: TargetConfig) -> None:
    """ValueError for rows or requests that are longer than a target's."""
    if wanted > target.max_position_embeddings:
        raise ValueError(f"{flags}: {wanted:,} positions are more than the target's {target.max_position_embeddings:,}")


def bench_device(name: str) -> torch.device:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {name}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def bench_dtype(device: torch.device) -> torch.dtype:
    """What models are served in; a CPU multiplies in float32."""
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32
