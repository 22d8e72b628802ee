"""What runs in each Ray Train worker: build the drafter, restore the run, feed the loop, report checkpoints."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from domino_core.checkpoint import save_drafter
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.target import load_vocabulary
from domino_core.warm_start import warm_start
from pipelines.acceptance_probe import AcceptanceProbe, ProbePlan
from pipelines.batches import CachedFeatures, stream_collate
from pipelines.feature_store import write_ledger
from pipelines.parallel import spread, whole_drafter, whole_optimizer_state
from pipelines.supply import SupplyWindow
from pipelines.tracking import MetricLog
from pipelines.train_config import TrainConfig
from pipelines.train_gauges import TrainGauges
from pipelines.train_loop import Progress, TrainingStoppedError, gather, new_optimizer, train
from pipelines.train_state import (
    DRAFTER_FOLDER,
    EVENTS_FOLDER,
    LEDGER_FILE,
    LIVE_FILE,
    STOPPED_FILE,
    load_state,
    save_state,
    write_json,
)


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """Everything a worker needs to know, decided and checked by `pipelines.prepare` before any worker starts."""

    target: str
    drafter: DrafterConfig
    train: TrainConfig
    total_steps: int
    run_dir: str
    features: str  # folder of the feature cache
    stream_first_epoch: bool  # else the first epoch, too, is read from the cache
    tracking_uri: str
    run_id: str
    started_with: dict[str, Any]
    provenance: dict[str, Any]
    probe: ProbePlan | None = None


def train_worker(settings: dict[str, Any]) -> None:
    """Entry point for TorchTrainer; settings: {"plan": WorkerPlan}. Every rank runs it with the same plan."""
    import ray.train
    import ray.train.torch

    plan: WorkerPlan = settings["plan"]
    # Ray Train starts workers in a folder of the run. In a submitted job inputs are relative to the code that was sent.
    os.chdir(Path(__file__).parent.parent)
    # Batches differ in length from step to step, which fragments the allocator's fixed segments.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rank = ray.train.get_context().get_world_rank()
    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Ray shows all GPUs of the node to each worker; NCCL takes the current one
    drafter = build(plan, device)
    model = spread(drafter, shard=plan.train.shard)
    optimizer = new_optimizer(model, plan.train)
    progress = Progress()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            progress = load_state(folder, drafter, optimizer, plan.started_with)
    log = None
    if rank == 0:
        # Before anybody iterates: the stream's filter reads it when the stream starts to run.
        write_ledger(Path(plan.run_dir) / LEDGER_FILE, progress.acknowledged if progress.epoch == 0 else [])
        log = RunLog(plan, progress)
    if dist.is_initialized():
        dist.barrier()

    def on_log(metrics: dict[str, float]) -> None:
        if log is not None:
            log.line(metrics)
        if plan.probe is None:
            return
        # Rank 0 knows whether a snapshot is wanted, and a sharded drafter is put together by all ranks.
        if any(gather(log is not None and log.wants_snapshot())):
            whole = whole_drafter(drafter)
            if log is not None and whole is not None:
                log.measure(whole)

    try:  # a decision of ours, the same on every rank, is no reason for Ray to start the workers again
        train(
            model,
            optimizer,
            plan.train,
            progress,
            total_steps=plan.total_steps,
            batches_of=lambda epoch, skip: batches_of(plan, epoch, skip),
            on_log=on_log,
            on_checkpoint=lambda progress: report_checkpoint(plan, drafter, optimizer, progress),
        )
        last = whole_drafter(drafter) if plan.probe is not None else None
        if log is not None and last is not None:
            log.finish(last)
        if log is not None:
            log.metrics.close()
    except TrainingStoppedError as stop:
        if rank == 0:
            write_json(Path(plan.run_dir) / STOPPED_FILE, str(stop))


def report_checkpoint(plan: WorkerPlan, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Give Ray a checkpoint, which rank 0 writes and all ranks put together. They go on when Ray has stored it."""
    import ray.train

    metrics = progress.history[-1] if progress.history else {"step": progress.step}
    whole, moments = whole_drafter(drafter), whole_optimizer_state(optimizer)
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(metrics)
        return
    assert whole is not None
    with tempfile.TemporaryDirectory(prefix="domino-") as scratch:
        folder = save_state(Path(scratch) / "checkpoint", whole, moments, progress, plan.started_with)
        trained = {"steps": progress.step, "total_steps": plan.total_steps, "samples": progress.samples}
        trained |= {"skipped": progress.skipped, "metrics": metrics}
        save_drafter(whole, folder / DRAFTER_FOLDER, plan.provenance | {"training": trained})
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


class RunLog:
    """What rank 0 tells of a run, with supply and acceptance: to the tracking store, to Ray, to the run's folder."""

    def __init__(self, plan: WorkerPlan, progress: Progress) -> None:
        self.plan, self.progress = plan, progress
        self.metrics = MetricLog(plan.tracking_uri, plan.run_id, progress.history)
        self.gauges = TrainGauges(Path(plan.run_dir).name)
        self.supply = SupplyWindow(Path(plan.run_dir) / EVENTS_FOLDER)
        self.probe = AcceptanceProbe(plan.probe, progress.step) if plan.probe is not None else None

    def line(self, metrics: dict[str, float]) -> None:
        """A log line; `metrics` may get entries of its own here, for it belongs to the history of the run."""
        if self.plan.stream_first_epoch and metrics["epoch"] == 0:
            metrics.update(self.supply.reduce())
        if torch.cuda.is_available():
            metrics["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9  # of this rank's tensors, since the start
        self.metrics.add(metrics, int(metrics["step"]))
        self.gauges.set(metrics)
        write_json(Path(self.plan.run_dir) / LIVE_FILE, {"metrics": metrics, "skipped": self.progress.skipped})
        measured = self.probe.poll() if self.probe is not None else None
        if measured is not None:
            self.metrics.add(measured[1], measured[0])
            self.gauges.set(measured[1])

    def wants_snapshot(self) -> bool:
        return self.probe is not None and self.probe.wants(self.progress.step)

    def measure(self, drafter: Drafter) -> None:
        """Start to measure a whole drafter's acceptance."""
        assert self.probe is not None
        self.probe.measure(drafter, self.progress.step)

    def finish(self, drafter: Drafter) -> None:
        """The acceptance of the last step, when it has been measured."""
        assert self.probe is not None
        for step, figures in self.probe.finish(drafter, self.progress.step):
            self.metrics.add(figures, step)


def build(plan: WorkerPlan, device: torch.device) -> Drafter:
    """A new drafter on the device, equal on all ranks. Masters are float32."""
    frozen_type = torch.bfloat16 if plan.train.precision == "bfloat16" else torch.float32
    embed_VD, lm_head_VD = load_vocabulary(plan.target, device, frozen_type)
    torch.manual_seed(plan.train.seed)
    drafter = Drafter(plan.drafter, embed_VD, lm_head_VD).to(device)
    if plan.train.compile and device.type == "cuda":
        drafter.backbone.compile_layers()
    if plan.train.warm_start_layers:
        warm_start(drafter, plan.target, plan.train.warm_start_layers)
    return drafter


def batches_of(plan: WorkerPlan, epoch: int, skip: frozenset[str]) -> Iterable[Any]:
    """This rank's batches, of the first epoch from the stream (whose filter reads the ledger), then from the cache."""
    import ray.train

    context = ray.train.get_context()
    if epoch == 0 and plan.stream_first_epoch:
        shard = ray.train.get_dataset_shard("train")
        assert shard is not None
        return shard.iter_torch_batches(
            batch_size=plan.train.batch_size,
            collate_fn=stream_collate(pin_memory=torch.cuda.is_available()),
            prefetch_batches=2,
        )
    return CachedFeatures(
        plan.features,
        batch_size=plan.train.batch_size,
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        seed=plan.train.seed,
        epoch=epoch,
        skip=skip,
        pin_memory=torch.cuda.is_available(),
    )
