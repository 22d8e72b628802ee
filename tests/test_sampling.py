"""Draws against exact distributions, and the noise that makes them independent of batch, device and drafter."""

import math

import pytest
import torch

from domino_core import sampling as module
from domino_core.sampling import RowSampling, SamplingParams, count_accepted, gumbel_noise, processed_logits


def draw(logits, sampling, positions):
    return module.draw(logits, sampling, module.position_noise(sampling, positions, logits.shape[-1]))


def chi_square_p(statistic: float, freedom: int) -> float:
    """Upper tail of chi-square by its regularised incomplete gamma function."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


def exact_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The same definition in plain Python, one token at a time."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if top_k:
        order = order[:top_k]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    total, mass, kept = sum(weights.values()), 0.0, []
    for token in order:
        if mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    kept_total = sum(weights[token] for token in kept)
    return [weights[token] / kept_total if token in kept else 0.0 for token in range(len(scaled))]


SETTINGS = [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.5, 4, 1.0), (1.0, 0, 0.7), (0.8, 5, 0.8), (2.0, 100, 0.95)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p):
    logits = torch.randn(11, generator=torch.Generator().manual_seed(3)) * 2
    expected = torch.tensor(exact_distribution(logits.tolist(), temperature, top_k, top_p)).double()
    draws = 40_000
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=17)
    tokens = draw(logits.expand(1, draws, -1).contiguous(), RowSampling.stack([params]), torch.arange(draws)[None])
    counts = tokens.flatten().bincount(minlength=11).double()
    assert counts[expected == 0].sum() == 0
    common = expected * draws >= 5
    rare = ~common & (expected > 0)
    seen = torch.cat([counts[common], counts[rare].sum()[None]])
    wanted = torch.cat([expected[common], expected[rare].sum()[None]]) * draws
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    assert chi_square_p(statistic, len(seen) - 1) > 1e-3


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
    logits = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    rows = [SamplingParams(temperature=1.0, top_k=7, top_p=0.8), SamplingParams(temperature=0.5, top_k=12)]
    bounded = RowSampling.stack(rows)
    assert bounded.top_k_width == 12
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
