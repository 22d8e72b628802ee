"""Near-duplicates against every pair compared in full, and what counts as a word and as the same text."""

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from pipelines.self_prompts_near import NearIndex, jaccard, normalised, shingles, sketch, words

ROOT = Path(__file__).resolve().parent.parent


def variants(seed: int, texts: int = 60, copies: int = 5) -> list[str]:
    """Random texts, each followed by copies with up to a third of their words changed."""
    draw = random.Random(seed)
    vocabulary = [f"word{number}" for number in range(300)]
    found = []
    for _ in range(texts):
        text = draw.choices(vocabulary, k=draw.randint(1, 40))
        found.append(" ".join(text))
        for _ in range(copies):
            copy = list(text)
            for _ in range(draw.randint(0, max(1, len(copy) // 3))):
                copy[draw.randrange(len(copy))] = draw.choice(vocabulary)
            found.append(" ".join(copy))
    draw.shuffle(found)
    return found


def in_full(text: str) -> set[tuple[str, ...]]:
    """The word 3-grams of a text, written plainly."""
    found = text.split()
    return {tuple(found[i : i + 3]) for i in range(len(found) - 2)} or {tuple(found)}


@pytest.mark.parametrize("threshold", [0.6, 0.7, 0.9, 1.0])
def test_the_index_finds_what_comparing_every_pair_finds(threshold):
    texts = variants(seed=0)
    index, kept, found = NearIndex(threshold), [], 0
    for text in texts:
        grams = in_full(text)
        near = [number for number, other in enumerate(kept) if len(grams & other) / len(grams | other) >= threshold]
        assert index.find(sketch(text)) == (near[0] if near else None), text
        if near:
            found += 1
        else:
            kept.append(grams)
            index.add(sketch(text))
    assert 20 < found < len(texts) - 60


def test_the_overlap_is_that_of_the_sets():
    texts = variants(seed=1, texts=20)
    for first, second in pairwise(texts):
        a, b = in_full(first), in_full(second)
        assert jaccard(shingles(first), shingles(second)) == len(a & b) / len(a | b)
    assert jaccard(shingles("a b c d"), shingles("a b c e")) == 1 / 3


def test_few_texts_are_compared():
    # Otherwise a hundred thousand prompts would take days.
    index, common = NearIndex(0.7), "write a python function that "
    draw = random.Random(2)
    for number in range(500):
        index.add(sketch(common * (number % 2) + " ".join(f"w{draw.randrange(5000)}" for _ in range(30))))
    compared = [number for key in sketch(common + "sorts a list").bands for number in index.buckets.get(key, ())]
    assert len(set(compared)) < 50


def test_the_same_in_every_process():
    # Python's own hashes of strings differ from process to process.
    code = "from pipelines.self_prompts_near import sketch; print(sketch('one two three four').bands)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == str(sketch("one two three four").bands)


def test_words():
    assert words("Don't SHOUT, \uff21\uff22!") == ["don", "t", "shout", "ab"]
    # Scripts without spaces: a character is a word, so that long sentences have n-grams too.
    assert words("東京は、tokyo です") == ["東", "京", "は", "tokyo", "で", "す"]
    assert len(shingles("東京の天気はどうですか")) == 9
    assert normalised("  What\n\nIS\tthis ") == "what is this"


def test_texts_of_few_words_or_none_are_near_to_themselves_alone():
    index = NearIndex(0.7)
    for text in ("Hello there", "?!", "+", "two words"):
        assert index.find(sketch(text)) is None
        index.add(sketch(text))
    assert index.find(sketch("hello, there")) == 0
    assert index.find(sketch("?!")) == 1
    assert index.find(sketch("?")) is None
