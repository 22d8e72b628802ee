"""What a training checkpoint holds, so that a run goes on as if it had not stopped.

A folder with `state.pt` (weights, optimiser; tensors and plain values only) and `progress.json` (step, epoch, ledger of
acknowledged sample ids, metric history, and what the run was started with). λ and learning rate follow from the step
and the anchors from (seed, epoch, sample id), so there is no random state besides the seed. Written beside and renamed.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from domino_core.atomic_files import write_atomically
from domino_core.json_files import read_json
from pipelines.parallel import load_whole
from pipelines.train_loop import Progress

STATE_FILE = "state.pt"
PROGRESS_FILE = "progress.json"
DRAFTER_FOLDER = "drafter"  # in every checkpoint and in the run's folder: the published layout

# In the run's folder:
RUN_FILE = "run.json"  # what it was started with, and its tracking run
LEDGER_FILE = "resume_ledger.json"
FEATURES_FOLDER = "features"  # the cache that the stream writes through to
EVENTS_FOLDER = "events"  # what became of every prompt
SNAPSHOTS_FOLDER = "snapshots"  # drafters whose acceptance is being measured while training goes on
LIVE_FILE = "live.json"  # the latest metrics, for the progress bar
FINISHED_FILE = "finished.json"  # what a run that reached its end gave, with the digest of its drafter
STOPPED_FILE = "stopped.json"  # why a run ended before its end


def save_state(
    folder: str | Path,
    drafter: nn.Module,
    moments: dict[str, Any],
    progress: Progress,
    started_with: dict[str, Any],
) -> Path:
    """Write a checkpoint atomically; an existing folder is replaced. One rank does it.

    drafter, moments: of pipelines.parallel.whole_drafter and whole_optimizer_state. started_with: JSON-ready, see
    `changed`.
    """
    folder = Path(folder)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    torch.save({"drafter": drafter.state_dict(), "optimizer": moments}, beside / STATE_FILE)
    write_json(beside / PROGRESS_FILE, {"progress": asdict(progress), "started_with": started_with})
    if folder.exists():
        shutil.rmtree(folder)
    beside.rename(folder)
    return folder


def load_state(
    folder: str | Path, drafter: nn.Module, optimizer: torch.optim.Optimizer, started_with: dict[str, Any]
) -> Progress:
    """Restore weights and optimiser in place, whole or sharded as they lie, and return the progress.

    Every rank does it. ValueError if the run was started differently.
    """
    saved = read_progress(folder)
    if differences := changed(saved["started_with"], started_with):
        raise ValueError(f"checkpoint {folder} belongs to another run: {'; '.join(differences)}")
    # Mapped: a rank that holds a share brings no more than that into memory.
    state = torch.load(Path(folder) / STATE_FILE, map_location="cpu", weights_only=True, mmap=True)
    load_whole(drafter, optimizer, state["drafter"], state["optimizer"])
    return Progress(**saved["progress"])


def read_progress(folder: str | Path) -> dict[str, Any]:
    """{"progress": fields of Progress, "started_with": ...} of a checkpoint folder."""
    return read_json(Path(folder) / PROGRESS_FILE)


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two descriptions of a run, as `key: before -> now`; empty if a run may go on."""
    keys = sorted(before.keys() | now.keys())
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def write_json(path: Path, value: Any) -> None:
    """JSON through a file beside and a rename, so that a reader never sees half of it."""
    write_atomically(path, json.dumps(value).encode())
