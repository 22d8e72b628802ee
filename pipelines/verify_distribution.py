"""Do tokens follow the target's distribution exactly? Draws by the million, against probabilities in float64.

A draw is what a request gets behind a fixed text, under a seed of its own: the second and third token of its output,
the first being fixed. They come from its first speculative round, and the third from the next one where the first
draft was rejected: every draw counts, whatever was accepted. What is expected is computed apart from the code that
samples. The first token, which the prompt alone decides, has a test of its own; and later positions, which no
enumeration reaches, are compared between rejection sampling and plain decoding.

B rows · P tokens of the fixed text · V vocabulary · M second tokens that are resolved one by one
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from domino_core.decode import advance, speculative_round, tokens_of
from domino_core.decode_state import DecodeState, draw_first, prefill, prefill_chunks
from domino_core.drafter import Drafter
from domino_core.fused import on_card
from domino_core.fused_drafter import FusedDrafter
from domino_core.round_graphs import RoundGraphs
from domino_core.sampling import RowSampling
from domino_core.sampling_params import SamplingParams
from domino_core.target_model import Target

NUM_VERIFY = 2  # the drafts that can decide the two tokens looked at
LEAST_EXPECTED = 5.0  # per bin, or chi-square's tail is not to be trusted
MOST_RESOLVED = 256


@dataclass(frozen=True, kw_only=True)
class DistributionTest:
    """p-values, not yet corrected for how many there are; 0 where a token came that has no probability."""

    second_token: float
    third_token: float
    joint: float
    bins: tuple[int, int, int]
    accepted: float  # share of draws whose first draft was accepted

    @property
    def tells(self) -> bool:
        """Whether there was anything to tell apart: outcomes, and drafts both accepted and rejected."""
        return min(self.bins) >= 2 and 0 < self.accepted < 1

    @property
    def p_values(self) -> tuple[float, float, float]:
        return self.second_token, self.third_token, self.joint


@torch.inference_mode()
def distribution_test(
    target: Target,
    drafter: Drafter,
    text: Sequence[int],
    params: SamplingParams,
    *,
    draws: int,
    rows: int,
    progress: Callable[[int], object] = lambda _: None,
) -> DistributionTest:
    """Draw under params.seed and the seeds behind it, and compare. text: the prompt and the fixed first token.

    progress: called with the number of draws just made.
    """
    pairs_N2, accepted = draw_pairs(target, drafter, text, params, draws=draws, rows=rows, progress=progress)
    p_V = exact_probabilities(next_logits(target, text[:-1], [text[-1:]])[0], params)
    resolved_M = p_V.topk(min(MOST_RESOLVED, max(1, int((p_V * draws >= LEAST_EXPECTED).sum())))).indices
    logits_MV = next_logits(target, text[:-1], [[text[-1], int(token)] for token in resolved_M])
    joint_MV = torch.stack([exact_probabilities(logits_V, params) for logits_V in logits_MV]) * p_V[resolved_M, None]
    second_N, third_N = pairs_N2.unbind(1)
    index_V = torch.full_like(p_V, -1, dtype=torch.int64)
    index_V[resolved_M] = torch.arange(len(resolved_M))
    index_N = index_V[second_N]
    known_N = index_N >= 0
    # Second tokens that are not resolved are one more outcome of third token and pair: nothing is left out.
    elsewhere = (1.0 - joint_MV.sum()).clamp_min(0.0)[None]
    num_elsewhere = (~known_N).sum()[None].double()
    vocabulary = len(p_V)
    third_V = third_N[known_N].bincount(minlength=vocabulary).double()
    cells_MV = (index_N[known_N] * vocabulary + third_N[known_N]).bincount(minlength=joint_MV.numel()).double()
    tests = (
        chi_square(second_N.bincount(minlength=vocabulary).double(), p_V * draws),
        chi_square(torch.cat((third_V, num_elsewhere)), torch.cat((joint_MV.sum(0), elsewhere)) * draws),
        chi_square(torch.cat((cells_MV, num_elsewhere)), torch.cat((joint_MV.flatten(), elsewhere)) * draws),
    )
    return DistributionTest(
        second_token=tests[0][0],
        third_token=tests[1][0],
        joint=tests[2][0],
        bins=(tests[0][1], tests[1][1], tests[2][1]),
        accepted=accepted / draws,
    )


def most_open(target: Target, prompts: Sequence[Sequence[int]], params: SamplingParams, draws: int) -> list[int]:
    """The text to draw behind: a prompt and its likeliest first token.

    A text whose next token is all but certain would show nothing; of all prompts, the one with most bins is taken.
    """
    found: list[tuple[int, list[int]]] = []
    for prompt in prompts:
        first = int(next_logits(target, prompt[:-1], [prompt[-1:]])[0].argmax())
        p_V = exact_probabilities(next_logits(target, prompt, [[first]])[0], params)
        found.append((int((p_V * draws >= LEAST_EXPECTED).sum()), [*prompt, first]))
    return max(found, key=lambda each: each[0])[1]


@torch.inference_mode()
def first_token_test(target: Target, prompt: Sequence[int], params: SamplingParams, draws: int) -> tuple[float, int]:
    """(p-value, bins) of first tokens, as a request gets them behind its prompt, under seeds from params.seed on."""
    state = DecodeState.allocate(target, None, 1, len(prompt))
    logits_11V = target.logits(prefill_chunks(target, None, state, 0, prompt)[:, None])
    counts_V = torch.zeros(target.config.vocab_size, dtype=torch.float64)
    seeds = range(params.seed, params.seed + draws)
    for begin in range(0, draws, 512):
        settings = [replace(params, seed=seed) for seed in seeds[begin : begin + 512]]
        logits_B1V = logits_11V.expand(len(settings), -1, -1)
        drawn_B = draw_first(logits_B1V, RowSampling.stack(settings, target.device), None)[:, 0]
        counts_V += drawn_B.cpu().bincount(minlength=len(counts_V))
    return chi_square(counts_V, exact_probabilities(logits_11V[0, 0].double().cpu(), params) * draws)


def same_distribution(one: Sequence[int], other: Sequence[int]) -> tuple[float, int]:
    """(p-value, bins) of two samples of one size coming from one distribution: Pearson's test of homogeneity."""
    assert len(one) == len(other)
    size = max(*one, *other) + 1
    a_X, b_X = (torch.tensor(values).bincount(minlength=size).double() for values in (one, other))
    common_X = a_X + b_X >= 2 * LEAST_EXPECTED
    a, b = (torch.cat((n_X[common_X], n_X[~common_X].sum()[None])) for n_X in (a_X, b_X))
    a, b = a[a + b > 0], b[a + b > 0]
    if len(a) < 2:
        return 1.0, len(a)
    freedom = torch.tensor((len(a) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, ((a - b) ** 2 / (a + b)).sum() / 2)), len(a)


def draw_pairs(
    target: Target,
    drafter: Drafter,
    text: Sequence[int],
    params: SamplingParams,
    *,
    draws: int,
    rows: int,
    progress: Callable[[int], object],
) -> tuple[Tensor, int]:
    """(second and third tokens [draws, 2], how many first drafts were accepted), by the rounds that serve requests."""
    fused = FusedDrafter(drafter)
    prompt, first = list(text[:-1]), text[-1]
    state = DecodeState.allocate(target, fused, rows, len(text) + 2 * (NUM_VERIFY + 1))
    prefill(target, fused, state, 0, prompt, RowSampling.stack([params], target.device))
    for row in range(1, rows):
        state.move_row(0, row)
    graphs = RoundGraphs(partial(advance, target, fused, state), state, rows) if on_card(target.embed_VD) else None

    def run(settings: Sequence[SamplingParams]) -> list[list[int]]:
        """As the engine runs them: as a graph on a card."""
        if graphs is None:
            sampling = RowSampling.stack(settings, target.device)
            return speculative_round(target, fused, state, sampling, len(settings), NUM_VERIFY).tokens
        drawn = graphs.run(settings, NUM_VERIFY, len(prompt) + 2 * (NUM_VERIFY + 1))
        state.reserve(len(settings), NUM_VERIFY + 1)
        outputs = tokens_of(drawn)[: len(settings)]
        for row, tokens in enumerate(outputs):
            state.commit(row, tokens, NUM_VERIFY + 1)
        return outputs

    pairs: list[list[int]] = []
    accepted = 0
    while len(pairs) < draws:
        count = min(rows, draws - len(pairs))
        # Back to the fixed text: what a round leaves in the caches lies behind it and is overwritten.
        state.length_B.fill_(len(prompt))
        state.anchor_B.fill_(first)
        state.drawn_B.fill_(1)
        state.lengths = [len(prompt)] * rows
        state.texts = [list(text) for _ in range(rows)]
        settings = [replace(params, seed=params.seed + len(pairs) + index) for index in range(count)]
        outputs = run(settings)
        accepted += sum(len(tokens) > 1 for tokens in outputs)
        short = [row for row, tokens in enumerate(outputs) if len(tokens) < 2]
        for place, row in enumerate(short):
            state.move_row(row, place)
        if short:
            for row, tokens in zip(short, run([settings[row] for row in short]), strict=True):
                outputs[row] += tokens
        pairs += [tokens[:2] for tokens in outputs]
        progress(count)
    return torch.tensor(pairs), accepted


def next_logits(target: Target, text: Sequence[int], endings: Sequence[Sequence[int]]) -> Tensor:
    """The target's logits [N, V] behind a text and each of some endings of one length, on the CPU in float64.

    By the passes that a row goes through, prompt first, so that on a card they are the bits that are sampled from.
    """
    rows = min(32, len(endings))
    state = DecodeState.allocate(target, None, rows, len(text) + len(endings[0]))
    prefill_chunks(target, None, state, 0, text)
    for row in range(1, rows):
        state.move_row(0, row)
    logits: list[Tensor] = []
    for begin in range(0, len(endings), rows):
        ids_BT = torch.tensor(endings[begin : begin + rows], device=target.device)
        start_B = torch.full((len(ids_BT),), len(text), device=target.device)
        hidden_BTD, _ = target.forward(ids_BT, start_B, state.target_cache.view(len(ids_BT)), ())
        logits.append(target.logits(hidden_BTD[:, -1]).double().cpu())
    return torch.cat(logits)


def exact_probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """What `params` asks for, one row, by sorting: temperature, min-p, top-k, top-p. Without bias and penalties.

    A token as probable as the last one kept is kept too; in bfloat16 many are.
    """
    probs_V = (logits_V.double() / params.temperature).softmax(-1)
    probs_V[probs_V < params.min_p * probs_V.max()] = 0.0
    sorted_V = probs_V.sort(descending=True).values
    if params.top_k:
        sorted_V[params.top_k :] = 0.0
    if params.top_p < 1:
        shares_V = sorted_V / sorted_V.sum()
        sorted_V[shares_V.cumsum(-1) - shares_V >= params.top_p] = 0.0
    probs_V[probs_V < sorted_V[sorted_V > 0].min()] = 0.0
    return probs_V / probs_V.sum()


def chi_square(counts_X: Tensor, expected_X: Tensor) -> tuple[float, int]:
    """(p-value, bins): Pearson's test; outcomes expected fewer than 5 times are taken together."""
    if counts_X[expected_X == 0].sum() > 0:
        return 0.0, 0
    common_X = expected_X >= LEAST_EXPECTED
    counts = torch.cat((counts_X[common_X], counts_X[~common_X].sum()[None]))
    expected = torch.cat((expected_X[common_X], expected_X[~common_X].sum()[None]))
    if expected[-1] < LEAST_EXPECTED and len(expected) > 1:  # too few even together: into the last bin beside them
        counts = torch.cat((counts[:-2], counts[-2:].sum()[None]))
        expected = torch.cat((expected[:-2], expected[-2:].sum()[None]))
    if len(expected) < 2:
        return 1.0, len(expected)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)), len(expected)
