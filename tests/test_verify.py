"""The losslessness report: clean on a sound engine, and red for every way of breaking one that we could think of."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from domino_core import decode, decode_state, engine, sampling
from domino_core.checkpoint import save_drafter
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.engine import Request
from domino_core.sampling import RowSampling, processed_logits
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target
from jobs import verify as job
from pipelines import verify_distribution, verify_sampling
from pipelines.near_ties import score_gap
from pipelines.verify import (
    batch_invariance,
    ends,
    greedy_identity,
    logprob_equality,
    seeded_identity,
    verify,
)
from pipelines.verify_distribution import chi_square, exact_probabilities, same_distribution
from pipelines.verify_models import Models, VerifyConfig
from pipelines.verify_sampling import distribution, rejection_positions
from tests.serving import drafter_config

CONFIG = VerifyConfig(
    num_prompts=24, max_tokens=16, concurrency=4, draws=6_000, samples=3_000, draw_rows=500, dtype="float32"
)
PROMPTS = [tuple((3 * index + step) % 16 for step in range(3 + index % 4)) for index in range(24)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random target of 16 tokens and a random drafter, whose distributions differ and overlap."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "vocab_size": 16,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    folder = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(
        Qwen3Config(**shape, **heads, eos_token_id=None, bos_token_id=None, initializer_range=0.2)
    ).save_pretrained(folder)
    target = load_target(folder)
    config = DrafterConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_target_layers=3,
        target_layer_ids=(0, 2),
        mask_token_id=15,
        block_size=4,
        emb_dim=8,
        gru_hidden_dim=8,
        initializer_range=0.15,
    )
    return Models(target=target, drafter=Drafter(config, target.embed_VD, target.lm_head_VD).eval())


def test_a_sound_engine_has_no_defect(models):
    checks = verify(lambda dtype: models, PROMPTS, CONFIG)
    assert [check.defects for check in checks] == [[]] * 8
    assert [check.untested for check in checks] == [[]] * 8
    found = {check.name: check.figures for check in checks}["distribution"]
    assert found["draws"] == 3 * CONFIG.draws
    assert found["min_corrected_p"] > 0.01
    shares = found["first_draft_accepted"]
    assert min(shares.values()) > 0.05
    assert max(shares.values()) < 0.95  # there are rejections, or the residual would not have been looked at
    assert shares["rejection"] > shares["greedy_draft"]


def accepts_one_draft_too_many(patch):
    honest = sampling.count_accepted
    patch.setattr(sampling, "count_accepted", lambda d, t: (honest(d, t) + 1).clamp_max(d.shape[1]))


def accepts_every_sampled_draft(patch):
    honest = sampling.uniform_noise
    patch.setattr(sampling, "uniform_noise", lambda *a: honest(*a) * (1e-9 if a[3] == sampling.ACCEPT_STREAM else 1.0))


def replaces_from_p_and_not_the_residual(patch):
    patch.setattr(sampling, "residual", lambda p, q: p)


def replaces_with_the_noise_that_drafted(patch):
    honest = sampling.gumbel_noise
    patch.setattr(
        sampling, "gumbel_noise", lambda seed, position, vocabulary, stream=0: honest(seed, position, vocabulary)
    )


def changes_the_drafters_logits(change):
    def apply(patch):
        honest = decode.draft_block

        def broken(*arguments):
            drafts, logits = honest(*arguments)
            return drafts, None if logits is None else change(logits)

        patch.setattr(decode, "draft_block", broken)

    return apply


def reads_the_tokens_of_the_slot_before(patch):
    honest = decode.accept

    def broken(*arguments):
        accepted, tokens = honest(*arguments)
        return accepted, tokens.roll(1, dims=1)

    patch.setattr(decode, "accept", broken)


def penalises_for_drafts_of_other_slots(patch):
    honest = decode.adjusted_logits
    patch.setattr(
        decode, "adjusted_logits", lambda logits, drafts, *rest: honest(logits, drafts.roll(1, dims=1), *rest)
    )


def forgets_top_p_in_the_target(patch):
    patch.setattr(
        decode,
        "processed_logits",
        lambda logits, rows: sampling.processed_logits(logits, replace(rows, truncated=False)),
    )


def emits_behind_the_end(patch):
    honest = engine.Engine._emit

    def broken(self, row, tokens, logits):
        output = honest(self, row, tokens, logits)
        return replace(output, tokens=tokens) if output.finish_reason == "stop" else output

    patch.setattr(engine.Engine, "_emit", broken)


def reports_the_probabilities_of_the_slot_behind(patch):
    honest = engine.read_logprobs
    patch.setattr(engine, "read_logprobs", lambda logits, tokens, top: honest(logits.roll(-1, dims=0), tokens, top))


def shares_noise_among_the_rows(patch):
    patch.setattr(
        decode,
        "target_noise",
        lambda rows, at, size: sampling.target_noise(
            replace(rows, seed_B=rows.seed_B[:1].expand_as(rows.seed_B)), at, size
        ),
    )


def draws_the_first_token_without_noise(patch):
    patch.setattr(decode_state, "target_noise", lambda rows, at, size: None)


def forgets_min_p_in_the_target(patch):
    patch.setattr(
        decode, "processed_logits", lambda logits, rows: sampling.processed_logits(logits, replace(rows, min_p=False))
    )


def accepts_every_third_draft(patch):
    honest = sampling.uniform_noise

    def broken(*arguments):
        u = honest(*arguments)
        if arguments[3] == sampling.ACCEPT_STREAM:
            u[:, 2:] *= 1e-9
        return u

    patch.setattr(sampling, "uniform_noise", broken)


def forgets_penalties_in_the_drafters_logits(patch):
    """Drafts are drawn as asked; what is remembered of q is not."""
    honest = decode.draft_block

    def broken(drafter, state, rows, *rest):
        drafts, logits = honest(drafter, state, rows, *rest)
        if rows.adjustment is not None and logits is not None:
            logits = logits * 0.3
        return drafts, logits

    patch.setattr(decode, "draft_block", broken)


MUTANTS = [
    (draws_the_first_token_without_noise, distribution),
    (forgets_min_p_in_the_target, distribution),
    (accepts_every_third_draft, rejection_positions),
    (forgets_penalties_in_the_drafters_logits, rejection_positions),
    (accepts_one_draft_too_many, greedy_identity),
    (accepts_every_sampled_draft, distribution),
    (replaces_from_p_and_not_the_residual, distribution),
    (replaces_with_the_noise_that_drafted, distribution),
    (changes_the_drafters_logits(lambda q: q * 0.8), distribution),  # temperature forgotten
    (changes_the_drafters_logits(lambda q: q.roll(1, dims=1)), distribution),  # the slot before's
    (changes_the_drafters_logits(lambda q: q.roll(1, dims=2)), distribution),  # the token before's
    (reads_the_tokens_of_the_slot_before, greedy_identity),
    (penalises_for_drafts_of_other_slots, seeded_identity),
    (forgets_top_p_in_the_target, distribution),
    (emits_behind_the_end, ends),
    (reports_the_probabilities_of_the_slot_behind, logprob_equality),
    (shares_noise_among_the_rows, batch_invariance),
]


@pytest.mark.parametrize(("mutate", "check"), MUTANTS, ids=lambda value: value.__name__)
def test_every_mutant_is_found(models, monkeypatch, mutate, check):
    mutate(monkeypatch)
    assert check(models, PROMPTS, CONFIG).defects


def test_near_ties_are_told_from_defects(models):
    """The gap is in the scores that were compared: with bias, penalties and noise."""
    request = Request(
        prompt_ids=PROMPTS[0], max_tokens=4, sampling=SamplingParams(temperature=0.8, seed=5, presence_penalty=1.0)
    )
    tokens = models.plain([request])[0].tokens
    said, best = tokens[:3], tokens[3]
    gaps = {token: score_gap(models.target, request, said, best, token) for token in range(16)}
    assert gaps[best] == 0.0
    runner_up = min((token for token in gaps if token != best), key=gaps.__getitem__)
    nudged = replace(request, sampling=replace(request.sampling, logit_bias=((runner_up, gaps[runner_up] + 0.01),)))
    barely = replace(request, sampling=replace(request.sampling, logit_bias=((runner_up, gaps[runner_up] - 0.01),)))
    assert score_gap(models.target, nudged, said, best, runner_up) == pytest.approx(0.01, abs=1e-4)
    assert score_gap(models.target, barely, said, best, runner_up) == pytest.approx(0.01, abs=1e-4)
    assert score_gap(models.target, request, said, best, None) == float("inf")


def test_batch_invariance_looks_at_rejection_too(models):
    assert batch_invariance(models, PROMPTS, CONFIG).figures["prompts"] == 24


def test_chi_square_against_known_values():
    counts, expected = torch.tensor([18.0, 22, 60]), torch.tensor([25.0, 25, 50])
    assert chi_square(counts, expected)[0] == pytest.approx(0.11533, abs=1e-4)  # statistic 4.32, 2 degrees of freedom
    assert chi_square(torch.tensor([50.0, 50, 1]), torch.tensor([50.0, 50, 0])) == (0.0, 0)
    rare = torch.cat((torch.tensor([40.0, 40]), torch.full((20,), 0.5)))
    assert chi_square(rare, rare) == (1.0, 3)
    assert chi_square(rare[:6], rare[:6])[1] == 2  # two, which are too few, go to their neighbour


def test_two_samples_of_one_distribution_and_of_two():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randint(0, 6, (5000,), generator=generator).tolist() for _ in range(2))
    assert same_distribution(one, other)[0] > 0.01
    assert same_distribution(one, [value if value else 1 for value in other])[0] < 1e-9
    assert same_distribution([3] * 50, [3] * 50) == (1.0, 1)


def test_a_test_that_cannot_tell_anything_says_so(models, monkeypatch):
    """Where one token is certain, a broken rule would go unseen."""
    certain = replace(verify_sampling.ENUMERATED, top_k=1)
    monkeypatch.setattr(verify_sampling, "ENUMERATED", certain)
    check = distribution(models, PROMPTS, replace(CONFIG, draws=200))
    assert not check.defects
    assert len(check.untested) == 3


def test_exact_probabilities_by_hand():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    weights = logits.double().exp()
    cases = {
        SamplingParams(temperature=1.0): weights,
        SamplingParams(temperature=0.5): (2 * logits).double().exp(),
        SamplingParams(temperature=1.0, top_k=2): weights * torch.tensor([1, 1, 0, 0]),
        SamplingParams(temperature=1.0, top_p=0.7): weights * torch.tensor([1, 1, 0, 0]),
        SamplingParams(temperature=1.0, min_p=0.1): weights * torch.tensor([1, 1, 1, 0]),
    }
    for params, expected in cases.items():
        assert torch.allclose(exact_probabilities(logits, params), expected / expected.sum())


def test_tokens_as_probable_as_the_last_one_kept_are_kept():
    """As sampling keeps them: in bfloat16 ties are many, and a token that was drawn must have a probability."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    expected = torch.tensor([2.0, 1.0, 1.0, 1.0, -math.inf]).double().softmax(-1)
    for params in (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.6)):
        assert torch.allclose(exact_probabilities(logits, params), expected)
        kept = processed_logits(logits[None, None], RowSampling.stack([params]))[0, 0].isfinite()
        assert torch.equal(kept, expected > 0)


@pytest.fixture
def asked(tmp_path, embedded_target, monkeypatch) -> list[str]:
    """Arguments of a small report on an untrained drafter."""
    torch.manual_seed(1)
    target = load_target(embedded_target)
    drafter = save_drafter(
        Drafter(drafter_config(embedded_target), target.embed_VD, target.lm_head_VD), tmp_path / "drafter", {}
    )
    monkeypatch.setattr(verify_distribution, "MOST_RESOLVED", 16)
    few = [
        "verify.num_prompts=3",
        "verify.max_tokens=4",
        "verify.draws=64",
        "verify.samples=64",
        "verify.draw_rows=64",
        "verify.dtype=float32",
    ]
    where = ["--result", str(tmp_path / "v.json"), "--report", str(tmp_path / "v.html"), "--drafter", str(drafter)]
    return [*where, *few]


def test_a_report_that_is_cut_short_keeps_what_was_found(tmp_path, asked, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.verify.ends", killed)
    with pytest.raises(KeyboardInterrupt):
        job.main(asked)
    result = json.loads((tmp_path / "v.json").read_text())
    assert [check["name"] for check in result["checks"]] == ["greedy identity, float32", "seeded identity, float32"]
    assert (result["complete"], result["greedy_prompts"], result["sampling_draws"]) == (False, 3, None)


def test_the_job_writes_report_and_page_and_fails_on_a_defect(tmp_path, asked, monkeypatch):
    assert job.main(asked) == 0
    result = json.loads((tmp_path / "v.json").read_text())
    assert (result["defects"], result["greedy_prompts"], result["sampling_draws"]) == (0, 3, 192)
    assert result["complete"]
    assert {"min_corrected_p", "near_ties", "environment", "drafter_digest"} <= set(result)
    assert "No defect was found" in (tmp_path / "v.html").read_text()
    reads_the_tokens_of_the_slot_before(monkeypatch)
    assert job.main(asked) == 1
    assert json.loads((tmp_path / "v.json").read_text())["defects"] > 0
    assert "this drafter changes the output" in (tmp_path / "v.html").read_text()


def test_impossible_settings_are_named():
    with pytest.raises(ValueError, match=r"verify\.draws must be at least 1"):
        VerifyConfig(draws=0)
    with pytest.raises(ValueError, match=r"verify\.significance"):
        VerifyConfig(significance=1.5)
