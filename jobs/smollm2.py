"""The method on a real model that needs no download: data, training and comparison on SmolLM2-135M-Instruct.

    python -m jobs.smollm2 target --gguf FILE --out runs/smollm2           the model, from a GGUF file
    python -m jobs.smollm2 data   --target runs/smollm2 --out data.npz     conversations, made by the target itself
    python -m jobs.smollm2 train  --target runs/smollm2 --data data.npz --arm domino --out runs/drafter
    python -m jobs.smollm2 run    --target runs/smollm2 --data data.npz --seeds 3 --out docs/results/smollm2.json
    python -m jobs.smollm2 table  --out docs/results/smollm2.json          the tables of docs/experiment.md

`train` writes a drafter that jobs.bench and serving read. `run` trains and measures every arm (`--arms` names some) and
goes on where it was interrupted: what --out holds is not repeated. `--tiny` is for the embedded target on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.overrides import run_job, writable

if TYPE_CHECKING:
    from pipelines.experiment_run import RunPlan


def main(argv: Sequence[str]) -> None:
    args = _parser().parse_args(argv)
    COMMANDS[args.command](args, shlex.join(["python", "-m", "jobs.smollm2", *argv]))


def make_target(args: argparse.Namespace, command: str) -> None:
    from jobs.smollm2_target import convert_gguf

    convert_gguf(args.gguf, args.out)
    print(f"target    {args.out}")


def make_data(args: argparse.Namespace, command: str) -> None:
    from jobs.bench_decode import bench_device
    from jobs.environment import environment
    from pipelines.experiment_data import info_file, write_conversations
    from pipelines.experiment_make import DataPlan
    from pipelines.experiment_make import make_data as make

    out = writable(args.out)
    writable(info_file(out))
    plan = DataPlan(target=str(args.target), parallel=args.parallel, device=str(bench_device(args.device)))
    plan = replace(plan, num=args.num, num_heldout=args.heldout, seed=args.seed)
    plan = replace(plan, prompts=replace(plan.prompts, exclude=tuple(str(path) for path in args.exclude)))
    if args.tiny:
        prompts = replace(plan.prompts, max_tokens=96)
        plan = replace(plan, prompts=prompts, max_tokens=48, chunk=32, max_rows=8)
    found, info = make(plan, tell)
    info["settings"]["prompts"]["exclude"] = [path.name for path in args.exclude]
    info["settings"]["target"] = Path(plan.target).name
    write_conversations(out, found, {"command": command, "environment": environment()} | info)
    print(json.dumps(found.statistics(), indent=1))
    print(f"data      {out}, described in {info_file(out)}")


def train(args: argparse.Namespace, command: str) -> None:
    """Train one arm and write it as a drafter's folder."""
    from domino_core.checkpoint import check_replaceable, provenance, save_drafter
    from domino_core.drafter import Drafter
    from domino_core.target import target_hash
    from pipelines.experiment_run import open_setting
    from pipelines.experiment_train import train_arm

    check_replaceable(args.out)
    writable(args.out.resolve().parent / ".new")  # where it is put together
    plan = run_plan(args, work="")
    setting = open_setting(plan)
    arm = setting.arms[known_arms([args.arm], setting.arms)[0]]
    if arm.kind != "domino":
        raise ValueError(f"--arm {args.arm} is no drafter of ours: it is for comparison in `run`, and not served")
    trained = train_arm(arm, setting.target, setting.data, args.seed, on_log=_log_line, folder=str(args.target))
    assert isinstance(trained.model, Drafter)
    described = provenance(
        target={"path": str(args.target), "hash": target_hash(args.target)},
        data=Path(args.data).name,
        arm=args.arm,
        settings=asdict(arm),
        training={"steps": trained.progress.step, "seconds": trained.seconds, "metrics": trained.progress.history[-1]},
    )
    save_drafter(trained.model, args.out, described)
    print(f"drafter   {args.out} ({trained.seconds:.0f} s, {trained.num_parameters:,} parameters)")


def run(args: argparse.Namespace, command: str) -> None:
    """Train and measure arms. ValueError for flags that cannot be meant, and beside another run with the same --out."""
    from domino_core.atomic_files import sole_writer

    if args.seeds < 1 or args.parallel < 1:
        raise ValueError(f"--seeds {args.seeds}, --parallel {args.parallel}: each must be at least 1")
    if not args.minutes >= 0:
        raise ValueError(f"--minutes {args.minutes:g}: must be 0 or more")
    out = writable(args.out)
    with contextlib.nullcontext() if args.plan else sole_writer(out):
        _run(args, command, out)


def _run(args: argparse.Namespace, command: str, out: Path) -> None:
    from domino_core.atomic_files import write_atomically
    from jobs.environment import environment
    from pipelines.experiment_result import basis, check_continues, read_result
    from pipelines.experiment_run import check_runs, estimate_seconds, open_setting, planned, run_all, weights_file

    result = read_result(out)
    plan = run_plan(args, work=str(args.work))
    setting = open_setting(plan)
    names = args.arms.split(",") if args.arms else list(setting.arms)
    wanted = planned(names, args.seeds)
    known_arms(list(dict(wanted)), setting.arms)
    check_runs(setting, wanted, plan.measure)
    check_continues(result, plan, setting)
    lengths = [len(row.prompt_ids) + len(row.answer_ids) for row in setting.data.train]
    pairs = [pair for pair in wanted if f"{pair[0]}/{pair[1]}" not in result.get("runs", {})]
    seconds = sum(
        estimate_seconds(setting.arms[name], setting.target.config, sum(lengths) / len(lengths)) for name, _ in pairs
    )
    print(f"{len(pairs)} trainings, about {seconds / 60:.0f} minutes of an H100 one after the other", flush=True)
    if args.plan:
        return
    for name, seed in pairs:
        writable(weights_file(plan, name, seed))
    result |= {
        # Where the benchmark prompts lie is nobody else's business.
        "commands": [*result.get("commands", []), command.replace(str(args.eval), "EVAL") if args.eval else command],
        "environment": environment(),
    } | basis(plan, setting)

    def keep() -> None:
        write_atomically(out, (json.dumps(result, indent=1) + "\n").encode())

    for line in run_all(
        plan, wanted, result, keep, parallel=args.parallel, seconds=60 * args.minutes, with_speed=not args.no_speed
    ):
        tell(line)


def table(args: argparse.Namespace, command: str) -> None:
    from jobs.smollm2_tables import tables
    from pipelines.experiment_result import read_result

    result = read_result(args.out)
    if not result:
        raise ValueError(f"--out {args.out} does not exist")
    for name, lines in tables(result).items():
        print(f"{name}\n\n{lines}\n")


def run_plan(args: argparse.Namespace, work: str) -> RunPlan:
    """What a command's flags mean."""
    from jobs.bench_decode import bench_device
    from pipelines.experiment_arms import full, tiny
    from pipelines.experiment_measure import MeasurePlan
    from pipelines.experiment_run import RunPlan

    measure, scale = MeasurePlan(), full()
    if args.tiny:
        scale = tiny()
        measure = MeasurePlan(
            max_tokens=16,
            max_rows=4,
            most_prompts=4,
            speed_prompts=2,
            speed_tokens=8,
            speed_repeats=1,
            draft_context=8,
            draft_repeats=2,
        )
    if args.steps is not None:
        scale = replace(scale, train=replace(scale.train, steps=args.steps))
    return RunPlan(
        target=str(args.target),
        data=str(args.data),
        work=work,
        eval_folder=str(args.eval) if args.eval else None,
        device=str(bench_device(args.device)),
        scale=scale,
        measure=measure,
    )


def known_arms(names: Sequence[str], arms: dict[str, Any]) -> list[str]:
    unknown = [name for name in names if name not in arms]
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"arms {','.join(names)}: expected some of {', '.join(arms)}, each once")
    return list(names)


def _log_line(metrics: dict[str, float]) -> None:
    tell(
        f"step {metrics['step']:.0f}  loss {metrics['final_loss']:.3f}  tokens a round {metrics['final_accepted']:.2f}"
    )


def tell(line: str) -> None:
    print(line, flush=True)


COMMANDS = {"target": make_target, "data": make_data, "train": train, "run": run, "table": table}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.smollm2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("target", help="a GGUF file as a plain model folder")
    made.add_argument("--gguf", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True, help="a new folder")
    data = commands.add_parser("data", help="conversations, made by the target itself")
    data.add_argument("--num", type=int, default=18_000, help="conversations (default: 18000)")
    data.add_argument("--heldout", type=int, default=512, help="of them, not trained on (default: 512)")
    data.add_argument("--exclude", type=Path, nargs="*", default=[], help="prompt files whose near-copies are dropped")
    trained = commands.add_parser("train", help="one arm, as a drafter's folder")
    trained.add_argument("--arm", default="domino")
    compared = commands.add_parser("run", help="all arms, trained and measured")
    compared.add_argument("--arms", help="some of them, with commas between; ARM/SEED is one run (default: all)")
    compared.add_argument("--seeds", type=int, default=3, help="of the arms that are compared (default: 3)")
    compared.add_argument("--work", type=Path, default=Path("runs/smollm2-arms"), help="for the drafters' weights")
    compared.add_argument("--minutes", type=float, default=math.inf, help="after which no training is begun")
    compared.add_argument("--no-speed", action="store_true", help="leave that to a call with the card to itself")
    compared.add_argument("--plan", action="store_true", help="say how long it will take, and stop")
    told = commands.add_parser("table", help="a result's tables, as Markdown")
    told.add_argument("--out", type=Path, required=True, help="the result of `run`")
    for command in (data, compared):
        command.add_argument("--parallel", type=int, default=1, help="processes, over all cards (default: 1)")
    for command in (data, trained):
        command.add_argument("--seed", type=int, default=0)
    for command in (trained, compared):
        command.add_argument("--data", type=Path, required=True, help="file of `data`")
        command.add_argument("--eval", type=Path, help="a folder with benchmark prompts (.jsonl)")
        command.add_argument("--steps", type=int, help="of all arms but the published setting")
    for command in (data, trained, compared):
        command.add_argument("--target", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--device", default="auto", help="cuda where there is one")
        command.add_argument("--tiny", action="store_true", help="sizes for a trial on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(run_job(main))
