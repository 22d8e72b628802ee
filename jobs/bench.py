"""Decoding with and without a drafter, by the engine that serves: at several concurrencies, or under each draft rule.

    python -m jobs.bench --preset tiny                                  the drafter of the preset's run
    python -m jobs.bench --preset tiny --drafter FOLDER --concurrency 1,4,16 --out docs/results/decode.json
    python -m jobs.bench --preset tiny --rules                          sampled, at temperatures 0.3, 0.7 and 1.0
    python -m jobs.bench decode --shapes qwen3_8b                       random weights of real shapes (decode --help)
    python -m jobs.bench training --shapes qwen3_8b                     steps of the trainer (training --help)
    python -m jobs.bench features --shapes qwen3_8b                     the stream of hidden states (features --help)
    python -m jobs.bench pipeline --shapes qwen3_8b                     whole runs over two GPUs (pipeline --help)
    python -m jobs.bench serving --shapes qwen3_8b                      vLLM under load, with drafters (serving --help)

All arms run in turns in one process, on held-out prompts; medians over evaluate.repeats. The machine is in the result.
"""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_core.redact import redacted
from jobs.interrupts import as_interrupts
from jobs.overrides import describe, job_parser, load, run_job, writable

if TYPE_CHECKING:
    from jobs.presets import JobConfig
    from pipelines.measurement import Measurement

OTHERS = {
    "decode": ("jobs.bench_decode", "decode"),
    "training": ("jobs.bench_training", "training"),
    "features": ("jobs.bench_features", "bench_features"),
    "pipeline": ("jobs.bench_pipeline", "bench_pipeline"),
    "serving": ("jobs.bench_serving", "bench_serving"),
}


def main(argv: Sequence[str]) -> int | None:
    if argv and argv[0] in OTHERS:  # whose flags are their own: where there is no model there is no preset
        module, function = OTHERS[argv[0]]
        with as_interrupts():  # their models and caches lie in temporary folders
            return getattr(importlib.import_module(module), function)(argv[1:])
    parser = job_parser(__doc__)
    parser.add_argument("--drafter", help="drafter folder (default: the configuration's run)")
    parser.add_argument("--concurrency", default="1,2,4,8", help="rows decoded together, one line of the table each")
    parser.add_argument(
        "--rules", action="store_true", help="compare the draft rules instead, evaluate.concurrency rows"
    )
    parser.add_argument("--temperatures", default="0.3,0.7,1.0", help="of --rules (default: 0.3,0.7,1.0)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=("target", "eval_data"))
    folder = args.drafter or str(Path(job.root) / job.run_name / "drafter")
    concurrencies = [int(text) if text.isdecimal() else 0 for text in args.concurrency.split(",")]
    if min(concurrencies) < 1:
        raise ValueError(f"--concurrency {args.concurrency}: expected whole numbers above 0, such as 1,2,4,8")
    temperatures = [_temperature(text) for text in args.temperatures.split(",")]
    if args.plan:
        what = f"each rule, T = {args.temperatures}" if args.rules else f"{args.concurrency} rows at once"
        print(f"{describe(job)}\n\nwill decode with {folder} and without it, {what}")
        return None
    from jobs.environment import environment

    out = writable(args.out) if args.out else None
    result = {
        "command": redacted(shlex.join(["python", "-m", "jobs.bench", *argv])),
        "environment": environment(),
        "drafter": folder,
        "target": Path(job.target).name,
    }
    if args.rules:
        result |= {"settings": asdict(job.evaluate), "rules": bench_rules(job, folder, temperatures)}
    else:
        result |= {"concurrency": bench_concurrency(job, folder, concurrencies)}
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    return None


def bench_concurrency(job: JobConfig, folder: str, concurrencies: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Figures for each number of rows decoded together."""
    from pipelines.evaluate import load_arms, measure

    # At least one prompt per row, or the batch would never be full.
    most = replace(job.evaluate, num_prompts=max(job.evaluate.num_prompts, *concurrencies))
    target, drafter, prompts = load_arms(folder, job.target, job.eval_data, most)
    rows: dict[int, dict[str, Any]] = {}
    print(f"rows   {HEAD}")
    for concurrency in concurrencies:
        enough = prompts[: max(job.evaluate.num_prompts, concurrency)]
        found = measure(target, drafter, enough, replace(job.evaluate, concurrency=concurrency))
        rows[concurrency] = _figures(found)
        print(f"{concurrency:4}   {_line(found)}", flush=True)
    return rows


def bench_rules(job: JobConfig, folder: str, temperatures: Sequence[float]) -> dict[float, dict[str, dict[str, Any]]]:
    """Figures for each temperature and draft rule, against plain decoding at that temperature."""
    from pipelines.evaluate import load_arms, measure_rules

    target, drafter, prompts = load_arms(folder, job.target, job.eval_data, job.evaluate)
    table: dict[float, dict[str, dict[str, Any]]] = {}
    print(f"   T   rule           {HEAD}")
    for temperature in temperatures:
        found = measure_rules(target, drafter, prompts, replace(job.evaluate, temperature=temperature))
        table[temperature] = {rule: _figures(each) for rule, each in found.items()}
        for rule, each in found.items():
            print(f"{temperature:4.2f}   {rule:12}   {_line(each)}", flush=True)
    return table


HEAD = "plain tok/s   drafted tok/s   ratio      τ   identical"


def _line(found: Measurement) -> str:
    same = "no claim" if found.identical is None else str(found.identical)
    rates = f"{found.plain_tokens_per_s:11.0f}   {found.tokens_per_s:13.0f}   {found.speedup:5.2f}"
    return f"{rates}   {found.tau:4.2f}   {same}"


def _figures(found: Measurement) -> dict[str, Any]:
    kept = ("plain_tokens_per_s", "tokens_per_s", "speedup", "tau", "identical", "largest_gap")
    return {name: getattr(found, name) for name in (*kept, "acceptance", "num_tokens", "plain_seconds", "seconds")}


def _temperature(text: str) -> float:
    """Above 0: rules differ in sampled requests only."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 2:
        raise ValueError(f"--temperatures: {text!r} is none; expected numbers above 0 and up to 2, such as 0.3,0.7,1.0")
    return value


if __name__ == "__main__":
    sys.exit(run_job(main))
