"""The rates give back what they were taken from, and the time between workers follows from bytes and bus."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.bench_shapes import SHAPES
from pipelines.rates import GPU_RATES, StepTime, exchange_time, prefill_operations, step_time
from pipelines.train_config import TrainConfig
from pipelines.training_work import num_parameters

MEASURED = json.loads((Path(__file__).parent.parent / "docs/results/training_h100.json").read_text())
ROWS = {name: row for name, row in MEASURED["training"]["qwen3_8b"].items() if "ms_per_step" in row}
DRAFTER, TOKEN_BYTES = SHAPES["qwen3_8b"].drafter, 40_960
PROMPT = 32  # tokens that are not supervised, of the rows of the measurement


def time_of(*, length: int = 768, **settings) -> StepTime:
    train = TrainConfig(**settings)
    context = train.num_anchors * (PROMPT + length) / 2
    return step_time(
        DRAFTER, train, GPU_RATES, tokens=length, blocks=train.num_anchors, context=context, token_bytes=TOKEN_BYTES
    )


@pytest.mark.parametrize("name", ROWS)
def test_every_measured_row_comes_out(name):
    point = re.match(r"length (\d+), batch (\d+)", name)
    length, batch = map(int, point.groups()) if point else (768, 2)  # the twins: the first point without compiling
    found = time_of(length=length, batch_size=batch, compile=point is not None)
    assert 1e3 * (found.compute + found.optimiser) == pytest.approx(ROWS[name]["ms_per_step"], rel=0.1)


def test_loading_is_the_measured_part():
    part = MEASURED["training"]["qwen3_8b"]["parts"]["draw blocks, and copy"]
    assert 1e3 * time_of(batch_size=2).load == pytest.approx(part["ms"], rel=0.05)


def test_accumulation_shares_the_optimiser_alone():
    one, four = time_of(), time_of(accumulation=4)
    assert four.compute == pytest.approx(4 * one.compute)
    assert four.load == pytest.approx(4 * one.load)
    assert four.optimiser == one.optimiser


def test_other_targets_follow_by_their_operations():
    at = {name: GPU_RATES.prefill_flops / prefill_operations(SHAPES[name].target, 1000) for name in SHAPES}
    assert at["qwen3_8b"] == pytest.approx(41_100, rel=0.01)
    assert at["qwen3_4b"] == pytest.approx(41_100 * 8.19 / 4.02, rel=0.15)  # by their parameters, about
    assert prefill_operations(SHAPES["qwen3_8b"].target, 3000) > prefill_operations(SHAPES["qwen3_8b"].target, 1000)


def test_what_passes_between_workers():
    parameters = num_parameters(DRAFTER)
    gradients = 4 * parameters

    def seen(**settings) -> float:
        return exchange_time(parameters, TrainConfig(**settings), GPU_RATES)

    assert seen() == seen(shard=True) == 0
    # Two workers send half of the gradients twice: 15 ms, once a step.
    assert seen(num_workers=2) == seen(num_workers=2, accumulation=4) == pytest.approx(gradients / 300e9)
    assert seen(num_workers=8) == pytest.approx(2 * 7 / 8 * gradients / 300e9)
    # Shards are sent half as often again, and copied on the card: 9 ms; more micro-batches gather them more often.
    assert seen(num_workers=2, shard=True) == pytest.approx(1.5 * gradients / 300e9 + 6 * gradients / 3e12)
    more = seen(num_workers=2, shard=True, accumulation=4)
    assert more == pytest.approx(4.5 * gradients / 300e9 + 18 * gradients / 3e12)


def test_shards_divide_the_optimiser():
    whole, shards = (time_of(num_workers=2, shard=shard) for shard in (False, True))
    assert shards.optimiser == whole.optimiser / 2
    assert math.isclose(whole.total, whole.compute + whole.optimiser + whole.exchange)
    slow = replace(whole, load=1.0)  # rows that come slower than they are trained on
    assert slow.total == 1.0
