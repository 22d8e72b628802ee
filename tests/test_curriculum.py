"""λ and the learning rate at the steps where they must have known values."""

import pytest

from domino_core.curriculum import base_weight, learning_rate


def test_base_weight_falls_linearly_from_one_to_zero():
    assert [base_weight(step, 4) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert base_weight(1, 10, decay_ratio=0.5) == pytest.approx(0.8)
    assert base_weight(5, 10, decay_ratio=0.5) == 0.0
    assert base_weight(2, 10, start=0.5) == pytest.approx(0.4)
    assert base_weight(0, 10, start=1.5) == 1.0
    assert base_weight(0, 1, decay_ratio=0.1) == 1.0


def test_learning_rate_warms_up_and_falls_to_the_floor():
    rates = [learning_rate(step, 100, 6e-4) for step in range(101)]
    assert rates[0] == pytest.approx(6e-4 / 4)
    assert rates[3] == rates[4] == max(rates) == pytest.approx(6e-4)
    assert rates[52] == pytest.approx(3e-4)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[99] < 1e-6
    assert rates[100] == pytest.approx(0.0)
    assert learning_rate(100, 100, 1.0, min_ratio=0.1) == pytest.approx(0.1)
    assert learning_rate(0, 10, 1.0, warmup_ratio=0.0) == 1.0


@pytest.mark.parametrize("total", [None, 0, -5])
def test_unknown_total_is_an_error_and_not_a_silent_zero(total):
    with pytest.raises(ValueError, match="number of optimiser steps"):
        base_weight(0, total)
    with pytest.raises(ValueError, match="number of optimiser steps"):
        learning_rate(0, total, 1e-3)
