"""The experiment's data, made by the target itself: prompts from its user's turn, near-copies dropped, then answers.

Draw i has seed (seed, i), answer i likewise, so the same settings give the same data whatever the processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any

import torch

from domino_core.engine import Engine, Request
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target, load_tokenizer, read_target_config, render_chat, target_hash
from domino_core.target_model import Target
from pipelines.experiment_data import LARGEST_VOCABULARY, Conversation, Conversations
from pipelines.experiment_pool import processes
from pipelines.self_prompts import SelfPromptConfig
from pipelines.self_prompts_filters import Draw, Sieve, statistics
from pipelines.self_prompts_turn import user_turn

SEEDS = 1 << 32  # of one kind of drawing


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """What is made. Prompts are drawn at T = 1, top-p 0.95, answered at `temperature`."""

    target: str
    num: int = 18_000  # conversations, of which
    num_heldout: int = 512
    prompts: SelfPromptConfig = field(default_factory=lambda: SelfPromptConfig(top_p=0.95, max_tokens=256))
    temperature: float = 0.7
    max_tokens: int = 256  # of an answer
    seed: int = 0
    chunk: int = 3000  # requests of one call
    max_rows: int = 384  # decoded together by a process
    parallel: int = 1  # processes, over all cards
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("num", "num_heldout", "max_tokens", "chunk", "max_rows", "parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heldout >= self.num:
            raise ValueError(f"{self.num_heldout} of {self.num} conversations held out leave none to train on")


@dataclass(frozen=True, kw_only=True)
class Call:
    """Requests for one call of a process, and where they go."""

    target: str
    device: str
    max_rows: int
    requests: tuple[Request, ...]


def make_data(plan: DataPlan, tell: Callable[[str], None]) -> tuple[Conversations, dict[str, Any]]:
    """(conversations, what is to be known about them). ValueError if ten draws a prompt are not enough."""
    tokenizer, identity = load_tokenizer(plan.target), target_hash(plan.target)
    vocabulary = read_target_config(plan.target).vocab_size
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(f"{plan.target} has {vocabulary:,} tokens; packed data is for at most {LARGEST_VOCABULARY:,}")
    with processes(plan.parallel) as pool:
        run: Callable[[Iterable[Call]], Iterable[list[tuple[list[int], str]]]] = (
            (lambda calls: map(answer_call, calls)) if pool is None else (lambda calls: pool.map(answer_call, calls))
        )
        sieve = _prompts(plan, tokenizer, run, tell)
        prompts = [tuple(render_chat(tokenizer, [{"role": "user", "content": each.text}])) for each in sieve.kept]
        rows: list[Conversation] = []
        calls = (_answers(plan, prompts, start) for start in range(0, len(prompts), plan.chunk))
        for answers in run(calls):
            asked = prompts[len(rows) : len(rows) + len(answers)]
            rows += [
                Conversation(prompt_ids=prompt, answer_ids=tuple(tokens))
                for prompt, (tokens, _) in zip(asked, answers, strict=True)
            ]
            tell(f"{len(rows):,} of {len(prompts):,} answers")
    settings = {key: value for key, value in asdict(plan).items() if key not in ("parallel", "device", "chunk")}
    counts = {"draws": sieve.num_draws, "kept": len(sieve.kept), **sieve.counts}
    info = {"target_hash": identity, "settings": settings, "prompts": counts}
    info["prompt_statistics"] = statistics(sieve.kept, sieve.counts)
    # A drafter is trained on two adjacent tokens at least; an answer that is empty has one.
    kept = [row for row in rows if len(row.answer_ids) > 1]
    info["answers_dropped_as_empty"] = len(rows) - len(kept)
    if len(kept) <= plan.num_heldout:
        raise ValueError(
            f"{len(kept)} of {len(rows)} answers have two tokens or more: with {plan.num_heldout} held out none is "
            "left to train on; make more conversations"
        )
    return Conversations(rows=tuple(kept), num_heldout=plan.num_heldout), info


def _prompts(plan: DataPlan, tokenizer: Any, run: Callable[..., Any], tell: Callable[[str], None]) -> Sieve:
    turn = user_turn(tokenizer, read_target_config(plan.target).eos_token_ids)
    config = replace(plan.prompts, seed=plan.seed)
    sieve = Sieve(config=config, turn=turn, tokenizer=tokenizer)
    sampling = SamplingParams(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)
    while len(sieve.kept) < plan.num:
        first = sieve.num_draws
        if first >= 10 * max(plan.num, plan.chunk):
            raise ValueError(f"{first:,} draws gave {len(sieve.kept):,} prompts of {plan.num:,}: {dict(sieve.counts)}")
        # As many as should be enough by what was kept so far, in equal parts.
        kept_share = max(0.1, len(sieve.kept) / first) if first else 1.0
        wanted = min(1.05 * (plan.num - len(sieve.kept)) / kept_share, plan.chunk * plan.parallel)
        size = ceil(wanted / plan.parallel)
        starts = [first + index * size for index in range(plan.parallel)]
        calls = [
            Call(
                target=plan.target,
                device=plan.device,
                max_rows=plan.max_rows,
                requests=tuple(
                    Request(
                        prompt_ids=tuple(turn.prefix_ids),
                        max_tokens=config.max_tokens,
                        sampling=replace(sampling, seed=plan.seed * SEEDS + index),
                        stop_token_ids=tuple(turn.stop_ids),
                    )
                    for index in range(start, start + size)
                ),
            )
            for start in starts
        ]
        draws = itertools.chain.from_iterable(run(calls))
        for index, (tokens, reason) in enumerate(draws, start=first):
            if len(sieve.kept) < plan.num:
                sieve.take(Draw(index=index, token_ids=tokens, finish_reason=reason))
        tell(f"{len(sieve.kept):,} prompts of {sieve.num_draws:,} draws")
    return sieve


def _answers(plan: DataPlan, prompts: Sequence[tuple[int, ...]], start: int) -> Call:
    sampling = SamplingParams(temperature=plan.temperature)
    stop = read_target_config(plan.target).eos_token_ids
    requests = tuple(
        Request(
            prompt_ids=prompt,
            max_tokens=plan.max_tokens,
            sampling=replace(sampling, seed=(plan.seed + 1) * SEEDS - 1 - index),
            stop_token_ids=stop,
        )
        for index, prompt in enumerate(prompts[start : start + plan.chunk], start=start)
    )
    return Call(target=plan.target, device=plan.device, max_rows=plan.max_rows, requests=requests)


def answer_call(call: Call) -> list[tuple[list[int], str]]:
    """(tokens, why they ended) of every request, in a process that keeps its target."""
    longest = max(len(each.prompt_ids) + each.max_tokens for each in call.requests)
    engine = Engine(
        _target(call.target, call.device), None, max_rows=min(call.max_rows, len(call.requests)), max_length=longest
    )
    return [(each.tokens, each.finish_reason) for each in engine.generate(call.requests)]


@lru_cache(maxsize=1)
def _target(folder: str, device: str) -> Target:
    return load_target(folder, device=torch.device(device))
