"""Is this drafter lossless with this target? Checks that compare decoding with speculation to decoding without.

Everything goes through the engine that serves. In float32 outputs have to be equal token for token. In bfloat16 passes
of different widths round differently, so outputs may part where the target itself nearly ties: each such place is
looked up, and counted as a near-tie if the scores of the two tokens are closer than a stated bound, else as a defect.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import torch

from domino_core.engine import Completion, Request
from domino_core.sampling_params import DraftRule, SamplingParams
from pipelines.evaluate import Prompt
from pipelines.near_ties import parting, score_gap
from pipelines.verify_models import Check, Models, VerifyConfig, requests_for
from pipelines.verify_sampling import distribution, rejection_positions

SEEDED_RULES: tuple[DraftRule, ...] = ("shared_noise", "greedy_draft")  # whose outputs are plain decoding's
SETTINGS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=1.0, frequency_penalty=0.6),
    SamplingParams(temperature=0.8, repetition_penalty=1.5, logit_bias=((0, 2.0), (1, -100.0))),
    SamplingParams(temperature=0.0, presence_penalty=0.6, logit_bias=((2, 1.5),)),
)
LOGPROB_TOLERANCE = 1e-3  # in float32; two passes of different widths differ by rounding


def verify(
    load: Callable[[torch.dtype], Models],
    prompts: Sequence[Prompt],
    config: VerifyConfig,
    report: Callable[[Check], None] = lambda _: None,
    progress: Callable[[int], object] = lambda _: None,
) -> list[Check]:
    """All checks, each passed to `report` when it is done. load: the models in a type; progress: draws just made."""
    models = load(torch.float32)
    limit = models.target.config.max_position_embeddings - config.max_tokens
    for number, prompt in enumerate(prompts):
        if len(prompt) > limit:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; the target takes {limit} with "
                f"verify.max_tokens={config.max_tokens}: lower that, or use shorter prompts"
            )
    checks: list[Check] = []

    def note(check: Check) -> None:
        checks.append(check)
        report(check)

    note(greedy_identity(models, prompts, config))
    note(seeded_identity(models, prompts, config))
    if config.dtype != "float32":
        served = load(getattr(torch, config.dtype))
        note(greedy_identity(served, prompts, config))
        note(seeded_identity(served, prompts, config))
        # On a card rounding cannot tell passes apart, so the rest is checked as it is served: by graphs and kernels.
        models = served if served.exact else models
    note(ends(models, prompts, config))
    note(logprob_equality(models, prompts, config))
    note(verified_length(models, prompts, config))
    note(batch_invariance(models, prompts, config))
    note(distribution(models, prompts, config, progress))
    note(rejection_positions(models, prompts, config))
    return checks


def greedy_identity(models: Models, prompts: Sequence[Prompt], config: VerifyConfig) -> Check:
    return _identity("greedy identity", models, requests_for(models, prompts, config, [SamplingParams()]), config)


def seeded_identity(models: Models, prompts: Sequence[Prompt], config: VerifyConfig) -> Check:
    """In bfloat16 without truncation: there a token may leave the kept set by a rounding, which is no tie of scores."""
    settings = SETTINGS if models.exact else [each for each in SETTINGS if each.top_p == 1 and not each.min_p]
    ruled = [replace(each, rule=rule) for each in settings for rule in SEEDED_RULES]
    return _identity("seeded identity", models, requests_for(models, prompts, config, ruled), config)


def _identity(name: str, models: Models, requests: Sequence[Request], config: VerifyConfig) -> Check:
    plain, ours = models.plain(requests), models.speculative(requests, config.concurrency)
    dtype = str(models.target.dtype).removeprefix("torch.")
    check = Check(name=f"{name}, {dtype}", statement="every output is, token for token, that of plain decoding")
    gaps: list[float] = []
    for number, (request, one, other) in enumerate(zip(requests, plain, ours, strict=True)):
        place = parting(one.tokens, other.tokens)
        if place is None:
            continue
        tokens = [each.tokens[place] if place < len(each.tokens) else None for each in (one, other)]
        gap = score_gap(models.target, request, one.tokens[:place], tokens[0], tokens[1])
        if models.exact or gap > config.max_tie_gap:
            check.defects.append(
                f"prompt {number}, token {place}: {tokens[1]} and not {tokens[0]}, scores {gap:.3g} apart"
            )
        else:
            gaps.append(gap)
    rounds = sum(each.acceptance.rounds for each in ours)
    accepted = sum(each.acceptance.accepted for each in ours)
    if not accepted:
        check.untested.append("no draft was accepted: what follows an accepted draft was not seen")
    check.figures = {
        "prompts": len(requests),
        "tokens": sum(len(each.tokens) for each in ours),
        "near_ties": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "tau": 1 + accepted / max(1, rounds),
    }
    return check


def ends(models: Models, prompts: Sequence[Prompt], config: VerifyConfig) -> Check:
    """Outputs are cut at a token that plain decoding says somewhere inside, and at every kind of budget."""
    check = Check(name="ends", statement="nothing is emitted behind a stop token or max_tokens, and nothing is missing")
    requests = requests_for(models, prompts, config, [SamplingParams(), SETTINGS[0]])
    plain = models.plain(requests)
    cut = [
        replace(
            request,
            stop_token_ids=(each.tokens[len(each.tokens) * 2 // 3],),
            max_tokens=max(1, len(each.tokens) - number % 5),
        )
        for number, (request, each) in enumerate(zip(requests, plain, strict=True))
    ]
    for number, (request, whole, found) in enumerate(
        zip(cut, plain, models.speculative(cut, config.concurrency), strict=True)
    ):
        wanted = whole.tokens[: whole.tokens.index(request.stop_token_ids[0]) + 1][: request.max_tokens]
        reason = "stop" if wanted[-1] == request.stop_token_ids[0] else "length"
        if (found.tokens, found.finish_reason) != (wanted, reason):
            check.defects.append(
                f"prompt {number}: {len(found.tokens)} tokens and {found.finish_reason}, not {len(wanted)} and {reason}"
            )
    check.figures = {"prompts": len(requests)}
    return check


def logprob_equality(models: Models, prompts: Sequence[Prompt], config: VerifyConfig) -> Check:
    check = Check(
        name="log-probabilities", statement="those of accepted tokens are the target's, as plain decoding has them"
    )
    requests = [
        replace(request, logprobs=5)
        for request in requests_for(models, prompts, config, [SamplingParams(), SETTINGS[0], SETTINGS[3]])
    ]
    largest = 0.0
    plain, ours = models.plain(requests), models.speculative(requests, config.concurrency)
    for number, (one, other) in enumerate(zip(plain, ours, strict=True)):
        for place, (a, b) in enumerate(zip(one.logprobs or [], other.logprobs or [], strict=False)):
            if a.token != b.token:
                check.defects.append(f"prompt {number}, token {place}: {b.token} and not {a.token}")
                break
            pairs = [(a.logprob, b.logprob), *((x[1], y[1]) for x, y in zip(a.top, b.top, strict=True))]
            apart = max(abs(x - y) for x, y in pairs)
            largest = max(largest, apart)
            if apart > LOGPROB_TOLERANCE:
                check.defects.append(f"prompt {number}, token {place}: log-probabilities {apart:.3g} apart")
                break
    check.figures = {"prompts": len(requests), "largest_difference": largest, "tolerance": LOGPROB_TOLERANCE}
    return check


def verified_length(models: Models, prompts: Sequence[Prompt], config: VerifyConfig) -> Check:
    check = Check(
        name="seed reproducibility",
        statement="a seed's output is the same again, whatever number of drafts is verified",
    )
    settings = [replace(each, rule=rule) for each in SETTINGS for rule in SEEDED_RULES]
    requests = requests_for(models, prompts, config, settings)
    first = models.speculative(requests, config.concurrency)
    lengths = (None, 0, 1, 2)
    for num_verify in lengths:
        again = models.speculative(requests, config.concurrency, num_verify)
        check.defects += _differences(first, again, f"num_verify={num_verify}")
    check.figures = {"prompts": len(requests), "verified_lengths": [str(each) for each in lengths]}
    return check


def batch_invariance(models: Models, prompts: Sequence[Prompt], config: VerifyConfig) -> Check:
    """Every rule and setting side by side, in two orders, against each request alone with the same drafter."""
    check = Check(name="batch invariance", statement="a request's output does not depend on the rows beside it")
    settings = [replace(each, rule=rule) for each in SETTINGS for rule in get_args(DraftRule)]
    requests = requests_for(models, prompts, config, settings)
    alone = models.speculative(requests, 1)
    check.defects += _differences(alone, models.speculative(requests, config.concurrency), "together")
    backwards = models.speculative(requests[::-1], max(2, config.concurrency // 2 + 1))[::-1]
    check.defects += _differences(alone, backwards, "together, in the other order")
    check.figures = {"prompts": len(requests), "rows": config.concurrency}
    return check


def _differences(one: Sequence[Completion], other: Sequence[Completion], what: str) -> list[str]:
    places = [parting(a.tokens, b.tokens) for a, b in zip(one, other, strict=True)]
    return [
        f"{what}: prompt {number} differs at token {place}" for number, place in enumerate(places) if place is not None
    ]
