"""Draws against exact distributions, and the noise that makes them independent of batch, device and drafter."""

import math
from dataclasses import replace

import pytest
import torch

from domino_core import sampling as module
from domino_core.sampling import RowSampling, count_accepted, gumbel_noise, processed_logits
from domino_core.sampling_params import SamplingParams


def draw(logits, sampling, positions):
    noise = module.target_noise(sampling, positions, logits.shape[-1])
    return module.draw(processed_logits(logits, sampling), noise)


def chi_square_p(statistic: float, freedom: int) -> float:
    """Upper tail of chi-square by its regularised incomplete gamma function."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


def exact_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The same definition in plain Python, one token at a time."""
    scaled = [value / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    order = [token for token in order if math.exp(scaled[token] - scaled[order[0]]) >= params.min_p]
    if params.top_k:
        order = order[: params.top_k]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    total, mass, kept = sum(weights.values()), 0.0, []
    for token in order:
        if mass >= params.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    kept_total = sum(weights[token] for token in kept)
    return [weights[token] / kept_total if token in kept else 0.0 for token in range(len(scaled))]


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.5, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=100, top_p=0.95),
    SamplingParams(temperature=1.2, min_p=0.2),
    SamplingParams(temperature=1.2, min_p=0.1, top_k=6, top_p=0.8),
]
LOGITS = torch.randn(11, generator=torch.Generator().manual_seed(3)) * 2


def check_draws(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square of draws against exact probabilities, tokens expected fewer than 5 times taken together."""
    draws, counts = tokens.numel(), tokens.flatten().bincount(minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    common = expected * draws >= 5
    rare = ~common & (expected > 0)
    seen = torch.cat([counts[common], counts[rare].sum()[None]])
    wanted = torch.cat([expected[common], expected[rare].sum()[None]]) * draws
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    assert chi_square_p(statistic, len(seen) - 1) > 1e-3


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_draws_follow_the_exact_distribution(params):
    expected = torch.tensor(exact_distribution(LOGITS.tolist(), params)).double()
    draws = 40_000
    sampling = RowSampling.stack([replace(params, seed=17)])
    tokens = draw(LOGITS.expand(1, draws, -1).contiguous(), sampling, torch.arange(draws)[None])
    check_draws(tokens, expected)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_rejection_sampling_gives_the_targets_distribution_whatever_was_drafted(params, num_drafts):
    """Every row is a request with a seed of its own; its first token is drawn from p, at the rate that theory gives."""
    rows = 40_000
    q_logits = LOGITS + torch.randn(num_drafts, 11, generator=torch.Generator().manual_seed(4))
    sampling = RowSampling.stack([replace(params, seed=seed, rule="rejection") for seed in range(rows)])
    positions = torch.arange(5, 6 + num_drafts).expand(rows, -1)
    p = processed_logits(LOGITS.expand(rows, num_drafts + 1, -1), sampling)
    q = processed_logits(q_logits.expand(rows, -1, -1), sampling)
    noise = module.target_noise(sampling, positions, 11)
    assert noise is not None
    drafts = module.draw(q, module.draft_noise(sampling, positions[:, :-1], noise[:, :-1]))
    accepted, tokens = module.accept(sampling, drafts, q, p, noise, positions)
    expected = torch.tensor(exact_distribution(LOGITS.tolist(), params)).double()
    # Logits are the same at all slots, so a token at any slot that was reached is a draw from p.
    for slot in range(num_drafts + 1):
        reached = accepted >= slot
        assert reached.sum() > 2_000
        check_draws(tokens[reached, slot], expected)
    overlap = torch.minimum(expected, q[0, 0].double().softmax(-1)).sum().item()
    assert (accepted > 0).double().mean().item() == pytest.approx(overlap, abs=4 * (0.25 / rows) ** 0.5)


def test_rejecting_the_certain_and_the_impossible():
    """q = p is always accepted; p(draft) = 0 never, also where rounding leaves no residual."""
    sampling = RowSampling.stack([SamplingParams(temperature=1.0, seed=seed, rule="rejection") for seed in range(500)])
    p = LOGITS.expand(500, 2, -1)
    positions = torch.zeros(500, 2, dtype=torch.int64)
    noise = module.target_noise(sampling, positions, 11)
    drafts = torch.arange(500)[:, None] % 11
    accepted, tokens = module.accept(sampling, drafts, p[:, :1], p, noise, positions)
    assert accepted.eq(1).all()
    assert torch.equal(tokens[:, 0], drafts[:, 0])
    banned = p.masked_fill(torch.arange(11) == drafts[..., None], -torch.inf)
    accepted, tokens = module.accept(sampling, drafts, p[:, :1], banned, noise, positions)
    assert accepted.eq(0).all()
    assert tokens[:, 0].ne(drafts[:, 0]).all()
    same = torch.tensor([[0.5, 0.5]])
    assert torch.equal(module.residual(same, same), same)


def test_streams_of_noise_are_independent():
    """What decides acceptance must not know what was drafted, nor the replacement either."""
    seeds, positions = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
    streams = [module.uniform_noise(seeds, positions, 2, stream) for stream in (0, 1, 2)]
    values = torch.cat(streams, dim=1)
    correlation = values.T.corrcoef() - torch.eye(6)
    assert correlation.abs().max() < 5 / 20_000**0.5


def test_draws_at_neighbouring_positions_and_seeds_are_independent():
    """Pairs (token at i, token at i+1), and pairs over neighbouring seeds, fill the product distribution."""
    logits = torch.tensor([1.0, 0.3, -0.2, 0.0])
    probs = logits.double().softmax(-1)
    draws = 40_000
    sampling = RowSampling.stack([SamplingParams(temperature=1.0, seed=seed) for seed in (5, 6)])
    tokens = draw(logits.expand(2, draws, -1).contiguous(), sampling, torch.arange(draws).expand(2, -1))
    wanted = (probs[:, None] * probs).flatten() * draws
    for pairs in (tokens[0] * 4 + tokens[0].roll(-1), tokens[0] * 4 + tokens[1]):
        counts = pairs.bincount(minlength=16).double()
        assert chi_square_p(float(((counts - wanted) ** 2 / wanted).sum()), 15) > 1e-3


def test_noise_is_standard_gumbel_and_keyed_by_seed_and_position_only():
    noise = gumbel_noise(torch.tensor([1]), torch.tensor([0]), 200_000)
    assert noise.dtype == torch.float32
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    batch = gumbel_noise(torch.tensor([[9, 9], [1, -4]]), torch.tensor([[3, 4], [0, 0]]), 50)
    assert torch.equal(batch[1, 0], noise[0, :50])
    assert torch.equal(batch[0, 1], gumbel_noise(torch.tensor(9), torch.tensor(4), 50))
    assert len({row.sum().item() for row in batch.flatten(0, 1)}) == 4


def test_noise_matches_splitmix64_in_python():
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seed, position, token = -12345, 678, 9
    key = mix(mix((seed + golden) & mask) ^ ((position * golden + 1) & mask))
    uniform = ((mix((key + (token + 1) * golden) & mask) >> 12) + 0.5) * 2.0**-52
    wanted = -math.log(-math.log(uniform))
    assert gumbel_noise(torch.tensor(seed), torch.tensor(position), 12)[token].item() == pytest.approx(wanted, rel=1e-6)


def test_rows_with_different_settings_do_not_touch_each_other():
    generator = torch.Generator().manual_seed(0)
    rows = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=3, seed=2),
        SamplingParams(temperature=1.3, top_p=0.6, seed=3),
        SamplingParams(temperature=0.9, top_k=8, top_p=0.9, seed=-4),
    ]
    logits = torch.randn(len(rows), 6, 33, generator=generator) * 3
    positions = torch.randint(0, 1000, (len(rows), 6), generator=generator)
    together = draw(logits, RowSampling.stack(rows), positions)
    for row, params in enumerate(rows):
        alone = draw(logits[row : row + 1], RowSampling.stack([params]), positions[row : row + 1])
        assert torch.equal(alone[0], together[row])
    assert torch.equal(together[0], logits[0].argmax(-1))


def test_bounded_top_k_takes_the_short_sort_and_agrees_with_the_full_one():
    logits = torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(1))
    rows = [SamplingParams(temperature=1.0, top_k=7, top_p=0.8), SamplingParams(temperature=0.5, top_k=12)]
    bounded = RowSampling.stack(rows)
    assert bounded.top_k_width == 64
    assert RowSampling.stack([SamplingParams(temperature=1.0, top_k=65)]).top_k_width == 1024
    assert RowSampling.stack([SamplingParams(temperature=1.0, top_k=2000)]).top_k_width == 0
    unbounded = RowSampling.stack([*rows, SamplingParams(temperature=1.0)])
    assert unbounded.top_k_width == 0
    full = processed_logits(torch.cat([logits, logits[:1]]), unbounded)
    assert torch.equal(processed_logits(logits, bounded), full[:2])
    assert (full.isfinite().sum(-1)[1] == 12).all()


def test_top_p_of_one_and_ties_keep_every_token_they_should():
    flat = torch.zeros(1, 1, 1000)
    assert processed_logits(flat, RowSampling.stack([SamplingParams(temperature=1.0, top_k=1000)])).isfinite().all()
    ties = torch.tensor([[[2.0, 1.0, 1.0, 0.0]]])
    kept = processed_logits(ties, RowSampling.stack([SamplingParams(temperature=1.0, top_k=2)])).isfinite()
    assert kept.tolist() == [[[True, True, True, False]]]
    tiny = processed_logits(ties, RowSampling.stack([SamplingParams(temperature=1.0, top_p=1e-6)])).isfinite()
    assert tiny.tolist() == [[[True, False, False, False]]]


def test_settings_beyond_the_range_of_their_tensors_mean_what_they_say():
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0]]])
    everything = RowSampling.stack([SamplingParams(temperature=1.0, top_k=2**63)])
    assert processed_logits(logits, everything).isfinite().all()
    best = RowSampling.stack([SamplingParams(temperature=1.0, top_p=1e-50)])  # 0 in float32
    assert processed_logits(logits, best).isfinite().tolist() == [[[True, False, False, False]]]


def test_count_accepted_stops_at_the_first_difference():
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    drawn = torch.tensor([[1, 2, 3, 7]]).expand(4, -1)
    assert count_accepted(drafts, drawn).tolist() == [3, 1, 0, 2]
    assert count_accepted(drafts[:, :0], drawn[:, :1]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.2},
        {"top_k": -1},
        {"seed": 2**63},
    ],
)
def test_bad_settings_name_the_value(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.gpu
def test_noise_is_the_same_on_a_gpu():
    seeds, positions = torch.arange(-3, 4)[:, None] * 12345678901, torch.arange(5)
    on_cpu = gumbel_noise(seeds, positions, 5000)
    on_gpu = gumbel_noise(seeds.cuda(), positions.cuda(), 5000).cpu()
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-6, atol=1e-7)
    assert (on_gpu == on_cpu).float().mean() > 0.999
