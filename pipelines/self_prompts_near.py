"""Near-duplicates among many short texts: MinHash finds candidates, the exact overlap of their word n-grams decides.

Two texts are near-duplicates if the Jaccard index of their sets of word 3-grams is at least a threshold. The hashes of
the 3-grams are permuted 128 times, and texts that share the four smallest values of one of 32 bands are compared
(Broder 1997; Leskovec et al., Mining of Massive Datasets, section 3.4). A pair with index s is compared with
probability 1 - (1 - s⁴)³²: 0.99985 at 0.7. What is no near-duplicate is never taken for one.

Everything is a function of the texts and their order: hashes are of their bytes, the permutations are constants.

N n-grams of a text · P permutations
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WORDS = 3  # of an n-gram
BANDS, ROWS = 32, 4
LOWEST_THRESHOLD = 0.6  # where 1.2% of the pairs are missed

# Scripts without spaces between words: each character counts as one.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")

Hashes = NDArray[np.uint64]


def normalised(text: str) -> str:
    """Text as duplicates are told: compatible characters, case and spaces do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    """The words of a normalised text, without punctuation."""
    return _WORD.findall(normalised(text))


def shingles(text: str) -> Hashes:
    """Hashes_N of the different word n-grams, sorted. A text of fewer words has one: all of it.

    Without any word (`?!`), the characters themselves are what it says.
    """
    found = words(text) or [normalised(text)]
    grams = {" ".join(found[i : i + WORDS]) for i in range(max(1, len(found) - WORDS + 1))}
    digests = b"".join(hashlib.blake2b(gram.encode(), digest_size=8).digest() for gram in grams)
    return np.sort(np.frombuffer(digests, dtype="<u8").astype(np.uint64))


def jaccard(first: Hashes, second: Hashes) -> float:
    """Shared n-grams of all n-grams of two texts."""
    both = np.sort(np.concatenate([first, second]))
    shared = int((both[1:] == both[:-1]).sum())
    return shared / (len(both) - shared)


@dataclass(frozen=True)
class Sketch:
    """What an index needs of a text."""

    hashes_N: Hashes
    bands: list[int]  # a key for each band


def sketch(text: str) -> Sketch:
    """The n-grams of a text and, for each band, its minima under ROWS permutations mixed to one number."""
    hashes_N = shingles(text)
    factors_P, offsets_P, weights_P = _permutations()
    minima_P = (hashes_N[None, :] * factors_P[:, None] + offsets_P[:, None]).min(axis=1)
    bands: list[int] = (minima_P * weights_P).reshape(BANDS, ROWS).sum(axis=1).tolist()
    return Sketch(hashes_N, bands)


@lru_cache(maxsize=1)
def _permutations() -> Hashes:
    """Factors, offsets and weights of all permutations. A number times an odd one, modulo 2⁶⁴, permutes all numbers;
    the numbers are hashes already, so a line is as good as any other permutation.
    """
    drawn = np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, (3, BANDS * ROWS), dtype=np.uint64)
    drawn[[0, 2]] |= np.uint64(1)
    return drawn


class NearIndex:
    """Texts to compare others with. About 7 kB for each."""

    def __init__(self, threshold: float) -> None:
        assert threshold >= LOWEST_THRESHOLD, f"pairs would be missed at {threshold}"
        self.threshold = threshold
        self.texts: list[Hashes] = []
        self.buckets: dict[int, tuple[int, ...]] = {}  # the key of a band: the texts that have it

    def add(self, text: Sketch) -> None:
        """Remember a text."""
        for key in text.bands:
            self.buckets[key] = (*self.buckets.get(key, ()), len(self.texts))
        self.texts.append(text.hashes_N)

    def find(self, text: Sketch) -> int | None:
        """The number of the first text added that this one is a near-duplicate of."""
        size = len(text.hashes_N)
        for index in sorted({index for key in text.bands for index in self.buckets.get(key, ())}):
            other = self.texts[index]
            # Sets of too different sizes cannot overlap enough.
            alike = min(size, len(other)) >= self.threshold * max(size, len(other))
            if alike and jaccard(text.hashes_N, other) >= self.threshold:
                return index
        return None
