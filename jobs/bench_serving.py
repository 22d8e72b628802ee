"""vLLM under load, plain and with drafters: tokens/s, time to the first token, time between tokens, τ.

    python -m jobs.bench serving --target MODEL --drafter DOMINO --dflash DFLASH --prompts FILE_OR_FOLDER
    python -m jobs.bench serving --shapes qwen3_8b --tau 3.87,7.17      random weights, acceptance imposed by vLLM

Arms: plain, ngram (vLLM's prompt lookup), dflash, domino; with --shapes: plain, and both drafters at each τ, every
draft right with the same chance. They run one after the other, each in an engine of its own, at every --concurrency.
"speedup" is tokens/s over plain's at the same concurrency. VLLM_USE_V2_MODEL_RUNNER chooses vLLM's model runner; ngram
runs in the first, which alone has it. The file is written after every line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.bench_decode import SHAPE_NAMES, Report, check_positions

if TYPE_CHECKING:
    from pipelines.bench_serving import Prompt, ServingPlan

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SHARED_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
SHARED_SIZES += ("num_key_value_heads", "head_dim")


def bench_serving(argv: Sequence[str]) -> int:
    """The command. ValueError for a flag that cannot be meant, before anything is measured."""
    args = _parser().parse_args(argv)
    concurrency = tuple(int(text) if text.isdecimal() else 0 for text in args.concurrency.split(","))
    if min(concurrency) < 1 or len(set(concurrency)) < len(concurrency):
        raise ValueError(f"--concurrency {args.concurrency}: expected numbers above 0, each once")
    if min(args.max_tokens, args.prompt_tokens) <= 0 or not 0 < args.seconds < math.inf:
        raise ValueError("--seconds, --max-tokens and --prompt-tokens must be above 0")
    if args.graph_tokens is not None and (args.graph_tokens < 1 or args.eager):
        raise ValueError(f"--graph-tokens {args.graph_tokens}: expected a number above 0, and no --eager")
    if not 0 <= args.temperature <= 2:
        raise ValueError(f"--temperature {args.temperature:g}: expected 0 to 2")
    if (args.shapes is None) == (args.target is None):
        raise ValueError("give --target and its drafters, or --shapes")
    if args.shapes is not None and args.shapes not in SHAPE_NAMES:
        raise ValueError(f"--shapes {args.shapes}: expected one of {', '.join(SHAPE_NAMES)}")
    with tempfile.TemporaryDirectory(prefix="domino-bench-") as scratch:
        make = _imposed if args.shapes else _real
        plan, arms = make(args, concurrency, Path(scratch))
        # Where this machine keeps its files is nobody else's business.
        told = [Path(word).name if os.sep in word and Path(word).exists() else word for word in argv]
        command = shlex.join(["python", "-m", "jobs.bench", "serving", *told])
        report = Report(command, [args.shapes] if args.shapes else [], args.out, headline=lambda result: {})
        target = args.shapes or (Path(args.target).name if Path(args.target).is_dir() else args.target)
        report.result |= {"settings": _settings(plan, arms) | {"target": target}, "arms": {}}
        for name, speculative in arms.items():
            report.measure(name, lambda name=name, speculative=speculative: _measure(report, plan, name, speculative))
    return 1 if report.result["errors"] else 0


def _measure(report: Report, plan: ServingPlan, name: str, speculative: dict[str, Any] | None) -> None:
    from pipelines.bench_serving import serve_arm

    table = report.result["arms"].setdefault(name, {})
    plain = report.result["arms"].get("plain", {})
    for clients, found in serve_arm(plan, speculative):
        if clients == "start":
            report.result.setdefault("start_seconds", {})[name] = found["seconds"]
            continue
        base = plain.get(clients, {}).get("tokens_per_s")
        found["speedup"] = found["tokens_per_s"] / base if base else None
        table[clients] = found
        report.write()
        waits = "   ".join(f"{key} {found[key]:.1f}" for key in ("ttft_p50_ms", "itl_p99_ms") if found[key] is not None)
        rate = f"{found['tokens_per_s']:9.1f} tokens/s" + (f"  ×{found['speedup']:.2f}" if base else "")
        print(f"{name:18} {clients:>3} clients {rate}   τ {found['tau']:.2f}   {waits}", flush=True)


def _settings(plan: ServingPlan, arms: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """What was measured, without the prompts and without where this machine keeps its files."""
    told = asdict(plan) | {"prompts": len(plan.prompts)}
    named = {
        name: each | {"model": Path(each["model"]).name} if each and "model" in each else each
        for name, each in arms.items()
    }
    runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "vLLM's choice")
    return told | {"arms": named, "VLLM_USE_V2_MODEL_RUNNER": runner}


def _real(
    args: argparse.Namespace, concurrency: tuple[int, ...], scratch: Path
) -> tuple[ServingPlan, dict[str, dict[str, Any] | None]]:
    """Trained drafters on prompts, greedy or at --temperature; requests end where the target says so."""
    from domino_core.checkpoint import read_config
    from domino_core.target import read_target_config, resolve_model

    if args.tau is not None:
        raise ValueError("--tau is imposed with --shapes; trained drafters have their own")
    if args.prompts is None:
        raise ValueError("--target needs --prompts: a file of prompts, or a folder of such files")
    folder = resolve_model(args.target)
    target, prompts = read_target_config(folder), _prompts(args.prompts, str(folder))
    check_positions("--prompts and --max-tokens", _room(args, max(map(len, prompts))), target)
    arms: dict[str, dict[str, Any] | None] = {"plain": None, "ngram": NGRAM}
    for name, drafter in (("dflash", args.dflash), ("domino", args.drafter)):
        if drafter is not None:
            if read_config(drafter).head != (name == "domino"):
                other = "has none: it is --dflash" if name == "domino" else "has one: it is --drafter"
                raise ValueError(f"{drafter}: by its head a drafter is Domino, and this one {other}")
            arms[name] = _speculative(drafter, target)
    plan = _plan(args, str(folder), prompts, concurrency, ends=True)
    return plan, _chosen(args, arms)


def _imposed(
    args: argparse.Namespace, concurrency: tuple[int, ...], scratch: Path
) -> tuple[ServingPlan, dict[str, dict[str, Any] | None]]:
    """Random weights of real shapes; vLLM's verification accepts as many drafts as --tau says on average."""
    import torch

    from domino_core.published_config import to_published
    from domino_core.target import read_target_config
    from pipelines.bench_features import write_config
    from pipelines.bench_shapes import SHAPES
    from pipelines.imposed import survival

    if args.target or args.drafter or args.dflash or args.prompts:
        raise ValueError("--shapes has random weights: leave out --target, --drafter, --dflash and --prompts")
    names = args.arms.split(";") if args.arms else []
    if names != ["plain"] and not torch.cuda.is_available():
        raise ValueError("--shapes: vLLM imposes acceptance on a GPU only; here, --arms plain can be measured")
    target, drafter = SHAPES[args.shapes].target, SHAPES[args.shapes].drafter
    if args.shapes == "tiny":  # the heads of the other tiny shapes are too narrow for vLLM
        target = read_target_config("assets/tiny-qwen3")
        drafter = replace(
            drafter,
            **{name: getattr(target, name) for name in SHARED_SIZES},
            num_target_layers=target.num_hidden_layers,
        )
    check_positions("--prompt-tokens and --max-tokens", _room(args, args.prompt_tokens), target)
    write_config(scratch / "target", target)
    arms: dict[str, dict[str, Any] | None] = {"plain": None}
    for name, config in (("dflash", replace(drafter, head=False)), ("domino", drafter)):
        (scratch / name).mkdir(exist_ok=True)
        (scratch / name / "config.json").write_text(json.dumps(to_published(config)))
        for tau in _numbers("--tau", args.tau or "7.17"):
            if not 1 <= tau <= 1 + config.num_drafts:
                raise ValueError(f"--tau {tau:g}: this drafter gives 1 to {1 + config.num_drafts}")
            # Not "synthetic_acceptance_length": with fewer drafts (--configured) that would still be reached.
            rates = survival(tau, config.num_drafts)
            imposed = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
            arms[f"{name}, τ {tau:g}"] = _speculative(scratch / name, target) | imposed
    draw = torch.Generator().manual_seed(0)
    made = torch.randint(0, target.vocab_size, (256, args.prompt_tokens), generator=draw).tolist()
    plan = _plan(args, str(scratch / "target"), [tuple(row) for row in made], concurrency, ends=False)
    plan.engine.update(load_format="dummy", skip_tokenizer_init=True)
    return plan, _chosen(args, arms)


def _speculative(folder: str | Path, target: Any) -> dict[str, Any]:
    """vLLM's setting for a drafter with all its drafts. ValueError if it does not fit the target."""
    from domino_core.checkpoint import read_config

    config = read_config(folder)
    config.check_fits(target)
    return {"method": "dflash", "model": str(folder), "num_speculative_tokens": config.num_drafts}


def _plan(
    args: argparse.Namespace, target: str, prompts: Sequence[Prompt], concurrency: tuple[int, ...], *, ends: bool
) -> ServingPlan:
    import torch

    from pipelines.bench_serving import ServingPlan
    from serve.vllm_flags import CPU_CACHE_BYTES

    gpu = torch.cuda.is_available()
    engine: dict[str, Any] = {
        "dtype": "bfloat16" if gpu else "float32",
        "max_model_len": _room(args, max(map(len, prompts))),
        "max_num_seqs": max(concurrency),
        "enforce_eager": args.eager or not gpu,
    }
    if not gpu:
        engine["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    if args.graph_tokens is not None:
        engine["compilation_config"] = {"max_cudagraph_capture_size": args.graph_tokens}
    return ServingPlan(
        target=target,
        prompts=tuple(prompts),
        concurrency=concurrency,
        max_tokens=args.max_tokens,
        seconds=args.seconds,
        warm_seconds=args.seconds / 5,
        temperature=args.temperature,
        ends=ends,
        engine=engine,
    )


def _room(args: argparse.Namespace, longest: int) -> int:
    """Positions of a request: vLLM drafts for nobody while a block does not fit."""
    return longest + args.max_tokens + 32


def _prompts(path: Path, target: str) -> list[Prompt]:
    """Rendered prompts of a file, or of all files of a folder, in an order that mixes them."""
    from domino_core.target import load_tokenizer
    from pipelines.evaluate import EvalConfig, held_out_prompts

    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"--prompts {path}: no prompt file (.jsonl) is there")
    tokenizer, most = load_tokenizer(target), EvalConfig(num_prompts=1000)
    prompts = [prompt for file in files for prompt in held_out_prompts(file, tokenizer, most)]
    random.Random(0).shuffle(prompts)
    return prompts


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{flag} {text}: expected numbers with commas between") from error


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{flag} {text}: expected a JSON object")
    return found


def _configured(arm: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The arm with more settings. Imposed rates are one a draft, so fewer drafts have fewer of them."""
    found, drafts = arm | more, more.get("num_speculative_tokens")
    if "synthetic_acceptance_rates" in arm and isinstance(drafts, int):
        found["synthetic_acceptance_rates"] = arm["synthetic_acceptance_rates"][:drafts]
    return found


def _chosen(args: argparse.Namespace, arms: dict[str, dict[str, Any] | None]) -> dict[str, dict[str, Any] | None]:
    """The arms that are asked for, out of these and the configured ones beside them."""
    if args.configured is not None:
        more = _json_object("--configured", args.configured)
        named = [(name, each) for name, each in arms.items() if each and name.startswith("domino")]
        arms = arms | {f"{name}, configured": _configured(each, more) for name, each in named}
    names = args.arms.split(";") if args.arms else list(arms)
    if unknown := [name for name in names if name not in arms]:
        raise ValueError(f"--arms {'; '.join(unknown)}: expected some of {'; '.join(arms)}")
    return {name: arms[name] for name in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model folder or Hub id")
    parser.add_argument("--drafter", type=Path, help="a Domino drafter's folder")
    parser.add_argument("--dflash", type=Path, help="the folder of a drafter that was trained as DFlash")
    parser.add_argument("--prompts", type=Path, help="prompts (.jsonl), or a folder of such files")
    parser.add_argument("--shapes", help=f"random weights instead: one of {','.join(SHAPE_NAMES)}")
    parser.add_argument("--tau", help="of --shapes, with commas between (default: 7.17)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of --shapes (default: 128)")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64", help="clients, a line of the table each")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured at each concurrency (default: 5)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--arms", help="some of them, with semicolons between (default: all)")
    told = "an arm more for each of Domino's, with more of vLLM's speculative_config (JSON)"
    parser.add_argument("--configured", help=told)
    parser.add_argument("--eager", action="store_true", help="without vLLM's compilation and CUDA graphs")
    told = "of the largest step with a CUDA graph (default: vLLM's choice, at most 512 in 0.26.0)"
    parser.add_argument("--graph-tokens", type=int, help=told)
    parser.add_argument("--out", type=Path, help="JSON file to write, after every line")
    return parser
