"""How many drafts a round should verify: the prefix of the block that gives most tokens per second at this load.

A round that verifies n drafts gives 1 + a_1 + ... + a_n tokens per row, a_i being the share of rounds that accept draft
i, and takes a time that grows with n and with the rows. Both are measured while decoding; 0 is plain decoding, which
wins where drafting does not pay. Tokens do not depend on the choice (sampling.py), only their speed does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EXPLORE_EVERY = 64  # rounds between two that verify the whole block, to see what deeper drafts are worth by now
TRIALS = 3  # rounds of a length at a load before its time is believed
MEMORY = 200.0  # rows' rounds that the acceptance rates remember
TIME_MEMORY = 0.1  # share of a new time in the running one


def candidates(num_drafts: int) -> tuple[int, ...]:
    """The lengths that are considered: none, a quarter, a half, all (0, 4, 8, 16 of 16 drafts)."""
    return tuple(sorted({0, num_drafts // 4, num_drafts // 2, num_drafts}))


def best_length(seconds: Mapping[int, float], accepted_at: Sequence[float]) -> int:
    """The length with most tokens per second. seconds: of a round, by length; accepted_at: share per draft."""
    return max(seconds, key=lambda length: (1.0 + sum(accepted_at[:length])) / seconds[length])


@dataclass(kw_only=True)
class VerifyLength:
    """The running choice of one engine. Loads are counted in powers of two."""

    num_drafts: int
    accepted_at: list[float] = field(init=False)
    _weights: list[float] = field(init=False)
    _seconds: dict[int, dict[int, float]] = field(init=False, default_factory=dict[int, dict[int, float]])
    _trials: dict[tuple[int, int], int] = field(init=False, default_factory=dict[tuple[int, int], int])
    _rounds: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.accepted_at = [0.0] * self.num_drafts
        self._weights = [0.0] * self.num_drafts

    def choose(self, rows: int) -> int:
        """The length of the next round of so many rows."""
        load = _load(rows)
        untried = [n for n in candidates(self.num_drafts) if self._trials.get((load, n), 0) < TRIALS]
        self._rounds += 1
        if untried:
            return untried[-1]  # the whole block first: it shows all acceptance rates
        if self._rounds % EXPLORE_EVERY == 0:
            return self.num_drafts
        return best_length(self._seconds[load], self.accepted_at)

    def observe(self, rows: int, length: int, accepted: Sequence[int], seconds: float) -> None:
        """A round that verified `length` drafts is over: drafts accepted in each row, and the time it took."""
        load = _load(rows)
        times, key = self._seconds.setdefault(load, {}), (load, length)
        self._trials[key] = self._trials.get(key, 0) + 1
        if self._trials[key] <= TRIALS:  # the first ones allocate and compile: the fastest is the most truthful
            times[length] = min(times.get(length, seconds), seconds)
        else:
            times[length] += TIME_MEMORY * (seconds - times[length])
        for draft in range(length):
            self._weights[draft] = min(self._weights[draft] + len(accepted), MEMORY)
            share = sum(count > draft for count in accepted) / len(accepted)
            self.accepted_at[draft] += (
                len(accepted) / max(self._weights[draft], len(accepted)) * (share - self.accepted_at[draft])
            )


def _load(rows: int) -> int:
    """The power of two that is not below."""
    return 1 << (rows - 1).bit_length()
