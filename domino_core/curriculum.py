"""The base-anchored curriculum and the learning rate: pure functions of the optimiser step."""

import math


def base_weight(step: int, total_steps: int | None, start: float = 1.0, decay_ratio: float = 1.0) -> float:
    """λ of losses.mix at an optimiser step 0, 1, …: from `start` linearly to 0 after decay_ratio · total_steps.

    The published schedule, clamped to 0..1. Early the base loss alone shapes the backbone, late the corrected one.
    """
    decay_steps = max(1, math.floor(_check_total(total_steps) * decay_ratio))
    return min(1.0, max(0.0, start * (1.0 - step / decay_steps)))


def learning_rate(
    step: int, total_steps: int | None, peak: float, warmup_ratio: float = 0.04, min_ratio: float = 0.0
) -> float:
    """Linear warm-up to `peak`, then a cosine down to min_ratio · peak at total_steps.

    The first step already moves (peak / warm-up steps), the last one still does.
    """
    total = _check_total(total_steps)
    warmup_steps = math.floor(total * warmup_ratio)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total - warmup_steps))
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def _check_total(total_steps: int | None) -> int:
    # Elsewhere an unknown total has silently meant λ = 0 from the first step, i.e. no curriculum.
    if total_steps is None or total_steps < 1:
        raise ValueError(
            f"The schedules need the number of optimiser steps, got total_steps={total_steps}; "
            "give the steps, or the number of rows from which they follow"
        )
    return total_steps
