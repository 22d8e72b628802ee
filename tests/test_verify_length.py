"""The verified length: the best of what was measured, looked at again now and then, and of no effect on the output."""

import pytest

from domino_core.verify_length import EXPLORE_EVERY, TRIALS, VerifyLength, best_length, candidates


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


def simulate(choice: VerifyLength, rows: int, rounds: int, seconds, accepts) -> list[int]:
    chosen = []
    for number in range(rounds):
        chosen.append(choice.choose(rows))
        accepted = [min(accepts(number * rows + row), chosen[-1]) for row in range(rows)]
        choice.observe(rows, chosen[-1], accepted, seconds(rows, chosen[-1]))
    return chosen


def test_it_settles_on_the_best_and_goes_on_looking():
    """Acceptance collapses half way: what paid pays no longer, and that is noticed."""
    choice = VerifyLength(num_drafts=8)
    cost = lambda rows, length: 1.0 + 0.1 * length  # noqa: E731
    chosen = simulate(choice, 2, 300, cost, lambda n: 8 if n % 4 else 2)
    warm_up = TRIALS * len(candidates(8))
    assert set(chosen[warm_up:]) == {8}
    assert choice.accepted_at == pytest.approx([1, 1] + [0.75] * 6, abs=0.05)
    chosen = simulate(choice, 2, 2000, cost, lambda n: 0)
    assert chosen[-1] == 0
    assert chosen[-EXPLORE_EVERY:].count(8) == 1
    chosen = simulate(choice, 2, 3000, cost, lambda n: 8)
    assert chosen[-1] == 8


def test_loads_are_told_apart():
    """Alone a round costs the same at any length; with many rows it grows with the tokens."""
    choice = VerifyLength(num_drafts=8)
    cost = lambda rows, length: 1.0 if rows == 1 else rows * (1 + 1.5 * length)  # noqa: E731
    assert simulate(choice, 1, 100, cost, lambda n: 4)[-1] == 8
    assert simulate(choice, 16, 100, cost, lambda n: 4)[-1] == 0
    assert simulate(choice, 1, 5, cost, lambda n: 4)[-1] == 8


def test_a_slow_start_is_forgiven_and_a_slow_machine_is_followed():
    choice = VerifyLength(num_drafts=4)
    slow = iter([100.0, 50.0])
    chosen = simulate(choice, 1, 60, lambda rows, length: next(slow, 1.0), lambda n: 4)
    assert chosen[-1] == 4
    chosen = simulate(choice, 1, 300, lambda rows, length: 9.0 if length == 4 else 1.0, lambda n: 4)
    assert chosen[-1] != 4
