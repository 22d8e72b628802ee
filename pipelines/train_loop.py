"""The training loop of a drafter."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained. The defaults are the published recipe for blocks of 16 (paper appendix)."""

    steps: int | None = None  # optimiser steps; None: from the rows and `epochs`
    epochs: int = 1
    batch_size: int = 2  # rows per worker and micro-batch
    accumulation: int = 1  # micro-batches per optimiser step
    num_anchors: int = 256  # blocks drawn per row
    gamma: float | None = None  # decay of the slot weights; None: 7 for blocks of 16, 5 for 10, 4 for 8
    learning_rate: float = 6e-4
    min_lr_ratio: float = 0.0
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    lambda_base_start: float = 1.0
    lambda_base_decay_ratio: float = 1.0
    seed: int = 42
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # of forward and backward; masters are float32
    chunk_blocks: int = 128
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    log_every: int = 10
    max_nonfinite: int = 10  # optimiser steps that may be skipped in a run
    num_workers: int = 1
    cpus_per_worker: float = 1.0
    use_gpu: bool = True
    max_failures: int = 3  # restarts of the worker group
