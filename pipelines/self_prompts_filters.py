"""Which of the texts that a target drew are prompts: filters, each counted by its name, and figures of what is left.

A draw is judged by its tokens, then by its text, then against everything kept before it; the first filter that objects
is the one that counts. Draws come in the order of their numbers, so the same draws always leave the same prompts.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.prompt_files import read_prompts
from pipelines.prompt_rows import is_conversation, turns
from pipelines.self_prompts_near import NearIndex, normalised, sketch, words
from pipelines.self_prompts_turn import UserTurn, markers

if TYPE_CHECKING:
    from pipelines.self_prompts import SelfPromptConfig

FILTERS = {
    "unfinished": "did not end within self_prompts.max_tokens",
    "control_tokens": "has control tokens or marks of a chat template in it",
    "unprintable": "has characters that are not printable, or bytes that are no text",
    "too_short": "fewer tokens than self_prompts.min_tokens",
    "too_long": "more tokens than self_prompts.longest",
    "repetitive": "its share of different token n-grams is below self_prompts.min_distinct",
    "excluded": "near-copy of a prompt in self_prompts.exclude",
    "duplicate": "the same as an earlier prompt, but for case and spaces",
    "near_duplicate": "word n-grams overlap with an earlier prompt's by self_prompts.near_duplicate or more",
}
NGRAM = 3  # tokens, of which repetition is told
FEWEST_NGRAMS = 8  # a shorter text says too little about repetition
EXAMPLES = 3  # of each filter
OPENING_WORDS = 3
EXAMPLE_CHARACTERS = 200
QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What the target wrote in the place of a user, with the token that it stopped at if it did (`stop`)."""

    index: int
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A draw that all filters have let through."""

    index: int
    text: str
    num_tokens: int


@dataclass(kw_only=True)
class Sieve:
    """Judges draws one after the other; remembers the prompts that it has kept, and counts the others."""

    config: SelfPromptConfig
    turn: UserTurn
    tokenizer: Any
    kept: list[Prompt] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # by filter
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.markers = markers(self.tokenizer)
        self.near = NearIndex(self.config.near_duplicate)
        self.seen: set[str] = set()
        self.excluded = NearIndex(self.config.near_duplicate)
        for path in self.config.exclude:
            for text in user_texts(path):
                self.excluded.add(sketch(text))

    @property
    def num_draws(self) -> int:
        """Draws judged so far."""
        return len(self.kept) + self.counts.total()

    def take(self, draw: Draw) -> bool:
        """Judge one draw; whether it is a prompt."""
        reason, tokens, text = self._own_fault(draw)
        same, sketched = normalised(text), sketch(text)
        if not reason and self.excluded.find(sketched) is not None:
            reason = "excluded"
        elif not reason and same in self.seen:
            reason = "duplicate"
        elif not reason and self.near.find(sketched) is not None:
            reason = "near_duplicate"
        if reason:
            self.counts[reason] += 1
            named = self.examples.setdefault(reason, [])
            if len(named) < EXAMPLES:
                named.append({"draw": draw.index, "text": text[:EXAMPLE_CHARACTERS]})
            return False
        self.seen.add(same)
        self.near.add(sketched)
        self.kept.append(Prompt(index=draw.index, text=text, num_tokens=len(tokens)))
        return True

    def _own_fault(self, draw: Draw) -> tuple[str, list[int], str]:
        """(filter or "", tokens of the words, text) of a draw by itself."""
        finished = draw.finish_reason == "stop" and draw.token_ids[-1] in self.turn.end_ids
        tokens = draw.token_ids[:-1] if finished else draw.token_ids
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = text.strip()
        config, reason = self.config, ""
        if draw.finish_reason != "stop":
            reason = "unfinished"
        elif not finished or self.markers.search(text):
            reason = "control_tokens"
        elif not printable(text):
            reason = "unprintable"
        elif len(tokens) < config.min_tokens or not text:
            reason = "too_short"
        elif config.longest is not None and len(tokens) > config.longest:
            reason = "too_long"
        elif distinct_share(tokens) < config.min_distinct:
            reason = "repetitive"
        return reason, tokens, text


def printable(text: str) -> bool:
    """Whether a text has only characters that a person could have sent: none of control, of private use, or undecoded.

    Joiners and marks of direction are part of some scripts.
    """
    return not any(
        character == "\ufffd"
        or (character not in "\n\t\r" and unicodedata.category(character) in ("Cc", "Cs", "Co", "Cn"))
        for character in text
    )


def distinct_share(tokens: Sequence[int]) -> float:
    """Different token n-grams of all of them; 1 for texts too short to tell."""
    ngrams = list(zip(*(islice(tokens, start, None) for start in range(NGRAM)), strict=False))
    return len(set(ngrams)) / len(ngrams) if len(ngrams) >= FEWEST_NGRAMS else 1.0


def user_texts(path: str | Path) -> Iterable[str]:
    """What users say in a file of conversations. ValueError for rows of another shape: they do not tell who speaks."""
    for row in read_prompts(path):
        if not is_conversation(row):
            raise ValueError(f"{row['source']}: self_prompts.exclude takes messages or conversations, in each row")
        yield from (turn["content"] for turn in turns(row) if turn["role"] == "user")


def statistics(prompts: Sequence[Prompt], counts: Counter[str]) -> dict[str, Any]:
    """Figures of the kept prompts, and of how many draws they took."""
    drawn = len(prompts) + counts.total()
    compared = len(prompts) + counts["duplicate"] + counts["near_duplicate"]
    first = [words(prompt.text)[:OPENING_WORDS] for prompt in prompts]
    openings = Counter(" ".join(opening) for opening in first)
    lengths = sorted(prompt.num_tokens for prompt in prompts)
    return {
        "yield": _share(len(prompts), drawn),
        "rejected_share": {name: _share(counts[name], drawn) for name in FILTERS},
        "duplicate_share": _share(counts["duplicate"], compared),
        "near_duplicate_share": _share(counts["near_duplicate"], compared),
        "tokens": {name: lengths[round(q * (len(lengths) - 1))] for name, q in QUANTILES.items()} if lengths else {},
        "distinct_first_words": _share(len({opening[:1][0] for opening in first if opening}), len(prompts)),
        "distinct_openings": _share(len(openings), len(prompts)),
        "frequent_openings": dict(openings.most_common(20)),
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
