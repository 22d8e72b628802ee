"""What one drafter version did for the requests that it served: sums, which add up over replicas.

Means alone would not tell chance from a difference, so squares are summed, too. Nothing here is per request: a replica
answers for hours, and its report stays a few hundred numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from domino_core.decode import Acceptance

RATIOS = ("acceptance", "first_token", "token_time")


@dataclass(kw_only=True)
class Ratio:
    """Sums over pairs (x, y) for Σx / Σy, such as a request's accepted drafts and its rounds.

    Rounds of one request are alike, so the request, not the round, is what is drawn: the error of the ratio follows
    from how far each pair is from it.
    """

    count: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.merge(Ratio(count=1, x=x, y=y, xx=x * x, xy=x * y, yy=y * y))

    def merge(self, other: Ratio) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def value(self) -> float:
        return self.x / self.y if self.y else 0.0

    @property
    def variance(self) -> float:
        """Of `value`: Σ(x - value·y)² / (Σy)², with the correction for having been fitted to them."""
        if self.count < 2 or not self.y:
            return math.inf
        squares = self.xx - 2 * self.value * self.xy + self.value**2 * self.yy
        return max(squares, 0.0) / self.y**2 * self.count / (self.count - 1)


@dataclass(kw_only=True)
class Figures:
    """Of one version in one replica, or summed over replicas.

    acceptance: accepted drafts and rounds of each request. first_token, token_time: logarithms of seconds of each
    request (y = 1), as a client saw them; a mean of logarithms is not ruled by the slowest. steps: by the number of
    rows in a round, row-seconds and tokens of each round, on the clock of the engine's own work. The engines of two
    versions take turns, so a client's seconds are those of both; the engine's own are not.
    """

    requests: int = 0  # answered to the end
    errors: int = 0
    acceptance: Ratio = field(default_factory=Ratio)
    first_token: Ratio = field(default_factory=Ratio)
    token_time: Ratio = field(default_factory=Ratio)
    steps: dict[int, Ratio] = field(default_factory=dict[int, Ratio])

    def answered(self, acceptance: Acceptance, first_token_s: float, rest_s: float, num_tokens: int) -> None:
        """One answer. rest_s: from its first token to its last."""
        self.requests += 1
        if acceptance.rounds:
            self.acceptance.add(acceptance.accepted, acceptance.rounds)
        self.first_token.add(math.log(max(first_token_s, 1e-6)), 1.0)
        if num_tokens > 1:
            self.token_time.add(math.log(max(rest_s, 1e-6) / (num_tokens - 1)), 1.0)

    def failed(self) -> None:
        self.errors += 1

    def stepped(self, rows: int, seconds: float, tokens: int) -> None:
        """One round without a prompt in it."""
        self.steps.setdefault(rows, Ratio()).add(rows * seconds, tokens)

    def merge(self, other: Figures) -> None:
        self.requests += other.requests
        self.errors += other.errors
        for name in RATIOS:
            getattr(self, name).merge(getattr(other, name))
        for rows, step in other.steps.items():
            self.steps.setdefault(rows, Ratio()).merge(step)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Any thread may ask while others count."""
        own: dict[str, Any] = {"requests": self.requests, "errors": self.errors}
        own |= {name: asdict(getattr(self, name)) for name in RATIOS}
        return own | {"steps": {str(rows): asdict(step) for rows, step in self.steps.copy().items()}}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Figures:
        ratios = {name: Ratio(**content[name]) for name in RATIOS}
        steps = {int(rows): Ratio(**step) for rows, step in content["steps"].items()}
        return cls(requests=content["requests"], errors=content["errors"], steps=steps, **ratios)


def pooled(reports: Iterable[Figures]) -> Figures:
    total = Figures()
    for each in reports:
        total.merge(each)
    return total
