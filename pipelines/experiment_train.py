"""An arm trained: one process, the frozen target and what it says of the rows on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from domino_core.drafter import Drafter
from domino_core.target_model import Target
from domino_core.warm_start import warm_start
from pipelines.experiment_arms import Arm
from pipelines.experiment_baselines import Eagle, Medusa
from pipelines.experiment_batches import KnownRows, TargetBatches
from pipelines.experiment_data import Conversations
from pipelines.train_loop import Progress, new_optimizer, train, trainable

MODELS: dict[str, Callable[..., nn.Module]] = {"domino": Drafter, "eagle": Eagle, "medusa": Medusa}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A drafter in float32, and how it came about."""

    model: nn.Module
    seconds: float
    progress: Progress

    @property
    def num_parameters(self) -> int:
        return sum(each.numel() for each in trainable(self.model))


def new_model(arm: Arm, target: Target, seed: int) -> nn.Module:
    """The untrained drafter of an arm on the target's device; masters are float32."""
    torch.manual_seed(seed)
    return MODELS[arm.kind](arm.drafter, target.embed_VD, target.lm_head_VD).to(target.device)


def train_arm(
    arm: Arm,
    target: Target,
    data: Conversations,
    seed: int,
    on_log: Callable[[dict[str, float]], None] = lambda metrics: None,
    known: KnownRows | None = None,
    folder: str = "",
) -> Trained:
    """Train an arm from a seed, which decides weights, order and anchors. Seconds include compilation.

    known: what the target said of data's rows to other arms. folder: the target's, for arms that start as its layers.
    """
    started = time.perf_counter()
    config = replace(arm.train, seed=seed)
    model = new_model(arm, target, seed)
    device = target.device
    if config.compile and device.type == "cuda" and isinstance(model, Drafter):
        model.backbone.compile_layers()
    if config.warm_start_layers:
        assert isinstance(model, Drafter), "other drafters have no layers of the target's shape"
        warm_start(model, folder, config.warm_start_layers)
    optimizer = new_optimizer(model, config)
    rows = data.share(arm.data_share).train
    batches = TargetBatches(
        target,
        rows,
        arm.drafter.target_layer_ids,
        batch_size=config.batch_size,
        seed=seed,
        soft_labels=arm.soft_labels,
        known=known,
    )
    progress = train(
        model,
        optimizer,
        config,
        Progress(),
        total_steps=config.total_steps(len(rows)),
        batches_of=batches,
        on_log=on_log,
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Trained(model=model, seconds=time.perf_counter() - started, progress=progress)


def for_drafting(model: nn.Module, target: Target) -> Any:
    """The drafter in the type that the target decodes in, whose kernels it then shares."""
    return model.to(target.dtype).eval()
