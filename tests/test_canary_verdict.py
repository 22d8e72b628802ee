"""The comparison of a challenger with the champion: figures that add up, and a verdict for every kind of difference."""

import math
import random
import statistics
import time

import pytest

from domino_core.decode import Acceptance
from serve.canary import in_share
from serve.figures import Figures, Ratio, pooled
from serve.verdict import CanaryConfig, compare, error_chance, judge, token_time

LIMITS = CanaryConfig(min_requests=100, tau_margin=0.02, token_time_tolerance=0.05, first_token_tolerance=0.25)


def served(number: int, *, tau=3.0, round_s=0.01, first_s=0.1, errors=0, rows=(2, 3), spread=0.3, seed=0) -> Figures:
    """What `number` requests of about 20 rounds each leave behind; a round of r rows takes round_s * (1 + r / 10)."""
    random_, figures = random.Random(seed), Figures()
    for _ in range(number):
        rounds = random_.randint(15, 25)
        accepted = round(rounds * (tau - 1) * random_.uniform(1 - spread, 1 + spread))
        acceptance = Acceptance(rounds=rounds, drafted=4 * rounds, accepted=accepted)
        figures.answered(acceptance, first_s * random_.lognormvariate(0, 0.5), rounds * round_s, rounds + accepted)
        for count in rows:
            seconds = round_s * (1 + count / 10) * random_.uniform(0.9, 1.1)
            figures.stepped(count, seconds, round(count * tau * random_.uniform(0.8, 1.2)))
    for _ in range(errors):
        figures.failed()
    return figures


CHAMPION = served(4000)


@pytest.mark.parametrize(
    ("challenger", "over", "decision", "reason"),
    [
        (served(3000, tau=3.3, seed=1), False, "promote", "tau"),
        (served(3000, tau=2.7, seed=1), False, "roll back", "tau: 2."),
        (served(3000, tau=3.3, round_s=0.013, seed=1), False, "roll back", "token_time"),
        (served(3000, tau=3.3, first_s=0.2, seed=1), False, "roll back", "first_token"),
        # A longer round that accepts more than it costs is no loss.
        (served(3000, tau=4.0, round_s=0.012, seed=1), False, "promote", "token_time"),
        # Too little is known for a tolerance of 2%, until there is no more time.
        (served(120, tau=2.98, seed=2), False, "wait", ""),
        (served(120, tau=3.1, seed=2), True, "promote", ""),
        (served(120, tau=2.8, seed=2), True, "roll back", "tau: 2."),
        # Too few requests say nothing, whatever they look like.
        (served(99, tau=1.5), False, "wait", ""),
        (served(99, tau=4.0), True, "roll back", "requests: 99 against 4000 in canary.max_minutes=60"),
        (Figures(), True, "roll back", "more serve.canary_share"),
        # Errors are not waited for; one that may be chance is not held against it.
        (served(50, errors=3), False, "roll back", "errors: 3 against 0"),
        (served(3000, tau=3.3, errors=1, seed=1), False, "promote", ""),
        # Never as many rows as the champion: the time of a token cannot be compared.
        (served(3000, tau=3.3, rows=(1,), seed=1), False, "wait", ""),
        (served(3000, tau=3.3, rows=(1,), seed=1), True, "roll back", "no rounds with equal numbers of rows"),
    ],
)
def test_verdicts(challenger, over, decision, reason):
    verdict = compare(CHAMPION, challenger, LIMITS, over=over)
    assert verdict.decision == decision, verdict
    assert reason in "; ".join(verdict.reasons)
    assert {"tau", "token_time", "first_token", "requests", "errors"} <= verdict.figures.keys()


def test_equal_versions_are_rarely_rolled_back_early_and_half_of_them_would_be_without_the_margin():
    """The rule's own promise, on 200 pairs that do not differ."""
    pairs = [(served(300, seed=2 * k), served(150, seed=2 * k + 1)) for k in range(200)]
    early = [compare(one, other, LIMITS, over=False).decision for one, other in pairs]
    assert early.count("roll back") <= 2
    strict = CanaryConfig(min_requests=100, tau_margin=0.0, token_time_tolerance=0.0, first_token_tolerance=0.0)
    late = [compare(one, other, strict, over=True).decision for one, other in pairs]
    assert late.count("roll back") > 100


def test_accepted_drafts_are_not_compared_where_engines_choose_how_many_they_verify():
    worse = served(3000, tau=2.7, round_s=0.008, seed=1)
    assert compare(CHAMPION, worse, LIMITS, over=False).decision == "roll back"
    verdict = compare(CHAMPION, worse, LIMITS, over=False, same_length=False)
    assert verdict.decision == "promote"
    assert "tau" not in verdict.figures


def test_time_of_a_token_does_not_depend_on_how_many_rows_each_version_had():
    """The champion's rounds have up to 8 rows and take longer; the challenger's have 1 or 2. The drafters are alike."""
    busy, quiet = served(500, rows=(1, 2, 4, 8)), served(500, rows=(1, 1, 2), seed=1)
    assert token_time(busy.steps, quiet.steps, 1.05).ratio == pytest.approx(1, abs=0.01)
    plain = [
        sum(step.x for step in arm.steps.values()) / sum(step.y for step in arm.steps.values()) for arm in (quiet, busy)
    ]
    assert plain[0] / plain[1] < 0.8  # what it would have been


def test_error_of_a_ratio_is_that_of_drawing_other_requests():
    taus = [served(200, seed=seed).acceptance.value for seed in range(200)]
    expected = statistics.stdev(taus)
    assert math.sqrt(served(200, seed=1000).acceptance.variance) == pytest.approx(expected, rel=0.2)
    assert Ratio().variance == math.inf


def test_chance_of_errors_is_fishers():
    champion, challenger = Figures(requests=7, errors=1), Figures(requests=1, errors=3)
    assert error_chance(champion, challenger) == pytest.approx(0.0667, abs=1e-3)  # of the table 3 1 / 1 7
    assert error_chance(Figures(requests=5, errors=5), Figures(requests=5)) == 1.0


def test_an_outage_under_load_is_judged_at_once_and_exactly():
    """Looks are seconds apart; binomials of a hundred thousand errors would take hours."""
    champion, challenger = Figures(requests=900_000, errors=90_000), Figures(requests=100_000, errors=10_000)
    started = time.process_time()
    assert error_chance(champion, challenger) == pytest.approx(0.5, abs=0.01)
    assert time.process_time() - started < 5
    # Every margin of small tables, in whole numbers.
    for own, others, errors in ((4, 8, 4), (30, 5, 20), (7, 200, 9)):
        for bad in range(1, min(own, errors) + 1):
            if errors - bad <= others:
                ways = sum(math.comb(own, k) * math.comb(others, errors - k) for k in range(bad, min(own, errors) + 1))
                left, right = Figures(requests=others - errors + bad, errors=errors - bad), Figures(requests=own - bad)
                right.errors = bad
                assert error_chance(left, right) == pytest.approx(ways / math.comb(own + others, errors))


def test_too_few_requests_name_the_side_that_had_too_few():
    few, many = served(20), served(500)
    assert "or more serve.canary_share" in compare(many, few, LIMITS, over=True).reasons[0]
    assert "or less serve.canary_share" in compare(few, many, LIMITS, over=True).reasons[0]


def test_figures_add_up_and_survive_json():
    import json

    one, other, both = served(50, seed=1), served(70, seed=2, errors=2), served(50, seed=1)
    both.merge(other)
    total = pooled(Figures.from_dict(json.loads(json.dumps(each.to_dict()))) for each in (one, other))
    assert total == both
    assert (total.requests, total.errors, total.steps[2].count) == (120, 2, 120)


def report(version="2", champion="1", state="running", problem="", figures=CHAMPION, since="5.0"):
    arms = {"champion": CHAMPION.to_dict(), "challenger": figures.to_dict()}
    return {
        "version": version, "champion": champion, "state": state, "problem": problem, "figures": arms, "since": since,
        "same_length": True, "unable": "",
    }  # fmt: skip


GOOD = served(3000, tau=3.3, seed=1)


@pytest.mark.parametrize(
    ("reports", "decision", "said"),
    [
        ([], "wait", "0 against 0"),
        ([report(figures=GOOD)], "promote", "3000 against 4000"),
        ([report(figures=GOOD), report(figures=GOOD)], "promote", "6000 against 8000"),
        # Of another pair of versions: not these figures.
        ([report(figures=GOOD, version="3")], "wait", "0 against 0"),
        ([report(figures=GOOD, champion="0")], "wait", "0 against 0"),
        ([report(figures=GOOD, since="4.0")], "wait", "0 against 0"),
        ([report(state="refused", problem="of the last time", since="4.0")], "wait", "0 against 0"),
        # One replica that refuses it is enough.
        ([report(figures=GOOD), report(state="refused", problem="self-check: 3 drafts")], "roll back", "self-check"),
        ([report(figures=GOOD), report(state="failed", problem="device lost")], "roll back", "device lost"),
        ([report(figures=GOOD), report(state="waiting", problem="version 2 waits")], "promote", ""),
        ([report(figures=GOOD), {"unable": "serve.canary_share=0"}], "promote", ""),
        ([report(state="refused", problem="old", version="3")], "wait", ""),
    ],
)
def test_reports_of_replicas(reports, decision, said):
    verdict = judge(reports, ("1", "2", "5.0"), LIMITS, over=False)
    assert verdict.decision == decision
    assert said in "; ".join([*verdict.reasons, *verdict.figures.values()])


def test_share_is_kept_and_a_request_goes_the_same_way_again():
    ids = [f"request-{number}" for number in range(20_000)]
    chosen = {share: {name for name in ids if in_share(name, "2", share)} for share in (0.0, 0.1, 0.3, 1.0)}
    assert [len(chosen[share]) for share in (0.0, 1.0)] == [0, 20_000]
    assert len(chosen[0.1]) == pytest.approx(2000, abs=150)
    assert chosen[0.1] < chosen[0.3]  # who was in a smaller share stays in a larger one
    assert chosen[0.1] == {name for name in ids if in_share(name, "2", 0.1)}
    again = {name for name in ids if in_share(name, "3", 0.1)}
    assert len(chosen[0.1] & again) == pytest.approx(200, abs=60)  # another version, other clients


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_requests": 1}, "min_requests=1"),
        ({"max_minutes": 0.0}, "max_minutes=0"),
        ({"max_minutes": math.nan}, "max_minutes=nan"),
        ({"tau_margin": 1.0}, "tau_margin=1"),
        ({"token_time_tolerance": -0.1}, "token_time_tolerance=-0.1"),
        ({"endpoints": ("localhost:8000",)}, "http://HOST:PORT"),
    ],
)
def test_settings_that_decide_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CanaryConfig(**changes)
