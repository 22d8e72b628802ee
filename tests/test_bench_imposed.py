"""pipelines.imposed: the acceptance that is had is the one that was asked for, as far as drafts are verified."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_core.engine import Engine, Request
from domino_core.sampling import RowSampling
from domino_core.sampling_params import SamplingParams
from domino_core.target_model import random_target
from pipelines.bench_shapes import SHAPES, random_drafter
from pipelines.imposed import ImposedAcceptance, survival

TAUS = (3.87, 5.18, 7.17, 10.03)


@given(st.integers(1, 16), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_profile_falls_and_sums_to_tau(num_drafts, share):
    tau = 1 + share * num_drafts
    profile = survival(tau, num_drafts)
    assert len(profile) == num_drafts
    assert 1 + sum(profile) == pytest.approx(tau, abs=1e-9)
    assert all(1 >= earlier >= later >= 0 for earlier, later in pairwise(profile))


def test_profile_is_geometric():
    first, second, third = survival(1 + 0.5 + 0.25 + 0.125, 3)
    assert (first, second, third) == pytest.approx((0.5, 0.25, 0.125))


@pytest.mark.parametrize("tau", [0.9, 17.1, float("nan")])
def test_a_tau_that_cannot_be_had_is_refused(tau):
    with pytest.raises(ValueError, match="16 drafts give 1 to 17 tokens a round"):
        survival(tau, 16)


def draws(rule: ImposedAcceptance, rows: int, num_drafts: int, rounds: int) -> torch.Tensor:
    """Accepted drafts, [rounds, rows]."""
    sampling = RowSampling.stack([SamplingParams()] * rows)
    drafts_BQ = torch.zeros(rows, num_drafts, dtype=torch.int64)
    logits_BTV = torch.randn(rows, num_drafts + 1, 5, generator=torch.Generator().manual_seed(0))
    position_BT = torch.ones(rows, num_drafts + 1, dtype=torch.int64)
    found = []
    for _ in range(rounds):
        accepted_B, tokens_BT = rule(sampling, drafts_BQ, None, logits_BTV, None, position_BT)
        assert torch.equal(tokens_BT, logits_BTV.argmax(-1))  # the target's own, whatever is accepted
        found.append(accepted_B)
    return torch.stack(found)


@pytest.mark.parametrize("tau", TAUS)
def test_tau_is_had_and_by_every_row(tau):
    rule = ImposedAcceptance(16, 4, "cpu")
    rule.impose(tau)
    accepted = draws(rule, 4, 16, 2000)
    assert accepted.dtype == torch.int64
    torch.testing.assert_close(1 + accepted.double().mean(0), torch.full((4,), tau).double(), rtol=0.005, atol=0)
    reached = torch.stack([(accepted >= i).double().mean() for i in range(1, 17)])
    torch.testing.assert_close(reached, torch.tensor(survival(tau, 16), dtype=torch.float64), rtol=0, atol=0.005)
    assert 1 + accepted[:100].double().mean() == pytest.approx(tau, rel=0.03)  # soon, too


def test_rows_do_not_move_together():
    rule = ImposedAcceptance(16, 3, "cpu")
    rule.impose(7.17)
    one, other, _ = draws(rule, 3, 16, 200).unbind(1)
    assert (one == other).double().mean() < 0.5


def test_what_is_not_verified_is_not_accepted():
    rule, profile = ImposedAcceptance(16, 2, "cpu"), survival(7.17, 16)
    rule.impose(7.17)
    accepted = draws(rule, 2, 4, 2000)
    assert accepted.max() == 4
    assert accepted.double().mean() == pytest.approx(sum(profile[:4]), rel=0.01)
    assert draws(rule, 2, 0, 3).max() == 0


def test_imposing_writes_where_a_captured_graph_reads():
    rule = ImposedAcceptance(16, 2, "cpu")
    place = rule.survival_Q.data_ptr()
    rule.impose(17.0)
    assert rule.survival_Q.data_ptr() == place
    assert (draws(rule, 2, 16, 50) == 16).all()
    rule.impose(1.0)
    assert (draws(rule, 2, 16, 50) == 0).all()


def test_an_engine_decodes_at_it():
    shape = SHAPES["tiny"]
    target = random_target(shape.target)
    rule = ImposedAcceptance(16, 2, "cpu")
    rule.impose(5.18)
    engine = Engine(target, random_drafter(shape.drafter, target), max_rows=2, max_length=400, accept=rule)
    done = engine.generate([Request(prompt_ids=(1, 2, 3), max_tokens=300)] * 2)
    assert [len(each.tokens) for each in done] == [300, 300]
    assert engine.acceptance.tau == pytest.approx(5.18, rel=0.04)
