"""What a drafter accepted on a few stored prompts when it was measured, so that whoever loads it can tell its weights.

Output never shows that a drafter is damaged: it only gets slow. So the gate decodes some prompts greedily and stores
them with their counts, and a replica that loads the version decodes them again before it serves with it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from domino_core.decode import Acceptance
from domino_core.drafter import Drafter
from domino_core.engine import Engine
from domino_core.request import Request
from domino_core.target_model import Target

NUM_PROMPTS = 4
PROMPT_TOKENS = 128  # of each prompt, the first ones
ANSWER_TOKENS = 48
# Another device or type rounds differently: near-ties fall the other way, and texts go on differently from there. Then
# about a hundred rounds are compared with a hundred others, whose means differ by 15% (a standard deviation of about
# the mean, in both). Twice that is let pass; shuffled weights accept next to nothing.
TOLERANCE = 0.3
FEW = 3.0  # where little was accepted at all: standard deviations of the count


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, the rounds of its answer, and in how many of them draft i was accepted, for each i."""

    prompt_ids: tuple[int, ...]
    rounds: int
    accepted_at: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """Prompts with what whole blocks accepted in `max_tokens` tokens of greedy decoding."""

    max_tokens: int
    samples: tuple[Sample, ...]

    def requests(self, max_length: int) -> list[Request]:
        """Those that an engine of this length can decode."""
        requests = [Request(prompt_ids=each.prompt_ids, max_tokens=self.max_tokens) for each in self.samples]
        return [each for each in requests if len(each.prompt_ids) + self.max_tokens <= max_length]

    def expected(self, requests: Sequence[Request], num_verify: int | None) -> float:
        """Accepted drafts per round of these requests where at most num_verify are verified (None: all)."""
        asked = {request.prompt_ids for request in requests}
        samples = [each for each in self.samples if each.prompt_ids in asked]
        rounds = sum(each.rounds for each in samples)
        return sum(sum(each.accepted_at[:num_verify]) for each in samples) / rounds if rounds else 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "SelfCheck":
        """ValueError for what `to_json` did not write."""
        try:  # whoever may write tags may have written this one
            content = json.loads(text)
            samples = tuple(
                Sample(
                    prompt_ids=tuple(map(int, each["prompt_ids"])),
                    rounds=int(each["rounds"]),
                    accepted_at=tuple(map(int, each["accepted_at"])),
                )
                for each in content["samples"]
            )
            return cls(max_tokens=int(content["max_tokens"]), samples=samples)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"the stored self-check cannot be read ({error}): gate the version again") from error


def take_samples(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]]) -> SelfCheck:
    """Decode the first few prompts, one by one and in whole blocks, as a replica will."""
    cut = [tuple(prompt[:PROMPT_TOKENS]) for prompt in prompts[:NUM_PROMPTS]]
    engine = Engine(target, drafter, max_rows=1, max_length=max(map(len, cut)) + ANSWER_TOKENS)
    done = engine.generate([Request(prompt_ids=prompt, max_tokens=ANSWER_TOKENS) for prompt in cut])
    samples = [
        Sample(prompt_ids=prompt, rounds=each.acceptance.rounds, accepted_at=tuple(each.acceptance.accepted_at))
        for prompt, each in zip(cut, done, strict=True)
    ]
    return SelfCheck(max_tokens=ANSWER_TOKENS, samples=tuple(samples))


def shortfall(found: Acceptance, expected: float) -> str:
    """Why a drafter is not the one that was measured, in words; "" if it may be.

    expected: accepted drafts per round. Short is what lacks more than TOLERANCE of them, and more than chance gives
    where they are few: a count of n varies by about √n.
    """
    count = expected * found.rounds
    least = count - max(TOLERANCE * count, FEW * math.sqrt(count))
    if found.accepted >= least:
        return ""
    return (
        f"{found.accepted} drafts accepted in {found.rounds} rounds of the stored prompts, at least {least:.0f} of the "
        f"{count:.0f} of its gate are expected: its weights are not those that were measured, or not computed alike"
    )
