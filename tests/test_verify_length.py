"""The verified length: the best of what was measured, looked at again now and then, and of no effect on the output."""

import pytest

from domino_core.verify_length import EXPLORE_EVERY, VerifyLength, best_length, candidates


def test_candidates_are_parts_of_the_block():
    assert candidates(16) == (0, 4, 8, 16)
    assert candidates(15) == (0, 3, 7, 15)
    assert candidates(4) == (0, 1, 2, 4)
    assert candidates(1) == (0, 1)
    assert candidates(0) == (0,)


@pytest.mark.parametrize(
    ("seconds", "accepted_at", "length"),
    [
        ({0: 1.0, 2: 1.5, 4: 2.0}, [0.9, 0.8, 0.7, 0.6], 4),  # 1, 1.8, 2.0 tokens per second
        ({0: 1.0, 2: 1.5, 4: 3.0}, [0.9, 0.8, 0.1, 0.1], 2),
        ({0: 1.0, 2: 1.5, 4: 2.0}, [0.2, 0.1, 0.0, 0.0], 0),
        ({0: 1.0}, [], 0),
    ],
)
def test_the_best_length_gives_most_tokens_per_second(seconds, accepted_at, length):
    assert best_length(seconds, accepted_at) == length


def simulate(choice: VerifyLength, rows: int, rounds: int, accepts) -> list[int]:
    chosen = []
    for number in range(rounds):
        chosen.append(choice.choose(rows))
        choice.observe(chosen[-1], [min(accepts(number * rows + row), chosen[-1]) for row in range(rows)])
    return chosen


LENGTHS = candidates(8)


def test_it_settles_on_the_best_and_goes_on_looking():
    """Acceptance collapses half way: what paid pays no longer, and that is noticed."""
    choice = VerifyLength(num_drafts=8, seconds={2: {length: 1.0 + 0.1 * length for length in LENGTHS}})
    chosen = simulate(choice, 2, 300, lambda n: 8 if n % 4 else 2)
    assert set(chosen) == {8}
    assert choice.accepted_at == pytest.approx([1, 1] + [0.75] * 6, abs=0.05)
    chosen = simulate(choice, 2, 2000, lambda n: 0)
    assert chosen[-1] == 0
    assert chosen[-EXPLORE_EVERY:].count(8) == 1
    chosen = simulate(choice, 2, 3000, lambda n: 8)
    assert chosen[-1] == 8


def test_loads_are_told_apart():
    """Alone a round costs the same at any length; with many rows it grows with the tokens."""
    seconds = {1: dict.fromkeys(LENGTHS, 1.0), 16: {length: 1 + 1.5 * length for length in LENGTHS}}
    choice = VerifyLength(num_drafts=8, seconds=seconds)
    assert simulate(choice, 1, 100, lambda n: 8)[-1] == 8
    assert simulate(choice, 16, 400, lambda n: 4)[-1] == 0
    assert simulate(choice, 9, 100, lambda n: 4)[-1] == 0  # as the next larger one
    assert simulate(choice, 20, 100, lambda n: 4)[-1] == 0
    assert simulate(choice, 1, 5, lambda n: 8)[-1] == 8


def test_whole_blocks_come_first():
    """Before anything is known of deeper drafts, none is ruled out."""
    choice = VerifyLength(num_drafts=8, seconds={1: {length: 1.0 + length for length in LENGTHS}})
    chosen = simulate(choice, 1, 40, lambda n: 0)
    assert set(chosen[:8]) == {8}
    assert set(chosen[9:]) == {0}


def test_a_batch_larger_than_the_memory_counts_whole():
    choice = VerifyLength(num_drafts=2, seconds={512: {0: 1.0, 2: 1.0}})
    choice.observe(2, [2] * 512)
    choice.observe(2, [0] * 512)
    assert choice.accepted_at == [0.0, 0.0]
