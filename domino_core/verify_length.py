"""How many drafts a round should verify: the prefix of the block that gives most tokens per second at this load.

A round that verifies n drafts gives 1 + a_1 + ... + a_n tokens per row, a_i being the share of rounds that accept draft
i, and takes a time that grows with n and with the rows. The engine measures its times once, before it serves, and the
shares all along; 0 is plain decoding, which wins where drafting does not pay. Tokens do not depend on the choice
(sampling.py), only their speed does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EXPLORE_EVERY = 64  # rounds between two that verify the whole block, to see what deeper drafts are worth by now
FIRST_LOOK = 8.0  # rows' rounds of whole blocks before the acceptance rates are believed
MEMORY = 200.0  # rows' rounds that the acceptance rates remember


def candidates(num_drafts: int) -> tuple[int, ...]:
    """The lengths that are considered: none, a quarter, a half, all (0, 4, 8, 16 of 16 drafts)."""
    return tuple(sorted({0, num_drafts // 4, num_drafts // 2, num_drafts}))


def best_length(seconds: Mapping[int, float], accepted_at: Sequence[float]) -> int:
    """The length with most tokens per second. seconds: of a round, by length; accepted_at: share per draft."""
    return max(seconds, key=lambda length: (1.0 + sum(accepted_at[:length])) / seconds[length])


@dataclass(kw_only=True)
class VerifyLength:
    """The running choice of one engine. seconds: of a round, by rows and length; between two rows the larger counts."""

    num_drafts: int
    seconds: Mapping[int, Mapping[int, float]]
    accepted_at: list[float] = field(init=False)
    _weights: list[float] = field(init=False)
    _rounds: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.accepted_at = [0.0] * self.num_drafts
        self._weights = [0.0] * self.num_drafts

    def choose(self, rows: int) -> int:
        """The length of the next round of so many rows."""
        self._rounds += 1
        if min(self._weights, default=0.0) < FIRST_LOOK or self._rounds % EXPLORE_EVERY == 0:
            return self.num_drafts
        load = min((each for each in self.seconds if each >= rows), default=max(self.seconds))
        return best_length(self.seconds[load], self.accepted_at)

    def observe(self, length: int, accepted: Sequence[int]) -> None:
        """A round that verified `length` drafts is over: drafts accepted in each row."""
        rows = len(accepted)
        for draft in range(length):
            self._weights[draft] = min(self._weights[draft] + rows, max(MEMORY, rows))
            share = sum(count > draft for count in accepted) / rows
            self.accepted_at[draft] += rows / self._weights[draft] * (share - self.accepted_at[draft])
