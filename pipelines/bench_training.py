"""Steps of the trainer on random weights and features of real shapes, beside what they must take at the least.

The step is the trainer's own (train_loop.draw_blocks, backward, clip, optimiser), without data loading: rows are in
memory. Rows are of one length and supervised behind a short prompt, so every row has all the blocks that it is asked.

V vocabulary · D hidden
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from domino_core.block_attention import FlexAttention, RowAttention
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.losses import Drafts, block_losses
from pipelines.batches import Batch
from pipelines.bench_parts import synchronize
from pipelines.bench_shapes import Ceilings
from pipelines.train_config import TrainConfig
from pipelines.train_loop import MicroBatch, backward, clip, draw_blocks, new_optimizer, trainable
from pipelines.training_work import TrainingWork, num_parameters, training_work

GAMMA, LAMBDA = 7.0, 0.5
H100_BF16 = 989.4e12  # dense operations per second by its data sheet (SXM): what MFU is a share of
PROMPT = 32


@dataclass(frozen=True, kw_only=True)
class Point:
    """One line of the table."""

    length: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    points: tuple[Point, ...]
    num_anchors: int = 256
    steps: int = 8  # timed, after `warm_up`
    warm_up: int = 3
    twin: bool = True  # also the first point by the twins: no compiled layers, attention row by row


PLANS = {
    "full": TrainingPlan(points=tuple(Point(length=n, batch=b) for n in (768, 3072) for b in (2, 1, 4, 8))),
    "quick": TrainingPlan(points=(Point(length=768, batch=2),), steps=4, twin=False),
    "tiny": TrainingPlan(points=(Point(length=96, batch=2),), num_anchors=8, steps=2, warm_up=1),
}


class Trainee:
    """A drafter with its optimiser, as a worker has them."""

    def __init__(self, config: DrafterConfig, device: torch.device, settings: TrainConfig) -> None:
        self.config, self.device, self.settings = config, device, settings
        self.fast = settings.compile and device.type == "cuda"
        kind = getattr(torch, settings.precision)
        with torch.device(device):
            torch.manual_seed(0)
            embed_VD, lm_head_VD = (
                0.02 * torch.randn(config.vocab_size, config.hidden_size, dtype=kind) for _ in range(2)
            )
            self.drafter = Drafter(config, embed_VD, lm_head_VD).train()
        if self.fast:
            self.drafter.backbone.compile_layers()
        self.optimizer = new_optimizer(self.drafter, settings)

    def batch(self, point: Point, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        count = point.length * point.batch
        features_SC = torch.randn(point.length, self.config.feature_width, generator=generator)
        mask_T = (torch.arange(count) % point.length >= PROMPT).to(torch.uint8)
        return Batch(
            sample_ids=[f"{seed}-{row}" for row in range(point.batch)],
            lengths=[point.length] * point.batch,
            input_ids_T=torch.randint(self.config.vocab_size, (count,), generator=generator),
            loss_mask_T=mask_T.bool(),
            features_TC=features_SC.bfloat16().repeat(point.batch, 1),
        )

    def micro_batch(self, batch: Batch) -> MicroBatch:
        return draw_blocks(batch, self.config, GAMMA, self.settings, 0, self.device)

    def step(self, micro: MicroBatch) -> None:
        """Everything that the training loop does between two batches."""
        self.optimizer.zero_grad(set_to_none=True)
        backward(self.drafter, [micro], LAMBDA, micro.weight, GAMMA, self.settings)
        clip(trainable(self.drafter), self.settings.clip_norm)
        self.optimizer.step()


def training_table(
    config: DrafterConfig, plan: TrainingPlan, ceilings: Ceilings, device: torch.device
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, figures) of every point, as measured; then the parts of a step, and the twins, at the first point."""
    precision = "bfloat16" if device.type == "cuda" else "float32"
    settings = TrainConfig(num_anchors=plan.num_anchors, learning_rate=1e-5, precision=precision)
    trainee = Trainee(config, device, settings)
    for point in plan.points:
        yield f"length {point.length}, batch {point.batch}", _measure(trainee, point, plan, ceilings)
    first = plan.points[0]
    yield "parts", _parts(trainee, trainee.batch(first, 0), plan, ceilings)
    del trainee
    gc.collect()
    if plan.twin:
        slow = Trainee(
            config,
            device,
            TrainConfig(num_anchors=plan.num_anchors, learning_rate=1e-5, precision=precision, compile=False),
        )
        yield "twins (no compiled layers, attention row by row)", _measure(slow, first, plan, ceilings)


def _measure(trainee: Trainee, point: Point, plan: TrainingPlan, ceilings: Ceilings) -> dict[str, Any]:
    micros = [trainee.micro_batch(trainee.batch(point, seed)) for seed in range(2)]
    started = time.perf_counter()
    for index in range(plan.warm_up):
        trainee.step(micros[index % 2])
    synchronize(trainee.device)
    compiling = time.perf_counter() - started
    if trainee.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [_seconds(lambda i=index: trainee.step(micros[i % 2]), trainee.device) for index in range(plan.steps)]
    work = training_work(trainee.config, micros[0].rows)
    step = statistics.median(seconds)
    found = {
        "ms_per_step": 1e3 * step,
        "ms_per_sample": 1e3 * step / point.batch,
        "samples_per_s": point.batch / step,
        "tokens_per_s": point.batch * point.length / step,
        "tflop_per_sample": work.operations / point.batch / 1e12,
        "tflop_per_s": work.operations / step / 1e12,
        "mfu": work.operations / step / H100_BF16,
        "floor_ms_per_sample": floor_ms(work, ceilings) / point.batch,
        "warm_up_s": compiling,
        "each_ms": [1e3 * each for each in seconds],
    }
    if trainee.device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def floor_ms(work: TrainingWork, ceilings: Ceilings) -> float:
    """Matrix products at the rate of a large one, then the optimiser at the rate of a large copy."""
    return 1e3 * (work.operations / ceilings.operations_per_s + work.optimiser_bytes / ceilings.bytes_per_s)


def _parts(trainee: Trainee, batch: Batch, plan: TrainingPlan, ceilings: Ceilings) -> dict[str, Any]:
    """Milliseconds of the pieces of a step, each alone; the losses' forward pass holds most of their backward one."""
    micro = trainee.micro_batch(batch)
    drafter, config, rows = trainee.drafter, trainee.config, micro.rows
    work = training_work(config, rows)
    kind = {"device_type": trainee.device.type, "dtype": torch.bfloat16}
    enabled = trainee.settings.precision == "bfloat16"
    N = len(rows.anchors_X)
    z_XQD = torch.randn(N, config.num_drafts, config.hidden_size, device=trainee.device, dtype=drafter.lm_head_VD.dtype)
    low_XQR = z_XQD[..., : config.emb_dim].contiguous()
    labels_XQ = torch.randint(config.vocab_size, (N, config.num_drafts), device=trainee.device)
    weights_XQ = torch.ones_like(labels_XQ, dtype=torch.float32)
    assert drafter.head is not None
    last_VR = drafter.head.last_weight.detach().to(z_XQD.dtype)

    def losses() -> None:
        tensors = {"z_XQD": z_XQD, "low_XQR": low_XQR, "labels_XQ": labels_XQ, "weights_XQ": weights_XQ}
        drafts = Drafts(lm_head_VD=drafter.lm_head_VD, last_VR=last_VR, **tensors)
        block_losses(drafts, LAMBDA, trainee.settings.chunk_blocks * config.num_drafts)

    def backbone(*, backwards: bool) -> None:
        attention = (FlexAttention if trainee.fast else RowAttention)(rows, config.block_size)
        with torch.autocast(**kind, enabled=enabled), torch.set_grad_enabled(backwards):
            z_XKD = drafter.block_hidden(rows, attention)
        if backwards:
            z_XKD.backward(torch.ones_like(z_XKD))

    def update() -> None:
        clip(trainable(drafter), 1.0)
        trainee.optimizer.step()

    trainee.step(micro)
    rate, copy = ceilings.operations_per_s, ceilings.bytes_per_s
    backbone_work = work.context + work.layers + work.attention
    head_share = 3 * 2.0 * N * (config.num_drafts - config.pure_draft_prefix_len) * config.emb_dim * config.vocab_size
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "backbone, forward": (
            lambda: backbone(backwards=False),
            backbone_work / 3 / rate,
        ),
        "backbone, both ways": (lambda: backbone(backwards=True), backbone_work / rate),
        "losses, both ways": (losses, (work.vocabulary + head_share) / rate),
        "clip and optimiser": (update, work.optimiser_bytes / copy),
        "draw blocks, and copy": (lambda: trainee.micro_batch(batch), 0.0),
    }
    found: dict[str, Any] = {}
    for name, (call, floor) in calls.items():
        call()
        seconds = [_seconds(call, trainee.device) for _ in range(plan.steps)]
        found[name] = {"ms": 1e3 * statistics.median(seconds), "floor_ms": 1e3 * floor}
    return found | {"parameters": num_parameters(config), "work": asdict(work)}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started
