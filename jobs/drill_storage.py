"""Drills of what is on disk: a checkpoint of which half is written, and a disk that fills up."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from jobs.drill_ground import Ground, Outcome
from jobs.drill_training import (
    ROWS,
    RUN,
    SMALL,
    checkpoints,
    judged,
    seconds_until_beyond,
    step_of,
    training,
    undisturbed,
    wait_for_step,
)

WHOLE = ("state.pt", "progress.json", "drafter/config.json", "drafter/model.safetensors", "drafter/provenance.json")


def checkpoint_half_written(ground: Ground) -> Outcome:
    """Driver, workers and Ray are SIGKILLed while a checkpoint is being copied to its place.

    Must hold: the same command goes on from the last whole checkpoint and never reads the half one; every sample once
    an epoch; the undisturbed curve.

    Observed: the folder's files when everything was stopped; ledgers in the checkpoints, and the loss of every step
    against a run that nothing happened to.
    """
    expected, run_dir = undisturbed(ground), ground.folder / RUN
    process = ground.start("train-0", *training(ground))
    wait_for_step(run_dir, 3)
    half = half_a_checkpoint(ground, run_dir, process)
    ground.end()
    process.wait(30)
    kept = checkpoints(run_dir)
    lacks = [name for name in WHOLE if not (half / name).exists()]
    ground.tell(f"{half.name} lacks {', '.join(lacks) or 'the end of a file'}")
    process = ground.start("train-1", *training(ground))
    recovered = seconds_until_beyond(run_dir, step_of(run_dir))
    return judged(ground, process.wait(300), expected, recovered, {"half_checkpoint_lacks": lacks}, kept)


def half_a_checkpoint(ground: Ground, run_dir: Path, process: subprocess.Popen[bytes]) -> Path:
    """A checkpoint folder that is not whole, its writers stopped. RuntimeError if none was caught."""
    workers = ground.family("RayTrainWorker")
    known = {path: size_of(path) for path in run_dir.glob("checkpoint_*") if path.is_dir()}
    while process.poll() is None:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it is being written, and may be whole in a moment
            for name in os.listdir(run_dir):
                path = run_dir / name
                if not name.startswith("checkpoint_20") or path in known or not size_of(path):
                    continue
                for worker in workers:
                    worker.suspend()
                if size_of(path) < max(known.values(), default=0) * 0.95 or not all(
                    (path / each).exists() for each in WHOLE
                ):
                    return path
                known[path] = size_of(path)
                for worker in workers:
                    worker.resume()
    raise RuntimeError("the run ended before half a checkpoint was seen")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def disk_full(ground: Ground) -> Outcome:
    """The disk fills up while features are cached.

    Must hold: the command ends with an error that names the full disk; the rows that are in the cache are whole, and
    nothing unfinished takes room; with room again the same command captures the rest, every row once.

    Observed: `jobs.features` into a file system of 2 MB in memory, which is then made larger; its files are read.
    """
    from pipelines.feature_store import cached_rows

    folder = ground.folder / "disk"
    command = ["jobs.features", f"root={ground.folder}", f"features={folder}", *SMALL, "--ignore-disk"]
    with small_disk(folder, "2m") as refused:
        if refused:
            return Outcome(skipped=f"no file system can be mounted here ({refused})")
        process = ground.start("features-0", *command)
        code = process.wait(300)
        said, problems = ground.text("features-0"), []
        if code == 0 or "No space left on device" not in said:
            problems.append(f"the command ended with {code}: …{said[-600:]}")
        kept = cached_rows(folder)
        unfinished = [path.name for path in folder.rglob(".*") if path.is_file()]
        if unfinished:
            problems.append(f"unfinished files take room: {', '.join(unfinished)}")
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        since = time.monotonic()
        ground.run("features-1", *command)
        recovered = time.monotonic() - since
        found = cached_rows(folder)
        rows = sum(count_rows(path) for path in folder.glob("*.parquet"))
        seen = {"rows_when_full": len(kept), "rows": rows}
    return Outcome(
        problems=problems,
        seconds_to_recover=round(recovered, 1),
        lost=ROWS - len(found),
        wrong=rows - len(found),
        seen=seen,
    )


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[str]:
    """A file system of this size at `folder`; yields why there is none, or nothing."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    try:  # it must not outlive the drill
        yield mounted.stderr.strip() if mounted.returncode else ""
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def count_rows(path: Path) -> int:
    import pyarrow.parquet as pq

    return pq.read_metadata(path).num_rows
