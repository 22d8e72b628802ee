"""What a drafter of the experiment gives: τ over prompts by position and context, cost of a draft, end-to-end speed.

τ is that of pipelines.evaluate: tokens per round, pooled over all rounds, before stop and length cuts.

B rows · Q drafts
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from domino_core.decode import Acceptance, RoundShape, draft_block
from domino_core.decode_state import DecodeState, prefill
from domino_core.drafter import Drafter
from domino_core.engine import Engine, Request
from domino_core.fused_drafter import FusedDrafter
from domino_core.sampling import RowSampling
from domino_core.sampling_params import SamplingParams
from domino_core.target import render_chat
from domino_core.target_model import Target
from pipelines.bench_parts import synchronize

Prompt = tuple[int, ...]
BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of tokens before a round, each up to this many


@dataclass(frozen=True, kw_only=True)
class MeasurePlan:
    """How much is decoded."""

    max_tokens: int = 256
    max_rows: int = 128  # at once, where τ is measured
    most_prompts: int = 512  # of a set
    temperatures: tuple[float, ...] = (0.0, 1.0)
    speed_prompts: int = 16  # one after the other
    speed_tokens: int = 128
    speed_repeats: int = 3
    draft_context: int = 256
    draft_repeats: int = 50


def measure_tau(
    target: Target, drafter: Any, sets: dict[str, list[Prompt]], plan: MeasurePlan
) -> dict[str, dict[str, Any]]:
    """Of each set of prompts and each temperature, as "set/T0": see _acceptance."""
    sets = tau_prompts(sets, target, plan)
    longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
    engine = Engine(
        target,
        drafter,
        max_rows=min(plan.max_rows, max(map(len, sets.values()))),
        max_length=longest + plan.max_tokens,
    )
    return {
        f"{name}/T{temperature:g}": _acceptance(engine, _requests(target, prompts, plan.max_tokens, temperature))
        for name, prompts in sets.items()
        for temperature in plan.temperatures
    }


def _acceptance(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    """τ of all rounds, the share of rounds that accept at least 1..Q drafts, and τ by the context's length."""
    engine.acceptance = Acceptance()
    length_of = {engine.add(request): len(request.prompt_ids) for request in requests}
    before: dict[int, Acceptance] = {}
    by_context: dict[int, Acceptance] = {}
    while engine.has_work:
        for output in engine.step():
            seen = before.get(output.request_id, Acceptance())
            if output.acceptance.rounds > seen.rounds:
                bucket = next((end for end in BUCKETS if length_of[output.request_id] <= end), BUCKETS[-1])
                counts = by_context.setdefault(bucket, Acceptance())
                counts.count(output.acceptance.drafted - seen.drafted, output.acceptance.accepted - seen.accepted)
            before[output.request_id] = output.acceptance
            length_of[output.request_id] += len(output.tokens)
    found = engine.acceptance
    return {
        "tau": found.tau,
        "tau_by_position": [count / max(1, found.rounds) for count in found.accepted_at],
        "tau_by_context": {end: {"tau": c.tau, "rounds": c.rounds} for end, c in sorted(by_context.items())},
        "rounds": found.rounds,
        "prompts": len(requests),
    }


def measure_speed(
    target: Target, drafters: dict[str, Any], prompts: Sequence[Prompt], plan: MeasurePlan
) -> dict[str, dict[str, float]]:
    """One request after the other, greedy: every drafter and plain decoding ("plain") in turns, medians.

    speed_tau: of these requests, whose answers are shorter than those that τ is measured on.
    """
    prompts = speed_prompts(prompts, target, plan)
    arms = {"plain": None, **drafters}
    engines = {
        name: Engine(target, drafter, max_rows=1, max_length=max(map(len, prompts)) + plan.speed_tokens)
        for name, drafter in arms.items()
    }
    requests = _requests(target, prompts, plan.speed_tokens, 0.0)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    tokens: dict[str, int] = {}
    for repeat in range(plan.speed_repeats + 1):
        for name, engine in engines.items():
            synchronize(target.device)
            started = time.perf_counter()
            tokens[name] = sum(len(each.tokens) for each in engine.generate(requests))
            synchronize(target.device)
            if repeat:  # the first pass compiles, and captures graphs
                seconds[name].append(time.perf_counter() - started)
    rates = {name: tokens[name] / statistics.median(seconds[name]) for name in arms}
    taus = {name: engine.acceptance.tau for name, engine in engines.items()}
    return {
        name: {"tokens_per_s": rate, "speedup": rate / rates["plain"], "speed_tau": taus[name]}
        for name, rate in rates.items()
    }


@torch.inference_mode()
def draft_ms(target: Target, drafter: Any, plan: MeasurePlan) -> float:
    """Milliseconds that drafting one block for one row takes, as the engine does it: on a card a CUDA graph."""
    drafter = FusedDrafter(drafter) if isinstance(drafter, Drafter) else drafter
    state = DecodeState.allocate(target, drafter, 1, plan.draft_context + 1)
    sampling = RowSampling.stack([SamplingParams()], target.device)
    prompt = [index % target.config.vocab_size for index in range(plan.draft_context)]
    prefill(target, drafter, state, 0, prompt, sampling)
    num_drafts = drafter.config.num_drafts
    shape = RoundShape(1, num_drafts, plan.draft_context + num_drafts + 1)

    def draft() -> None:
        draft_block(drafter, state, sampling, None, shape)

    draft()
    run: Callable[[], None] = draft
    if target.device.type == "cuda":
        draft()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draft()
        run = graph.replay
    times: list[float] = []
    for _ in range(plan.draft_repeats):
        synchronize(target.device)
        started = time.perf_counter()
        run()
        synchronize(target.device)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def read_eval_prompts(folder: Path, tokenizer: Any) -> dict[str, list[Prompt]]:
    """The rendered first turns of every .jsonl file of a folder with benchmark prompts, by its name."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"--eval {folder}: no .jsonl file is there; give a folder with benchmark prompts")
    found: dict[str, list[Prompt]] = {}
    for file in files:
        # Bytes end lines at line feeds; text would also at characters that JSON leaves as they are.
        lines = [(number, line) for number, line in enumerate(file.read_bytes().splitlines(), 1) if line.strip()]
        found[file.stem] = [_first_turn(f"--eval {file}, line {number}", line, tokenizer) for number, line in lines]
    return found


def _first_turn(where: str, line: bytes, tokenizer: Any) -> Prompt:
    try:  # the boundary: any file may have been named
        return tuple(render_chat(tokenizer, json.loads(line)["messages"][:1]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} is no row with messages ({type(error).__name__}: {error})") from error


def tau_prompts(sets: dict[str, list[Prompt]], target: Target, plan: MeasurePlan) -> dict[str, list[Prompt]]:
    """What τ is measured on. ValueError for a set without any."""
    return {
        name: fitting(name, prompts[: plan.most_prompts], target, plan.max_tokens) for name, prompts in sets.items()
    }


def speed_prompts(heldout: Sequence[Prompt], target: Target, plan: MeasurePlan) -> list[Prompt]:
    """What speed is measured on. ValueError if there is none."""
    return fitting("speed", heldout[: plan.speed_prompts], target, plan.speed_tokens)


def fitting(name: str, prompts: Sequence[Prompt], target: Target, max_tokens: int) -> list[Prompt]:
    """Those that leave room for an answer. ValueError if none does."""
    kept = [prompt for prompt in prompts if len(prompt) + max_tokens <= target.config.max_position_embeddings]
    if not kept:
        raise ValueError(f"{name}: none of {len(prompts)} prompts leaves room for {max_tokens} tokens of answer")
    return kept


def _requests(target: Target, prompts: Sequence[Prompt], max_tokens: int, temperature: float) -> list[Request]:
    return [
        Request(
            prompt_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=number),
            stop_token_ids=target.config.eos_token_ids,
        )
        for number, prompt in enumerate(prompts)
    ]
