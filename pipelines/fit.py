"""One training run, from prompts or captured features to an exported drafter.

    prompts -> feature stream (vLLM actors, Ray Data; written through to the cache) -> Ray Train workers -> checkpoint

Everything that can be wrong is looked for before anything starts (`pipelines.prepare`). The same name again goes on
where the run stopped: weights, optimiser, step, λ and data position come from its last checkpoint. A run that is
finished starts nothing.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from domino_core.checkpoint import folder_digest, put_in_place
from domino_core.json_files import read_json
from domino_core.redact import redacted
from pipelines.build_features import feature_dataset
from pipelines.feature_store import read_events
from pipelines.prepare import FitRequest, check_cluster, prepare
from pipelines.tracking import EXPERIMENT, MetricLog, connect, end_run, has_run, reopen_run, start_run
from pipelines.train_state import (
    DRAFTER_FOLDER,
    EVENTS_FOLDER,
    FINISHED_FILE,
    LIVE_FILE,
    RUN_FILE,
    STOPPED_FILE,
    read_progress,
    write_json,
)
from pipelines.train_worker import WorkerPlan, train_worker


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A finished run. `drafter`: folder in the published layout with provenance.json; history: one entry a log line."""

    drafter: Path
    run_id: str
    steps: int
    history: list[dict[str, float]]
    tracking_uri: str


def fit(request: FitRequest) -> FitResult:
    """Train and export. Needs a Ray that is running (`ray.init`). Blocks until the drafter is there.

    ValueError for what is wrong before the start; RuntimeError if training fails or gives up.
    """
    import ray.train
    import ray.train.torch

    prepared = prepare(request)
    if (done := finished(request, prepared.plan)) is not None:
        return done
    check_cluster(request)
    plan = replace(prepared.plan, run_id=open_run(request, prepared.plan))
    (request.run_dir / STOPPED_FILE).unlink(missing_ok=True)
    train = request.train
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={"plan": plan},
        datasets={"train": feature_dataset(prepared.source, seed=train.seed)} if prepared.source else None,
        # A rank may wait for its first rows while an engine loads a large target.
        torch_config=ray.train.torch.TorchConfig(timeout_s=7200),
        scaling_config=ray.train.ScalingConfig(
            num_workers=train.num_workers,
            use_gpu=train.use_gpu,
            resources_per_worker={"CPU": train.cpus_per_worker, "GPU": train.gpus_per_worker if train.use_gpu else 0},
        ),
        run_config=ray.train.RunConfig(
            name=request.name,
            storage_path=str(Path(request.root).resolve()),
            failure_config=ray.train.FailureConfig(max_failures=train.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=train.keep_checkpoints),
        ),
    )
    client, stopped = connect(plan.tracking_uri), request.run_dir / STOPPED_FILE
    try:  # whatever ends the run, the bar ends and the tracking store hears of it
        with progress_bar(request.run_dir, plan.total_steps), own_interrupts():
            checkpoint = trainer.fit().checkpoint
        if stopped.exists():
            raise RuntimeError(read_json(stopped))
        if checkpoint is None:
            raise RuntimeError(f"run {request.name} ended without a checkpoint: look at the workers' log above")
        with checkpoint.as_directory() as folder:
            progress = read_progress(folder)["progress"]
            exported = export(Path(folder) / DRAFTER_FOLDER, request.run_dir / DRAFTER_FOLDER)
    except BaseException as error:
        by_user = isinstance(error, KeyboardInterrupt)
        end_run(client, plan.run_id, "KILLED" if by_user else "FAILED", {})
        if not stopped.exists():
            with contextlib.suppress(OSError):  # a full disk may be what ended it
                write_json(stopped, "interrupted" if by_user else f"failed with {type(error).__name__}")
        raise
    digest = folder_digest(exported)
    done = {"run_id": plan.run_id, "steps": progress["step"], "history": progress["history"]}
    done |= {"tracking_uri": redacted(plan.tracking_uri)}
    complete = MetricLog(plan.tracking_uri, plan.run_id, progress["history"]).close()
    if complete and end_run(client, plan.run_id, "FINISHED", {"drafter": digest}):
        write_json(request.run_dir / FINISHED_FILE, {"digest": digest, "result": done})
    else:  # the drafter is there; what the store lacks is in the checkpoint
        print(
            f"{redacted(plan.tracking_uri)} lacks a part of this run: give the command again when it answers",
            file=sys.stderr,
        )
    return FitResult(drafter=exported, **done)


def finished(request: FitRequest, plan: WorkerPlan) -> FitResult | None:
    """What an earlier call gave, if the drafter that it left is still the one that is there."""
    file, drafter = request.run_dir / FINISHED_FILE, request.run_dir / DRAFTER_FOLDER
    if not file.exists() or not drafter.is_dir():
        return None
    saved = read_json(file)
    if saved["digest"] != folder_digest(drafter) or saved["result"]["tracking_uri"] != redacted(plan.tracking_uri):
        return None
    if not has_run(connect(plan.tracking_uri), saved["result"]["run_id"]):
        return None
    return FitResult(drafter=drafter, **saved["result"])


def open_run(request: FitRequest, plan: WorkerPlan) -> str:
    """Id of the tracking run: a new one, or the one of the run that is resumed (if its store still has it)."""
    client, run_file = connect(plan.tracking_uri), request.run_dir / RUN_FILE
    if run_file.exists() and reopen_run(client, read_json(run_file)["run_id"]):
        return read_json(run_file)["run_id"]
    tags = {key: str(plan.provenance[key]) for key in ("target", "target_hash", "data_hash", "commit")}
    params = {key: str(value) for key, value in plan.started_with.items()}
    run_id = start_run(client, EXPERIMENT, request.root, request.name, params, tags)
    write_json(
        run_file, {"started_with": plan.started_with, "run_id": run_id, "tracking_uri": redacted(plan.tracking_uri)}
    )
    return run_id


def export(source: Path, folder: Path) -> Path:
    """Copy a drafter folder; whoever reads `folder` by domino_core.checkpoint sees the old one or the new one."""
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    put_in_place(fresh, folder)
    return folder


@contextlib.contextmanager
def own_interrupts() -> Iterator[None]:
    """KeyboardInterrupt where Ctrl-C ended the block, as everywhere else.

    Ray Train handles it while it runs: it ends the workers, then in errors of its own or in an exit that looks like a
    success, and it would go on swallowing it afterwards. Python tells of signals by a file, too, whoever handles them.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heard, tell = os.pipe()
    for end in (heard, tell):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(BlockingIOError):  # no signal
            if signal.SIGINT in os.read(heard, 4096):
                raise KeyboardInterrupt from error
        raise
    finally:
        signal.set_wakeup_fd(before)
        os.close(heard)
        os.close(tell)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def progress_bar(run_dir: Path, total_steps: int) -> Iterator[None]:
    """Show what the workers leave in the run's folder; reading files works wherever the workers' logs go."""
    (run_dir / LIVE_FILE).unlink(missing_ok=True)
    finished = threading.Event()

    def watch() -> None:
        told = 0  # messages about skipped steps that were shown
        slow = 0.5 if sys.stderr.isatty() else 15.0  # in a log file a line now and then
        with tqdm(total=total_steps, unit="step", desc="train", mininterval=slow) as bar:
            while not finished.wait(0.5 if (run_dir / LIVE_FILE).exists() else 3.0):
                told = show(bar, run_dir, told)
            show(bar, run_dir, told)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def show(bar: tqdm, run_dir: Path, told: int) -> int:
    """Bring the bar up to date; returns how many messages about skipped steps have been shown."""
    if not (run_dir / LIVE_FILE).exists():  # engines start, then answer: minutes without a step
        events = read_events(run_dir / EVENTS_FOLDER)
        counts = f"{len(events.answered)} prompts answered, {len(events.captured)} rows captured"
        bar.set_postfix_str(counts if events.answered or events.captured else "starting")
        return told
    state = read_json(run_dir / LIVE_FILE)
    live = state["metrics"]
    for message in state["skipped"][told:]:
        bar.write(message, file=sys.stderr)
    bar.set_postfix_str(
        f"loss {live['final_loss']:.3f} base {live['base_loss']:.3f} λ {live['lambda_base']:.2f} "
        f"{live['final_accepted']:.2f} tokens a round, {live['samples_per_s']:.1f} rows/s, "
        f"{live['data_wait_share']:.0%} waiting for data",
        refresh=False,
    )
    bar.update(int(live["step"]) - bar.n)
    return len(state["skipped"])
