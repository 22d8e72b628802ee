"""How a drafter is trained: every number of the recipe, and what follows from them alone."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained. The defaults are the published recipe for blocks of 16 (paper, appendix)."""

    steps: int | None = None  # optimiser steps; None: from the rows and `epochs`
    epochs: int = 1
    batch_size: int = 2  # rows per worker and micro-batch
    accumulation: int = 1  # micro-batches per optimiser step
    num_anchors: int = 256  # blocks drawn per row
    gamma: float | None = None  # decay of the slot weights; None: 7 for blocks of 16, 5 for 10, 4 for 8
    reach: float = 0.0  # share of losses.acceptance_weights in the slot weights; 0: the published decay alone
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the layers (pipelines.muon)
    learning_rate: float = 6e-4
    min_lr_ratio: float = 0.0
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warm_start_layers: tuple[int, ...] = ()  # target layers that the draft layers start as; (): a random start
    lambda_base_start: float = 1.0
    lambda_base_decay_ratio: float = 1.0
    seed: int = 42
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # of forward and backward; masters are float32
    chunk_blocks: int = 256  # blocks whose logits exist at once
    compile: bool = True  # on a GPU: draft layers by torch.compile, with flex attention; costs a minute at the start
    checkpoint_every: int = 1000  # steps
    keep_checkpoints: int = 2
    log_every: int = 10  # steps
    max_nonfinite: int = 10  # optimiser steps of a run that may be skipped because of them
    num_workers: int = 1
    shard: bool = False  # the drafter's weights, gradients and moments among the workers; else whole on each
    cpus_per_worker: float = 1.0
    use_gpu: bool = True
    gpus_per_worker: float = 1.0  # less where one worker shares its card with a capture engine
    max_failures: int = 3  # restarts of the worker group
    acceptance_every: int | None = None  # steps between measurements of τ on held-out prompts, beside the training
    acceptance_prompts: int = 16
    acceptance_gpus: float = 0.0  # share of a card that measuring takes; 0: it decodes on a CPU

    def __post_init__(self) -> None:
        positive = ("epochs", "batch_size", "accumulation", "num_anchors", "learning_rate", "clip_norm", "chunk_blocks")
        positive += ("checkpoint_every", "keep_checkpoints", "log_every", "num_workers", "cpus_per_worker")
        positive += ("gpus_per_worker", "lambda_base_decay_ratio", "acceptance_prompts")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"train.{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup_ratio", "min_lr_ratio", "lambda_base_start", "reach"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"train.{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.optimizer == "muon" and self.shard:
            raise ValueError("train.optimizer=muon needs whole matrices: leave train.shard=false, or take adamw")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"train.seed must be between 0 and 2^63 - 1, got {self.seed}")
        for name in ("steps", "gamma", "acceptance_every"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"train.{name} must be positive or none, got {getattr(self, name)}")
        for name in ("weight_decay", "max_nonfinite", "max_failures", "acceptance_gpus"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} must not be negative, got {getattr(self, name)}")

    @property
    def global_batch(self) -> int:
        """Rows per optimiser step."""
        return self.batch_size * self.accumulation * self.num_workers

    def slot_decay(self, block_size: int) -> float:
        """gamma: as given, or the published value for the block size (half the block where none was published)."""
        return self.gamma or {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)

    def total_steps(self, num_rows: int | None) -> int:
        """Optimiser steps of the run, which define λ and the learning rate. An epoch's last one may be smaller."""
        if self.steps is not None:
            return self.steps
        if not num_rows:
            raise ValueError("the number of steps is unknown: give train.steps=, or data whose rows can be counted")
        return self.epochs * math.ceil(num_rows / self.global_batch)
