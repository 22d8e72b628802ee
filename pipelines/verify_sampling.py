"""The statistical checks: is what sampling gives distributed as the target says, under every draft rule?

p-values are corrected by the number of tests (Bonferroni). A test that had nothing to tell apart is reported as such.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from domino_core.engine import Request
from domino_core.sampling_params import DraftRule, SamplingParams
from pipelines.evaluate import Prompt
from pipelines.verify_distribution import (
    DistributionTest,
    distribution_test,
    first_token_test,
    most_open,
    same_distribution,
)
from pipelines.verify_models import Check, Models, VerifyConfig

ENUMERATED = SamplingParams(temperature=0.8, top_p=0.97, top_k=100, min_p=0.01)
PENALISED = SamplingParams(
    temperature=0.9,
    min_p=0.02,
    presence_penalty=0.8,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    logit_bias=((3, 1.5),),
)
PROMPT_TOKENS = 24  # of a prompt's beginning are enough to draw behind
SEEDS_APART = 10**9  # so that no two rules draw with the same noise


def distribution(
    models: Models, prompts: Sequence[Prompt], config: VerifyConfig, progress: Callable[[int], object] = lambda _: None
) -> Check:
    """Second and third token of an output, and their pair, under every rule; and the first."""
    check = Check(
        name="distribution", statement="the first tokens of an output are draws from the target's distribution"
    )
    text = most_open(models.target, _beginnings(prompts), ENUMERATED, config.draws)
    first = first_token_test(models.target, text[:-1], ENUMERATED, max(1, config.draws // 10))
    tests: dict[str, DistributionTest] = {}
    for index, rule in enumerate(get_args(DraftRule)):
        params = replace(ENUMERATED, rule=rule, seed=(index + 1) * SEEDS_APART)
        tests[rule] = distribution_test(
            models.target, models.drafter, text, params, draws=config.draws, rows=config.draw_rows, progress=progress
        )
        if not tests[rule].tells:
            check.untested.append(
                f"{rule}: {min(tests[rule].bins)} outcomes, {tests[rule].accepted:.0%} of first drafts accepted"
            )
    p_values = {"first token": first[0]}
    for rule, test in tests.items():
        names = ("second token", "third token", "pair")
        p_values |= {f"{rule}, {name}": p for name, p in zip(names, test.p_values, strict=True)}
    check.figures = {
        "draws": config.draws * len(tests),
        "first_token_draws": max(1, config.draws // 10),
        "settings": {name: getattr(ENUMERATED, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        "bins": {"first token": first[1]} | {rule: test.bins for rule, test in tests.items()},
        "first_draft_accepted": {rule: test.accepted for rule, test in tests.items()},
    }
    return _judge(check, p_values, config)


def rejection_positions(models: Models, prompts: Sequence[Prompt], config: VerifyConfig) -> Check:
    """Where enumeration ends: whole blocks of rejection sampling against plain decoding, under seeds of their own.

    Every position of an output, and every pair of neighbours, as two samples that must come from one distribution.
    """
    check = Check(
        name="rejection sampling, later positions",
        statement="every position of an output is distributed as in plain decoding, with penalties and bias too",
    )
    p_values: dict[str, float] = {}
    text = most_open(models.target, _beginnings(prompts), ENUMERATED, config.samples)
    length = models.drafter.config.num_drafts + 2
    for name, params in (("plain", ENUMERATED), ("penalised", PENALISED)):
        plain, _ = _sample(models, text[:-1], params, length, config, drafted=False)
        ours, accepted = _sample(models, text[:-1], params, length, config, drafted=True)
        check.figures[f"tau, {name}"] = accepted
        if accepted == 1.0:
            check.untested.append(f"{name}: no draft was accepted")
        for place in range(length):
            one, other = ([tokens[place] for tokens in outputs] for outputs in (plain, ours))
            p_values[f"{name}, token {place}"] = same_distribution(one, other)[0]
            if place:
                size = models.target.config.vocab_size
                pairs = ([t[place - 1] * size + t[place] for t in outputs] for outputs in (plain, ours))
                p_values[f"{name}, tokens {place - 1} and {place}"] = same_distribution(*_ranked(*pairs))[0]
    check.figures |= {"samples": 2 * config.samples, "length": length}
    return _judge(check, p_values, config)


def _sample(
    models: Models, prompt: Sequence[int], params: SamplingParams, length: int, config: VerifyConfig, *, drafted: bool
) -> tuple[list[list[int]], float]:
    """(the outputs of config.samples requests that differ in their seeds, acceptance length)."""
    first = 8 * SEEDS_APART if drafted else 9 * SEEDS_APART
    rule: DraftRule = "rejection" if drafted else "shared_noise"
    requests = [
        Request(prompt_ids=tuple(prompt), max_tokens=length, sampling=replace(params, rule=rule, seed=first + number))
        for number in range(config.samples)
    ]
    found = models.speculative(requests, config.draw_rows) if drafted else models.plain(requests, config.draw_rows)
    rounds = sum(each.acceptance.rounds for each in found)
    return [each.tokens for each in found], 1 + sum(each.acceptance.accepted for each in found) / max(1, rounds)


def _ranked(one: Sequence[int], other: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same outcomes under small numbers."""
    rank = {value: index for index, value in enumerate(sorted({*one, *other}))}
    return [rank[value] for value in one], [rank[value] for value in other]


def _judge(check: Check, p_values: dict[str, float], config: VerifyConfig) -> Check:
    number = len(p_values)
    for name, p in p_values.items():
        if p * number < config.significance:
            check.defects.append(f"{name}: corrected p = {p * number:.3g}")
    corrected: dict[str, Any] = {"tests": number, "min_corrected_p": min(1.0, number * min(p_values.values()))}
    check.figures |= corrected | {"p_values": p_values}
    return check


def _beginnings(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [prompt[:PROMPT_TOKENS] for prompt in prompts]
