"""Measured rates of one device, and the time that extraction and a training step take by them.

What is computed is counted (pipelines.training_work); a rate says how much of it a device does in a second, all its
losses included. So another target or drafter is its own operations at the same rate: a little too good for sizes whose
products are too small to fill a card.
"""

from __future__ import annotations

from dataclasses import dataclass

from domino_core.config import DrafterConfig
from domino_core.target_model import TargetConfig
from pipelines.bench_shapes import layer_matrices
from pipelines.train_config import TrainConfig
from pipelines.training_work import num_parameters, step_work

MASTER_BYTES = 4  # of a weight or a gradient as the ranks exchange it


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device does in a second, or how long it takes for one."""

    prefill_flops: float
    train_flops: float  # of forward and backward, with compiled layers
    train_flops_eager: float  # and without
    pass_seconds_per_parameter: float  # of every forward and backward pass, whatever is in it
    step_seconds_per_parameter: float  # clipping and AdamW
    load_bytes_per_s: float  # features from the host's memory to the device, blocks drawn
    copy_bytes_per_s: float  # read and written, inside the device
    bus_bytes_per_s: float  # of an exchange between ranks, by the bytes that each of them must send
    decode_seconds_per_byte: float  # of weights, of one decoding step
    decode_seconds_per_row: float  # added to the step by every sequence in flight
    source: str


# Extraction: vLLM 0.26.0 alone does 41,100 tokens/s of Qwen3-8B in rows of 1,000, in bfloat16 on an H100 80GB. That is
# 74 % of one large product there (790e12), attention counted. Decoding: 6.80 ms a step for 1 sequence, 7.83 ms for 32,
# over 15.1 GB of weights (beyond 32 a straight line through these).
# Training: a line through docs/results/training_h100.json, 32 ms a step beside the operations, of which clip and AdamW
# have 14.5; without compiled layers from its last row; loading from "draw blocks, and copy": 62.9 MB in 11.1 ms;
# copies from its ceilings.
# The bus is assumed: about two thirds of what NVLink of an H100 has in one direction (450 GB/s). That an exchange is
# seen whole, although it runs beside a backward pass, is measured (docs/results/pipeline_h200.json): a step of two
# H200s took 22 ms longer than one card's where this rate says 15, and 32 ms longer in shards where it says 31.
GPU_RATES = Rates(
    prefill_flops=583e12,
    train_flops=535e12,
    train_flops_eager=405e12,
    pass_seconds_per_parameter=17.5e-3 / 1.104e9,
    step_seconds_per_parameter=14.5e-3 / 1.104e9,
    load_bytes_per_s=5.7e9,
    copy_bytes_per_s=3.0e12,
    bus_bytes_per_s=300e9,
    decode_seconds_per_byte=6.77e-3 / 15.1e9,
    decode_seconds_per_row=0.033e-3,
    source="measured on one H100 (vLLM 0.26.0; docs/results/training_h100.json); between cards assumed, NVLink",
)
# assets/tiny-qwen3 in float32 on one busy core of a 2.5 GHz Xeon with AVX-512: 5,700 tokens/s captured, 1,000 tokens/s
# answered by 128 sequences at a time; trained as in docs/results/quickstart.json, two workers, 8 rows in 405 ms each.
CPU_RATES = Rates(
    prefill_flops=50e9,
    train_flops=43e9,
    train_flops_eager=43e9,
    pass_seconds_per_parameter=0.0,
    step_seconds_per_parameter=28e-9,
    load_bytes_per_s=2e9,
    copy_bytes_per_s=8e9,
    bus_bytes_per_s=1e9,
    decode_seconds_per_byte=0.0,
    decode_seconds_per_row=1.0e-3,
    source="measured with the embedded target on one core of a 2.5 GHz Xeon",
)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an optimiser step, of every worker: they wait for each other."""

    compute: float  # forward and backward of all micro-batches
    load: float  # of the next step's rows, by a thread beside it
    optimiser: float
    exchange: float

    @property
    def total(self) -> float:
        return max(self.compute + self.optimiser + self.exchange, self.load)


def prefill_operations(target: TargetConfig, length: float) -> float:
    """Of a token in a row of `length`, on average. The output matrix is applied to one token of a row only."""
    heads = target.num_attention_heads * target.head_dim
    return target.num_hidden_layers * (2.0 * layer_matrices(target) + 4.0 * heads * (length + 1) / 2)


def step_time(
    config: DrafterConfig,
    train: TrainConfig,
    rates: Rates,
    *,
    tokens: float,
    blocks: float,
    context: float,
    token_bytes: float,
) -> StepTime:
    """Of a step over rows of `tokens` tokens with `blocks` blocks each, on average.

    context: tokens before a row's anchors, summed over its blocks. token_bytes: of the stored features of a token.
    """
    parameters, passes = num_parameters(config), train.accumulation
    rows = train.batch_size * passes
    work = step_work(config, tokens=rows * tokens, blocks=rows * blocks, context=rows * context)
    flops = rates.train_flops if train.compile else rates.train_flops_eager
    compute = work.operations / flops + passes * parameters * rates.pass_seconds_per_parameter
    divided = train.num_workers if train.shard else 1
    return StepTime(
        compute=compute,
        load=rows * tokens * token_bytes / rates.load_bytes_per_s,
        optimiser=parameters * rates.step_seconds_per_parameter / divided,
        exchange=exchange_time(parameters, train, rates),
    )


def exchange_time(parameters: int, train: TrainConfig, rates: Rates) -> float:
    """Seconds that exchanging adds to a step.

    DDP: one all-reduce of the gradients. In shards: the weights are gathered for every forward and again for every
    backward pass, and gradients are scattered once; what was gathered, and what will be scattered, is put in order by a
    copy.
    """
    workers, size = train.num_workers, MASTER_BYTES * parameters
    if workers == 1:
        return 0.0
    of_others = size * (workers - 1) / workers
    if not train.shard:
        return 2 * of_others / rates.bus_bytes_per_s
    times = 2 * train.accumulation + 1
    return times * of_others / rates.bus_bytes_per_s + 2 * times * size / rates.copy_bytes_per_s
