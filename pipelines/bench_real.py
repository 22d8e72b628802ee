"""A trained drafter on held-out prompts, end to end and greedy: this engine plain, with the drafter, and transformers.

Every output is compared with plain decoding's. This engine's are the same; those of transformers, whose kernels round
in another order, may part in bfloat16 where two tokens nearly tie.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from domino_core.checkpoint import read_config
from domino_core.engine import Engine, Request
from domino_core.fused_drafter import FusedDrafter
from domino_core.target import load_tokenizer, read_target_config, resolve_model
from pipelines.bench_parts import synchronize
from pipelines.evaluate import EvalConfig, Prompt, held_out_prompts, load_arms


@dataclass(frozen=True, kw_only=True)
class RealPlan:
    """What is decoded. transformers decodes the first few prompts only, once: it takes seconds where we take tenths."""

    target: str
    prompts: str
    drafter: str
    num_prompts: int = 16
    max_tokens: int = 128
    repeats: int = 3
    transformers_prompts: int = 6

    def check(self) -> None:
        """ValueError where the drafter does not fit or a file is missing."""
        read_config(self.drafter).check_fits(read_target_config(self.target))
        if not Path(self.prompts).is_file():
            raise ValueError(f"{self.prompts}: no such prompt file; give --prompts FILE")
        held_out_prompts(self.prompts, load_tokenizer(self.target), EvalConfig(num_prompts=1))


POOLS = (16, 64, 256)  # candidates per slot, on a card

Pass = tuple[float, list[list[int]]]
"""Seconds, and the output tokens of every prompt."""


def real_table(plan: RealPlan, device: torch.device) -> dict[str, dict[str, Any]]:
    """Figures in the type in which models are served there: bfloat16 on a GPU, float32 on a CPU."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    return {dtype: _measure(plan, device, dtype)}


def _measure(plan: RealPlan, device: torch.device, dtype: Any) -> dict[str, Any]:
    config = EvalConfig(num_prompts=plan.num_prompts, device=str(device), dtype=dtype)
    target, drafter, prompts = load_arms(plan.drafter, plan.target, plan.prompts, config)
    length = max(map(len, prompts)) + plan.max_tokens
    engines = {
        "plain": Engine(target, None, max_rows=1, max_length=length),
        "domino": Engine(target, drafter, max_rows=1, max_length=length),
    }
    stop = target.config.eos_token_ids
    requests = [Request(prompt_ids=each, max_tokens=plan.max_tokens, stop_token_ids=stop) for each in prompts]
    passes: dict[str, list[Pass]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.warm_up()
        _generate(engine, requests[:1])
    for _ in range(plan.repeats):
        for name, engine in engines.items():
            passes[name].append(_generate(engine, requests))
    table = {name: _figures(found) for name, found in passes.items()}
    plain = passes["plain"][-1][1]
    few = prompts[: plan.transformers_prompts]
    theirs = _transformers_pass(plan, few, stop, device, dtype)
    table["transformers"] = _figures([theirs])
    for name, outputs in (("domino", passes["domino"][-1][1]), ("transformers", theirs[1])):
        table[name]["outputs"] = len(outputs)
        table[name]["identical"] = sum(own == other for own, other in zip(outputs, plain, strict=False))
        table[name]["speedup"] = table[name]["tokens_per_s"] / table["plain"]["tokens_per_s"]
    if device.type == "cuda":
        for pool in POOLS:
            pooled = Engine(target, drafter, max_rows=1, max_length=length)
            assert isinstance(pooled.drafter, FusedDrafter)
            if pooled.drafter.head is not None:
                pooled.drafter.head.pool = pool
            pooled.warm_up()
            found = _generate(pooled, requests)
            table[f"domino, pool of {pool}"] = {
                **_figures([found]),
                "tau": pooled.acceptance.tau,
                "outputs": len(plain),
                "identical": sum(own == other for own, other in zip(found[1], plain, strict=True)),
            }
    table["domino"]["acceptance"] = engines["domino"].acceptance.to_dict()
    table["domino"]["tau"] = engines["domino"].acceptance.tau
    return table


def _generate(engine: Engine, requests: Sequence[Request]) -> Pass:
    """All requests, one after the other."""
    synchronize(engine.target.device)
    started = time.perf_counter()
    completions = engine.generate(requests)
    synchronize(engine.target.device)
    return time.perf_counter() - started, [each.tokens for each in completions]


@torch.inference_mode()
def _transformers_pass(
    plan: RealPlan, prompts: Sequence[Prompt], stop: tuple[int, ...], device: torch.device, dtype: str
) -> Pass:
    """transformers' own greedy generate with its cache, a prompt at a time."""
    from transformers import AutoModelForCausalLM

    folder = resolve_model(plan.target)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.to(device).eval()

    def answer(prompt: Prompt, max_tokens: int) -> list[int]:
        ids_1T = torch.tensor([prompt], device=device)
        said_1T = model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(stop) or None,
            pad_token_id=stop[0] if stop else 0,
        )
        return said_1T[0, len(prompt) :].tolist()

    answer(prompts[0], 8)
    synchronize(device)
    started = time.perf_counter()
    outputs = [answer(prompt, plan.max_tokens) for prompt in prompts]
    synchronize(device)
    return time.perf_counter() - started, outputs


def _figures(passes: Sequence[Pass]) -> dict[str, Any]:
    tokens = sum(map(len, passes[-1][1]))
    return {
        "tokens_per_s": tokens / statistics.median(seconds for seconds, _ in passes),
        "tokens": tokens,
        "seconds": [seconds for seconds, _ in passes],
    }
