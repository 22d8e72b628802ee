"""Whether a challenger becomes champion: its served figures beside the champion's of the same time.

Four criteria, each as a ratio that is 1 where the two are alike and more where the challenger is worse. While a canary
runs they are looked at again and again, so an early verdict needs three standard errors, whichever way; at the end of
its time the figures count as they are (the rule of Haybittle and Peto: early looks are so strict that the last one need
not pay for them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from serve.canary import CHALLENGER, CHAMPION
from serve.figures import Figures, Ratio, pooled

SURE = 3.0  # standard errors of an early verdict
SURE_CHANCE = 0.00135  # the same as a one-sided probability, for errors
LAST_CHANCE = 0.05  # at the end of the time
FEWEST_STEPS = 5  # rounds of each version with the same number of rows, to be compared


@dataclass(frozen=True, kw_only=True)
class CanaryConfig:
    """How a challenger and the champion are compared (jobs.promote --canary)."""

    endpoints: tuple[str, ...] = ()  # where figures are read, http://HOST:PORT; none: serve.host and serve.port
    min_requests: int = 200  # answers of each version before there is a verdict
    max_minutes: float = 60.0  # then there is one
    tau_margin: float = 0.02  # relative loss of tau against the champion that is still accepted
    token_time_tolerance: float = 0.05  # how much longer a token may take
    first_token_tolerance: float = 0.25  # how much longer the first one may
    poll_seconds: float = 5.0  # between looks

    def __post_init__(self) -> None:
        if self.min_requests < 2:
            raise ValueError(f"canary.min_requests={self.min_requests}: expected at least 2")
        for name in ("max_minutes", "poll_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"canary.{name}={getattr(self, name)}: expected more than 0")
        if not 0 <= self.tau_margin < 1:
            raise ValueError(f"canary.tau_margin={self.tau_margin}: expected 0 to 1")
        for name in ("token_time_tolerance", "first_token_tolerance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"canary.{name}={getattr(self, name)}: expected at least 0")
        for endpoint in self.endpoints:
            if not endpoint.startswith(("http://", "https://")):
                raise ValueError(f"canary.endpoints: {endpoint!r} is no http://HOST:PORT")


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One comparison. ratio: None where there is nothing to compare. error: relative, one standard error."""

    name: str
    text: str  # both figures, for people
    ratio: float | None
    error: float
    limit: float

    def judged(self, over: bool) -> Literal["worse", "fine", "unsure"]:
        if self.ratio is None:
            return "worse" if over else "unsure"
        margin = 0.0 if over else SURE * self.error
        if self.ratio * (1 - margin) > self.limit:
            return "worse"
        return "fine" if self.ratio * (1 + margin) <= self.limit else "unsure"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """decision: wait for more requests, promote, or roll back; `figures` by name, as they go into tags."""

    decision: Literal["wait", "promote", "roll back"]
    reasons: list[str] = field(default_factory=list[str])
    figures: dict[str, str] = field(default_factory=dict[str, str])


def judge(
    reports: Sequence[dict[str, Any]], pair: tuple[str, str, str], limits: CanaryConfig, *, over: bool
) -> Verdict:
    """The verdict on what the replicas report (serve/canary.py). over: the time is up.

    pair: numbers of champion and challenger, and since when they are compared. Figures of others do not count.
    """
    champion, challenger, since = pair
    about = [report for report in reports if (report.get("version"), report.get("since")) == (challenger, since)]
    if problems := sorted({report["problem"] for report in about if report["state"] in ("refused", "failed")}):
        return Verdict(decision="roll back", reasons=problems)
    about = [report for report in about if report["champion"] == champion and CHALLENGER in report["figures"]]
    arms = [pooled(Figures.from_dict(report["figures"][arm]) for report in about) for arm in (CHAMPION, CHALLENGER)]
    same_length = all(report["same_length"] for report in about)
    return compare(arms[0], arms[1], limits, over=over, same_length=same_length)


def compare(
    champion: Figures, challenger: Figures, limits: CanaryConfig, *, over: bool, same_length: bool = True
) -> Verdict:
    """The verdict on these figures. over: the canary's time is up.

    same_length: both verify as many drafts a round. Where each engine verifies what pays at its own load, accepted
    drafts are not compared by themselves; the time of a token has them in it.
    """
    criteria = [
        *([acceptance(champion.acceptance, challenger.acceptance, limits.tau_margin)] if same_length else []),
        token_time(champion.steps, challenger.steps, 1 + limits.token_time_tolerance),
        first_token(champion.first_token, challenger.first_token, 1 + limits.first_token_tolerance),
    ]
    chance = error_chance(champion, challenger)
    figures = {each.name: each.text for each in criteria}
    figures["requests"] = f"{challenger.requests} against {champion.requests}"
    figures["errors"] = f"{challenger.errors} against {champion.errors}"
    if challenger.token_time.count and champion.token_time.count:
        seen = [math.exp(arm.token_time.value) for arm in (challenger, champion)]
        figures["seen_token_time"] = f"{1e3 * seen[0]:.2f} ms against {1e3 * seen[1]:.2f} ms (not compared)"

    def reasons(judgement: str) -> list[str]:
        return [f"{each.name}: {each.text}" for each in criteria if each.judged(over) == judgement]

    if chance < (LAST_CHANCE if over else SURE_CHANCE):  # does not wait: each is somebody's request
        return Verdict(decision="roll back", reasons=[f"errors: {figures['errors']}, p={chance:.2g}"], figures=figures)
    fewest = min(champion.requests, challenger.requests)
    if fewest < limits.min_requests:
        if not over:
            return Verdict(decision="wait", figures=figures)
        share = "more" if challenger.requests <= champion.requests else "less"
        reason = (
            f"requests: {figures['requests']} in canary.max_minutes={limits.max_minutes:g}, and canary.min_requests="
        )
        reason += f"{limits.min_requests} of each are wanted: give it longer, or {share} serve.canary_share"
        return Verdict(decision="roll back", reasons=[reason], figures=figures)
    if worse := reasons("worse"):
        return Verdict(decision="roll back", reasons=worse, figures=figures)
    if reasons("unsure"):
        return Verdict(decision="wait", figures=figures)
    return Verdict(decision="promote", reasons=reasons("fine"), figures=figures)


def acceptance(champion: Ratio, challenger: Ratio, margin: float) -> Criterion:
    """tau, 1 + accepted drafts per round, pooled over rounds; its error is that of drawing other requests."""
    limit = 1 / (1 - margin)
    taus = [1 + arm.value for arm in (challenger, champion)]
    errors = [math.sqrt(arm.variance) for arm in (challenger, champion)]
    if math.inf in errors:
        return Criterion(name="tau", text="no rounds to compare", ratio=None, error=math.inf, limit=limit)
    relative = math.hypot(*(error / tau for error, tau in zip(errors, taus, strict=True)))
    text = f"{taus[0]:.3f} ± {errors[0]:.3f} against {taus[1]:.3f} ± {errors[1]:.3f}"
    return Criterion(name="tau", text=text, ratio=taus[1] / taus[0], error=relative, limit=limit)


def token_time(champion: dict[int, Ratio], challenger: dict[int, Ratio], limit: float) -> Criterion:
    """Seconds per output token of a row, by the engines' own clocks and at equal numbers of rows.

    A round of many rows takes longer, and the challenger has fewer: only rounds with as many rows are compared,
    weighted by how many there are of both.
    """
    weights = {
        rows: min(champion[rows].count, step.count)
        for rows, step in challenger.items()
        if rows in champion and min(champion[rows].count, step.count) >= FEWEST_STEPS
        if champion[rows].value and step.value
    }
    if not weights:
        text = "no rounds with equal numbers of rows (a larger serve.canary_share gives some)"
        return Criterion(name="token_time", text=text, ratio=None, error=math.inf, limit=limit)
    total = sum(weights.values())
    means, errors = [], []
    for arm in (challenger, champion):
        means.append(sum(weight * arm[rows].value for rows, weight in weights.items()) / total)
        errors.append(math.sqrt(sum(weight**2 * arm[rows].variance for rows, weight in weights.items())) / total)
    relative = math.hypot(*(error / mean for error, mean in zip(errors, means, strict=True)))
    text = f"{1e3 * means[0]:.3f} ms against {1e3 * means[1]:.3f} ms, {total} rounds of equal rows"
    return Criterion(name="token_time", text=text, ratio=means[0] / means[1], error=relative, limit=limit)


def first_token(champion: Ratio, challenger: Ratio, limit: float) -> Criterion:
    """Geometric means of the time to the first token."""
    if min(champion.count, challenger.count) < 2:
        return Criterion(name="first_token", text="no first tokens to compare", ratio=None, error=math.inf, limit=limit)
    means = [math.exp(arm.value) for arm in (challenger, champion)]
    text = f"{1e3 * means[0]:.1f} ms against {1e3 * means[1]:.1f} ms"
    error = math.sqrt(champion.variance + challenger.variance)  # of a difference of logarithms: relative
    return Criterion(name="first_token", text=text, ratio=means[0] / means[1], error=error, limit=limit)


def error_chance(champion: Figures, challenger: Figures) -> float:
    """How likely so many of all errors are the challenger's, or more, by chance (Fisher's exact test).

    By logarithms: an outage under load has thousands of errors, and binomials of a hundred thousand digits.
    """
    errors = champion.errors + challenger.errors
    own, all_of_them = challenger.requests + challenger.errors, champion.requests + challenger.requests + errors
    if not challenger.errors:
        return 1.0
    most, fewest = min(own, errors), max(challenger.errors, own + errors - all_of_them)
    all_ways = log_ways(all_of_them, errors)
    return math.fsum(
        math.exp(log_ways(own, k) + log_ways(all_of_them - own, errors - k) - all_ways) for k in range(fewest, most + 1)
    )


def log_ways(n: int, k: int) -> float:
    """ln of n over k."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
