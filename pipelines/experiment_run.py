"""The whole experiment: arms × seeds, each trained and measured by some process, results kept after every one.

result["runs"]["domino/0"]   one training: τ on every prompt set and temperature, seconds, the last log line
result["speed"]["domino"]    of one seed, with nothing else on the card: tokens/s, speed-up, ms to draft a block
result["arms"]["domino"]     what is quoted: τ over the seeds with its interval, by position, by set
"""

from __future__ import annotations

import collections
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from domino_core.memory import free_bytes
from domino_core.target import load_target, load_tokenizer, target_hash
from domino_core.target_model import Target, TargetConfig
from pipelines.bench_shapes import layer_matrices
from pipelines.experiment_arms import Arm, Scale, make_arms
from pipelines.experiment_batches import KnownRows
from pipelines.experiment_data import Conversations, check_made_for, read_conversations, unused_token
from pipelines.experiment_measure import (
    MeasurePlan,
    Prompt,
    draft_ms,
    measure_speed,
    measure_tau,
    read_eval_prompts,
    speed_prompts,
    tau_prompts,
)
from pipelines.experiment_pool import processes
from pipelines.experiment_summary import HELDOUT, summarise
from pipelines.experiment_train import for_drafting, new_model, train_arm
from pipelines.training_work import step_work

SEVERAL_SEEDS = ("dflash", "domino_no_curriculum", "domino", "dflash_muon_8", "domino_muon_8")
KNOWN_SHARE = 0.35  # of a card's free memory, for what the target says of the rows: two processes find room
RATE = 2.5e14  # operations a second that shapes this small get of an H100
STEP_SECONDS, START_SECONDS, MEASURE_SECONDS = 0.02, 20.0, 40.0  # launches; compiling, on average; τ of all sets


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What all runs share. work: a folder for the weights, of which speed is measured."""

    target: str
    data: str
    work: str
    eval_folder: str | None = None
    device: str = "cpu"
    scale: Scale = field(default_factory=Scale)
    measure: MeasurePlan = field(default_factory=MeasurePlan)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a process loads once."""

    target: Target
    data: Conversations
    arms: dict[str, Arm]
    sets: dict[str, list[Prompt]]
    known: KnownRows


@lru_cache(maxsize=1)
def open_setting(plan: RunPlan) -> Setting:
    """Read everything that a plan names. ValueError for what does not fit."""
    data, tokenizer = read_conversations(plan.data), load_tokenizer(plan.target)
    target = load_target(plan.target, device=torch.device(plan.device))
    check_made_for(Path(plan.data), data, target.config.vocab_size, target_hash(plan.target))
    special = list(tokenizer.added_tokens_decoder)
    mask = unused_token(data, special, target.config.vocab_size, len(tokenizer))
    sets = {HELDOUT: data.heldout_prompts}
    if plan.eval_folder:
        others = read_eval_prompts(Path(plan.eval_folder), tokenizer)
        if HELDOUT in others:
            raise ValueError(f"--eval {plan.eval_folder}: {HELDOUT}.jsonl has the name of the data's own; rename it")
        sets |= others
    free = free_bytes(target.device)
    known = KnownRows(None if free is None else int(KNOWN_SHARE * free))
    return Setting(target=target, data=data, arms=make_arms(target.config, mask, plan.scale), sets=sets, known=known)


def check_runs(setting: Setting, wanted: Sequence[tuple[str, int]], measure: MeasurePlan) -> None:
    """ValueError for what would end a run of these arms and seeds only once it has begun."""
    tau_prompts(setting.sets, setting.target, measure)
    speed_prompts(setting.sets[HELDOUT], setting.target, measure)
    for name, seed in wanted:
        setting.data.share(setting.arms[name].data_share)
        replace(setting.arms[name].train, seed=seed)


def run_one(plan: RunPlan, name: str, seed: int) -> dict[str, Any]:
    """Train an arm from a seed and measure it."""
    setting = open_setting(plan)
    arm, target = setting.arms[name], setting.target
    _compile_for(arm.drafter.block_size)
    trained = train_arm(arm, target, setting.data, seed, known=setting.known, folder=plan.target)
    drafter = for_drafting(trained.model, target)
    weights = weights_file(plan, name, seed)
    weights.parent.mkdir(parents=True, exist_ok=True)
    save_file(drafter.state_dict(), weights)
    started = time.perf_counter()
    found = measure_tau(target, drafter, setting.sets, plan.measure)
    return {
        "tau": found,
        "parameters": trained.num_parameters,
        "training_seconds": trained.seconds,
        "measuring_seconds": time.perf_counter() - started,
        "steps": trained.progress.step,
        "skipped_steps": trained.progress.skipped,
        "curve": [
            {key: line[key] for key in ("step", "final_loss", "base_loss", "final_accepted", "base_accepted")}
            for line in trained.progress.history
        ],
        "settings": asdict(arm),
        "weights": _digest(weights),
    }


@lru_cache(maxsize=1)
def _compile_for(block_size: int) -> None:
    """Arms of one block size share what was compiled; of others torch would keep only so many before it gives up."""
    torch.compiler.reset()


def run_all(
    plan: RunPlan,
    wanted: Sequence[tuple[str, int]],
    result: dict[str, Any],
    keep: Callable[[], None],
    *,
    parallel: int = 1,
    seconds: float = math.inf,
    with_speed: bool = True,
) -> Iterator[str]:
    """Fill `result`, calling keep() after every piece; yields a line for each. What is there already is not repeated.

    wanted: arms and seeds, in the order in which they are begun.
    Speed is measured last, when no other process is on the card. seconds: after which no training is begun.
    """
    runs, until, failed = result.setdefault("runs", {}), time.monotonic() + seconds, list[Exception]()
    missing = [(name, seed) for name, seed in wanted if f"{name}/{seed}" not in runs]
    for name, seed, found in _run_some(plan, missing, parallel, until):
        if isinstance(found, Exception):
            failed.append(found)
            yield f"{name}/{seed} failed: {type(found).__name__} {found}"
            continue
        runs[f"{name}/{seed}"] = found
        summarise(result)
        keep()
        taus = ", ".join(f"{key} {value['tau']:.3f}" for key, value in found["tau"].items())
        yield f"{name}/{seed}: {found['training_seconds']:.0f} s, τ {taus}"
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(missing)} runs failed; the same command repeats them (less --parallel, less memory)"
        ) from failed[0]
    if not with_speed or time.monotonic() > until:
        return
    speed = result.setdefault("speed", {})
    kept: dict[str, int] = {}  # the first seed of each arm whose weights are there
    for name, seed in wanted:
        if name not in speed and _has_weights(plan, name, seed, runs):
            kept.setdefault(name, seed)
    if kept:
        speed |= speeds(plan, kept)
        summarise(result)
        keep()
        yield ", ".join(f"{name} ×{speed[name]['speedup']:.2f}" for name in kept)


def _run_some(
    plan: RunPlan, missing: Sequence[tuple[str, int]], parallel: int, until: float
) -> Iterator[tuple[str, int, dict[str, Any] | Exception]]:
    """Runs as they end, or why they did, none of which began after `until`. One that fails, as where a card is too
    small for so many at a time, does not end the others.
    """
    left = collections.deque(missing)
    with processes(parallel) as pool:
        running: dict[Future[dict[str, Any]], tuple[str, int]] = {}
        while True:
            while left and len(running) < parallel and time.monotonic() < until:
                name, seed = left.popleft()
                if pool is None:
                    yield name, seed, _found_by(partial(run_one, plan, name, seed))
                else:
                    running[pool.submit(run_one, plan, name, seed)] = name, seed
            if not running:
                return
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                yield *running.pop(each), _found_by(each.result)


def _found_by(run: Callable[[], dict[str, Any]]) -> dict[str, Any] | Exception:
    """BrokenExecutor is raised: with a process that died, its pool did."""
    try:
        return run()
    except BrokenExecutor:
        raise
    except Exception as error:  # told by its run's name, and raised once the others have ended
        return error


def speeds(plan: RunPlan, seeds: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Of arms, each by the kept weights of one seed, and of plain decoding."""
    setting = open_setting(plan)
    target, drafters = setting.target, {}
    for name, seed in seeds.items():
        model = for_drafting(new_model(setting.arms[name], target, seed), target)
        model.load_state_dict(load_file(weights_file(plan, name, seed)))
        drafters[name] = model
    found = measure_speed(target, drafters, setting.sets[HELDOUT], plan.measure)
    for name, drafter in drafters.items():
        found[name]["draft_ms"] = draft_ms(target, drafter, plan.measure)
    return found


def planned(names: Sequence[str], seeds: int) -> list[tuple[str, int]]:
    """(arm, seed), all seeds of the arms that are compared and one of the others; seed 0 of every arm first.

    A name with a slash and a number is that one run of an arm. ValueError for anything else behind a slash.
    """
    pairs: dict[tuple[str, int], None] = {}
    for name in names:
        arm, slash, seed = name.partition("/")
        if slash and not seed.isdecimal():
            raise ValueError(f"arm {name}: a seed, which is a number, comes after the slash")
        seeds_of = [int(seed)] if slash else range(seeds if arm in SEVERAL_SEEDS else 1)
        pairs |= dict.fromkeys((arm, each) for each in seeds_of)
    return sorted(pairs, key=lambda pair: pair[1])


def estimate_seconds(arm: Arm, target: TargetConfig, tokens_per_row: float) -> float:
    """Of training one arm and measuring it, alone on an H100: operations at RATE, logits in memory, and launches."""
    shape, train = arm.drafter, arm.train
    tokens, blocks = train.batch_size * tokens_per_row, train.batch_size * train.num_anchors
    step = step_work(shape, tokens=tokens, blocks=blocks, context=blocks * tokens_per_row / 2).operations
    asked = 2 * tokens * target.num_hidden_layers * layer_matrices(target)  # of the target; later epochs know it
    moved = blocks * shape.block_size * shape.vocab_size * 2 * (9 if shape.head else 5) / 3e12  # logits at 3 TB/s
    seconds = (step + asked) / RATE + moved + STEP_SECONDS
    return START_SECONDS + MEASURE_SECONDS + (train.steps or 0) * seconds


def weights_file(plan: RunPlan, name: str, seed: int) -> Path:
    return Path(plan.work) / f"{name}-{seed}.safetensors"


def _has_weights(plan: RunPlan, name: str, seed: int, runs: Mapping[str, dict[str, Any]]) -> bool:
    """Whether the weights of a run are where they were put: another result may have used the folder since."""
    file = weights_file(plan, name, seed)
    return file.exists() and runs.get(f"{name}/{seed}", {}).get("weights") == _digest(file)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
