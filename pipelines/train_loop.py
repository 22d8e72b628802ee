"""The training loop of a drafter: one visible function over batches, the same on one process and in a Ray Train worker.

What holds in it:
- The loss of an optimiser step is (sum over all its supervised drafts, on all ranks and micro-batches) / (sum of their
  weights). Anchors are drawn before the first forward pass, so the denominator is exact however rows are grouped.
- Anchors depend on (seed, epoch, sample id) alone: neither grouping, rank nor restart changes what is trained on.
- λ and the learning rate are functions of the step.
- A row counts as consumed when the optimiser step that used it is done, not when it was fetched.
- Gradients cross the ranks once per optimiser step.

Letters: T tokens of the rows of a micro-batch, end to end · S tokens of a row · C feature width.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from domino_core.block_attention import FlexAttention
from domino_core.blocks import PackedRows, labels_and_weights, pack, sample_anchors
from domino_core.config import DrafterConfig
from domino_core.curriculum import base_weight, learning_rate
from domino_core.losses import BlockLosses
from pipelines.muon import MuonAdamW, is_matrix
from pipelines.parallel import drafter_of, exchanging, whole_norm
from pipelines.read_ahead import read_ahead
from pipelines.train_config import TrainConfig
from pipelines.train_metrics import Window, all_sum


class TrainingStoppedError(RuntimeError):
    """The loop gave up, on all ranks alike; starting again from the last checkpoint would end here again."""


@dataclass(kw_only=True)
class Progress:
    """Where a run is. Complete at every checkpoint, between them `acknowledged` is what the last one knew."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    acknowledged: list[str] = field(default_factory=list)  # sample ids of this epoch, in the order trained on
    skipped: list[str] = field(default_factory=list)  # why, for each optimiser step that changed nothing
    history: list[dict[str, float]] = field(default_factory=list)  # one entry a log line


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows with the blocks drawn from them: one forward and backward pass. `weight`: sum of the slot weights."""

    sample_ids: list[str]
    rows: PackedRows
    weight: float


def train(  # noqa: PLR0915 (the one loop, meant to be read from top to bottom)
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    progress: Progress,
    *,
    total_steps: int,
    batches_of: Callable[[int, frozenset[str]], Iterable[Any] | None],
    on_log: Callable[[dict[str, float]], None] = lambda metrics: None,
    on_checkpoint: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Train until `total_steps`; `progress` is updated in place and returned.

    model: what pipelines.parallel.spread made of the Drafter; batches are moved to its device.
    batches_of(epoch, skip): this rank's batches of an epoch (pipelines.batches.Batch) without the ids in `skip`; None
    if there is no such epoch, which ends training early.
    on_log: called on every rank with the same metrics. on_checkpoint: every `checkpoint_every` steps and at the end.
    TrainingStoppedError: an epoch without rows; more than `max_nonfinite` skipped steps.
    """
    shape = drafter_of(model).config
    gamma = config.slot_decay(shape.block_size)
    device = next(model.parameters()).device
    pending: list[tuple[int, list[str]]] = []  # (step, ids) of this rank since the last exchange
    saved_at = progress.step
    window = Window(device)
    model.train()

    while progress.step < total_steps:
        epoch_batches = batches_of(progress.epoch, frozenset(progress.acknowledged))
        if epoch_batches is None:
            break
        epoch_rows = len(progress.acknowledged)
        draw = partial(draw_blocks, shape=shape, gamma=gamma, config=config, epoch=progress.epoch, device=device)
        wanted = (total_steps - progress.step) * config.accumulation
        source = read_ahead(iter(epoch_batches), draw, wanted)
        while progress.step < total_steps:
            with window.waiting():
                micro_batches = list(itertools.islice(source, config.accumulation))
            ids = [sample_id for micro in micro_batches for sample_id in micro.sample_ids]
            # The one small exchange before the work: does anybody still have rows, and what is the denominator?
            # A rank without rows goes on with an empty block until all have none, so that no rank waits for another.
            rows, denominator = all_sum([len(ids), sum(micro.weight for micro in micro_batches)], device)
            if rows == 0:
                break
            lam = base_weight(progress.step, total_steps, config.lambda_base_start, config.lambda_base_decay_ratio)
            rate = learning_rate(
                progress.step, total_steps, config.learning_rate, config.warmup_ratio, config.min_lr_ratio
            )
            micro_batches = micro_batches or [empty_micro_batch(shape, device)]
            optimizer.zero_grad(set_to_none=True)
            losses = backward(model, micro_batches, lam, denominator, gamma, config)
            grad_norm = clip(trainable(model), config.clip_norm)
            # The norm is of the summed gradients, the same number everywhere: all ranks take the same branch.
            if math.isfinite(grad_norm):
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                window.add(losses, len(ids), sum(sum(micro.rows.lengths) for micro in micro_batches))
            else:
                skip_step(progress, config, micro_batches, losses)
            progress.step += 1
            progress.samples += int(rows)
            epoch_rows += int(rows)
            pending.append((progress.step, ids))
            if progress.step % config.log_every == 0 or progress.step == total_steps:
                gauges = {"step": progress.step, "epoch": progress.epoch, "skipped_steps": len(progress.skipped)}
                gauges |= {"lambda_base": lam, "learning_rate": rate, "grad_norm": grad_norm}
                progress.history.append(window.reduce() | gauges)
                on_log(progress.history[-1])
                window = Window(device)
            if progress.step % config.checkpoint_every == 0 or progress.step == total_steps:
                acknowledge(progress, pending)
                on_checkpoint(progress)
                saved_at = progress.step
        source.close()
        if progress.step < total_steps:
            # Rows that were consumed before a restart count: the epoch may have ended right there.
            if epoch_rows == 0:
                raise TrainingStoppedError(f"epoch {progress.epoch} gave no rows: look for failed captures in the log")
            progress.epoch += 1
            progress.acknowledged = []
            pending.clear()
    if saved_at != progress.step:
        on_checkpoint(progress)
    return progress


def backward(
    model: nn.Module,
    micro_batches: list[MicroBatch],
    lam: float,
    denominator: float,
    gamma: float,
    config: TrainConfig,
) -> list[BlockLosses]:
    """Accumulate the gradient of one optimiser step and exchange it between ranks, once. Returns detached losses."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    block_size = drafter_of(model).config.block_size
    found: list[BlockLosses] = []
    for index, micro in enumerate(micro_batches):
        device = micro.rows.input_ids_T.device
        flex = config.compile and device.type == "cuda" and len(micro.rows.anchors_X) > 0
        attention = FlexAttention(micro.rows, block_size) if flex else None
        with exchanging(model, last=index == len(micro_batches) - 1):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bfloat16"):
                losses = model(
                    micro.rows,
                    gamma,
                    lam,
                    chunk_blocks=config.chunk_blocks,
                    attention=attention,
                    reach=config.reach,
                )
            # An exchange averages over the ranks; we want the sum, over one global denominator.
            (world * losses.objective(denominator)).backward()
        found.append(losses.detach())
    return found


def clip(parameters: list[nn.Parameter], most: float) -> float:
    """The norm of all gradients, which are scaled down to `most` if it is more: else they are not touched again."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = whole_norm(nn.utils.get_total_norm(gradients))
    if not float(norm) <= most:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return float(norm)


def new_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Of what is trainable, on the device where it lies."""
    parameters, rate, decay = trainable(model), config.learning_rate, config.weight_decay
    if config.optimizer == "muon":
        vocab_size = drafter_of(model).config.vocab_size
        matrices = [parameter for parameter in parameters if is_matrix(parameter, vocab_size)]
        others = [parameter for parameter in parameters if not is_matrix(parameter, vocab_size)]
        return MuonAdamW(matrices, others, lr=rate, weight_decay=decay)
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=fused)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimiser moves; embedding table and output matrix are buffers and not among them."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def draw_blocks(
    batch: Any, shape: DrafterConfig, gamma: float, config: TrainConfig, epoch: int, device: torch.device
) -> MicroBatch:
    """Draw the anchors of a batch and move it to the device. batch: pipelines.batches.Batch on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # which is a matter of each thread
    anchors: list[torch.Tensor] = []
    for mask_S, sample_id in zip(batch.loss_mask_T.split(batch.lengths), batch.sample_ids, strict=True):
        digest = hashlib.blake2b(f"{config.seed}/{epoch}/{sample_id}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        anchors.append(sample_anchors(mask_S, config.num_anchors, generator))
    features_TC = batch.features_on(device, getattr(torch, config.precision))
    rows = pack(batch.input_ids_T, batch.loss_mask_T, features_TC, batch.lengths, anchors)
    rows = replace(rows, likely_TJ=batch.likely_TJ, shares_TJ=batch.shares_TJ)
    _, weights_XQ = labels_and_weights(rows, shape, gamma)
    return MicroBatch(sample_ids=list(batch.sample_ids), rows=rows.to(device), weight=float(weights_XQ.double().sum()))


def empty_micro_batch(shape: DrafterConfig, device: torch.device) -> MicroBatch:
    """A row of one block that weighs nothing: gradients are zero, and the rank takes part in their exchange."""
    ids_T, features_TC = torch.zeros(2, dtype=torch.long), torch.zeros(2, shape.feature_width)
    rows = pack(ids_T, torch.zeros(2, dtype=torch.bool), features_TC, [2], [torch.zeros(1, dtype=torch.long)])
    return MicroBatch(sample_ids=[], rows=rows.to(device), weight=0.0)


def gather(value: Any) -> list[Any]:
    """One small object of every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def acknowledge(progress: Progress, pending: list[tuple[int, list[str]]]) -> None:
    """Move the ids that all ranks trained on since the last call into the ledger, in the order of steps, then ranks."""
    everywhere = sorted(itertools.chain.from_iterable(gather(pending)), key=lambda entry: entry[0])
    progress.acknowledged.extend(sample_id for _, ids in everywhere for sample_id in ids)
    pending.clear()


def skip_step(
    progress: Progress, config: TrainConfig, micro_batches: list[MicroBatch], step_losses: list[BlockLosses]
) -> None:
    """Note the samples behind a non-finite gradient; TrainingStoppedError after `max_nonfinite`. All ranks call it."""
    suspects: list[str] = []
    for micro, losses in zip(micro_batches, step_losses, strict=True):
        finite_T = torch.isfinite(micro.rows.features_TC).all(dim=1)
        finite = [bool(finite_S.all()) for finite_S in finite_T.split(micro.rows.lengths)]
        damaged = [name for name, good in zip(micro.sample_ids, finite, strict=False) if not good]
        if not damaged and not bool(torch.isfinite(losses.final_sum + losses.base_sum)):
            damaged = micro.sample_ids
        suspects += damaged
    named = list(itertools.chain.from_iterable(gather(suspects)))
    if not named:  # finite losses, non-finite gradient: any row of the step
        named = list(itertools.chain.from_iterable(gather([i for micro in micro_batches for i in micro.sample_ids])))
    progress.skipped.append(f"step {progress.step}: gradient not finite, update skipped; samples {', '.join(named)}")
    if len(progress.skipped) > config.max_nonfinite:
        raise TrainingStoppedError(
            f"{progress.skipped[-1]}; {len(progress.skipped)} such steps, train.max_nonfinite={config.max_nonfinite}"
        )
