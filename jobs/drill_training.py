"""Drills of the training: what a killed worker, engine or driver costs, and a changed number of workers.

A small run on the embedded target: two epochs of 48 rows, 24 steps, a checkpoint every three. All checkpoints are kept,
so that their ledgers can be read: which sample ids had been trained on when it was written.
"""

import itertools
import re
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from domino_core.json_files import read_json
from jobs.drill_ground import Ground, Outcome, wait_until

ROWS, EPOCHS, STEPS = 48, 2, 24
RUN = "run"
SMALL = [
    f"num_rows={ROWS}", "answer.max_tokens=24", "capture.max_length=256", "capture.batch_size=8",
    "train.batch_size=2", "train.num_anchors=8", "train.cpus_per_worker=0.5", f"train.epochs={EPOCHS}",
    "train.checkpoint_every=3", "train.log_every=1", "train.keep_checkpoints=100",
]  # fmt: skip
SAME = 1e-4  # relative difference of two losses that only rounding tells apart
KILL_AT = 8  # steps: in the first epoch, behind two checkpoints


def train_worker_killed(ground: Ground) -> Outcome:
    """One of two Train workers is SIGKILLed in the middle of an epoch.

    Must hold: training goes on by itself from the last checkpoint; every sample once an epoch; the undisturbed curve.

    Observed: ledgers in the run's checkpoints, and the loss of every step against a run that nothing happened to.
    """
    expected = undisturbed(ground)
    process = ground.start("train", *training(ground))
    wait_for_step(ground.folder / RUN, KILL_AT)
    ground.kill("RayTrainWorker")
    at = step_of(ground.folder / RUN)
    recovered = seconds_until_beyond(ground.folder / RUN, at)
    return judged(ground, process.wait(300), expected, recovered, {"killed_at_step": at})


def vllm_actor_killed(ground: Ground) -> Outcome:
    """The actor with the vLLM engine is SIGKILLed while it captures rows that are trained on.

    Must hold: another engine starts and captures the rest; every sample once an epoch; a final loss within the spread
    of seeds.

    Observed: ledgers in the checkpoints; the mean loss of the last six steps against runs with three seeds.
    """
    ends = [last_loss(undisturbed(ground, seed)) for seed in (42, 43, 44)]
    process = ground.start("train", "jobs.train", f"root={ground.folder}", f"name={RUN}", *SMALL)
    cache = ground.folder / RUN / "features"
    wait_until(lambda: len(list(cache.glob("*.parquet"))) >= 2, 200, "two files of features")
    ground.kill("FeatureActor")
    since, captured = time.monotonic(), len(list(cache.glob("*.parquet")))
    wait_until(lambda: len(list(cache.glob("*.parquet"))) > captured, 200, "features after the kill")
    recovered = time.monotonic() - since
    found = judged(ground, process.wait(300), None, recovered, {"files_captured_when_killed": captured})
    if found.problems:
        return found
    end, room = last_loss(history(ground.folder / RUN)), max(ends) - min(ends)
    if not min(ends) - room <= end <= max(ends) + room:
        found.problems.append(f"final loss {end:.3f}, seeds give {min(ends):.3f} to {max(ends):.3f}")
    if captured * 8 >= ROWS:
        found.problems.append("everything had been captured before the kill: nothing was shown")
    seen = {"final_loss": round(end, 3), "of_three_seeds": [round(each, 3) for each in ends]}
    return replace(found, seen=found.seen | seen)


def workers_resized(ground: Ground) -> Outcome:
    """A run on two workers is interrupted, goes on with one, is interrupted again, and ends with two.

    Must hold: the same command with another number of workers goes on; every sample once an epoch, also the epochs in
    which the number changed; the undisturbed curve.

    Observed: ledgers in the checkpoints, and the loss of every step against a run that nothing happened to. The
    interruption is Ctrl-C.
    """
    expected = undisturbed(ground)
    one, two = ["train.num_workers=1", "train.accumulation=2"], ["train.num_workers=2"]
    at: list[int] = []
    kept: list[str] = []
    for number, (workers, step) in enumerate(((two, 5), (one, 14))):
        process = ground.start(f"train-{number}", *training(ground), *workers)
        wait_for_step(ground.folder / RUN, step)
        process.send_signal(signal.SIGINT)
        process.wait(120)
        at.append(step_of(ground.folder / RUN))
        kept += [name for name in checkpoints(ground.folder / RUN) if name not in kept]
    process = ground.start("train-2", *training(ground), *two)
    recovered = seconds_until_beyond(ground.folder / RUN, at[-1])
    return judged(ground, process.wait(300), expected, recovered, {"resized_at_steps": at}, kept)


def training(ground: Ground, *overrides: str) -> list[str]:
    """The command that trains from the shared features into the drill's folder."""
    return ["jobs.train", f"root={ground.folder}", f"name={RUN}", f"features={features(ground)}", *SMALL, *overrides]


def features(ground: Ground) -> Path:
    """The rows that drills train from, captured by `jobs.features` when the first drill asks."""
    folder = ground.inputs / "features"
    if not (folder / "ready").exists():
        ground.tell("capturing the features that drills share")
        ground.run("features", "jobs.features", f"root={ground.inputs}", f"features={folder}", *SMALL)
        (folder / "ready").touch()
    return folder


def undisturbed(ground: Ground, seed: int = 42) -> list[dict[str, float]]:
    """The history of a run that nothing happened to."""
    return history(undisturbed_run(ground, seed))


def undisturbed_run(ground: Ground, seed: int = 42) -> Path:
    """The folder of a run that nothing happened to, made when the first drill asks."""
    name = f"undisturbed-{seed}"
    folder = ground.inputs / name
    if not (folder / "finished.json").exists():
        features(ground)
        ground.tell(f"training the run that drills compare with, seed {seed}")
        shutil.rmtree(folder, ignore_errors=True)
        place = [f"root={ground.inputs}", f"name={name}", f"features={features(ground)}", f"train.seed={seed}"]
        ground.run(name, "jobs.train", *place, *SMALL)
    return folder


def judged(
    ground: Ground,
    code: int,
    expected: Sequence[dict[str, float]] | None,
    recovered: float,
    seen: dict[str, Any],
    kept: Sequence[str] = (),
) -> Outcome:
    """A finished run against what must hold of every one: ledgers, steps, samples, and the expected curve if any.

    kept: checkpoints from before the fault. One that began anew trains as well, and has the same curve without them.
    """
    run_dir = ground.folder / RUN
    if code != 0:
        said = "; ".join(ground.text(path.stem)[-500:] for path in sorted(ground.folder.glob("train*.log"))[-1:])
        return Outcome(problems=[f"the command ended with {code}: …{said}"], seconds_to_recover=round(recovered, 1))
    problems = ledger_problems(run_dir)
    if gone := set(kept) - set(checkpoints(run_dir)):
        problems.append(f"began anew: {', '.join(sorted(gone))} are not of the run's checkpoints any more")
    last = lineage(run_dir)[-1]
    counted = Counter(last["acknowledged"])
    lost, again = ROWS - len(counted), sum(counted.values()) - len(counted)
    if last["samples"] != ROWS * EPOCHS or [line["step"] for line in last["history"]] != list(range(1, STEPS + 1)):
        problems.append(f"{last['samples']} samples in {len(last['history'])} steps, not {ROWS * EPOCHS} in {STEPS}")
    wrong = 0 if expected is None else len(other_losses(last["history"], expected))
    seen = seen | ({} if expected is None else {"losses_that_differ": wrong})
    return Outcome(
        problems=problems,
        seconds_to_recover=round(recovered, 1),
        lost=lost,
        wrong=again + wrong,
        seen=seen | {"samples": last["samples"], "steps": len(last["history"])},
    )


def checkpoints(run_dir: Path) -> list[str]:
    """Folders of the checkpoints in Ray's books of a run."""
    books = read_json(run_dir / "checkpoint_manager_snapshot.json")
    return [entry["checkpoint_dir_name"] for entry in books["checkpoint_results"]]


def lineage(run_dir: Path) -> list[dict[str, Any]]:
    """The progress in every checkpoint that the run's result comes from, in the order of steps."""
    saved = [read_json(run_dir / name / "progress.json")["progress"] for name in checkpoints(run_dir)]
    return sorted(saved, key=lambda progress: progress["step"])


def ledger_problems(run_dir: Path) -> list[str]:
    """What the ledgers of a run's checkpoints say against it: within an epoch each goes on where the one before ended,
    grows by the rows of the steps between, names nothing twice, and at the epoch's end everything."""
    problems: list[str] = []
    saved = lineage(run_dir)
    if [progress["step"] for progress in saved] != list(range(3, STEPS + 1, 3)):
        problems.append(f"checkpoints at steps {[progress['step'] for progress in saved]}")
    for before, after in itertools.pairwise(saved):
        kept = before["acknowledged"] if before["epoch"] == after["epoch"] else []
        if after["acknowledged"][: len(kept)] != kept:
            problems.append(f"the ledger of step {after['step']} does not go on from that of step {before['step']}")
        if after["samples"] - before["samples"] != (after["step"] - before["step"]) * (ROWS * EPOCHS // STEPS):
            problems.append(f"{after['samples'] - before['samples']} samples from step {before['step']} on")
    for epoch in range(EPOCHS):
        ledgers = [progress["acknowledged"] for progress in saved if progress["epoch"] == epoch]
        counts = Counter(max(ledgers, key=len, default=[]))
        if len(counts) != ROWS or set(counts.values()) != {1}:
            twice = [name for name, count in counts.items() if count > 1]
            problems.append(f"epoch {epoch}: {ROWS - len(counts)} samples skipped, {len(twice)} trained on twice")
    return problems


def other_losses(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> list[int]:
    """Steps whose loss is not the expected one."""
    pairs = [(mine, other) for mine, other in zip(found, expected, strict=True)]
    return [
        int(mine["step"]) for mine, other in pairs
        if abs(mine["final_loss"] - other["final_loss"]) > SAME * abs(other["final_loss"])
    ]  # fmt: skip


def history(run_dir: Path) -> list[dict[str, float]]:
    return read_json(run_dir / "finished.json")["result"]["history"]


def last_loss(curve: Sequence[dict[str, float]]) -> float:
    return statistics.mean(line["final_loss"] for line in curve[-6:])


def step_of(run_dir: Path) -> int:
    """The last step that was logged; 0 before the first."""
    live = run_dir / "live.json"
    return int(read_json(live)["metrics"]["step"]) if live.exists() else 0


def wait_for_step(run_dir: Path, step: int) -> int:
    """Until `step` is done and Ray has a checkpoint in its books; the step that the run is at."""
    books = run_dir / "checkpoint_manager_snapshot.json"
    wait_until(lambda: books.exists() and step_of(run_dir) >= step, 240, f"step {step}", every=0.02)
    return step_of(run_dir)


def seconds_until_beyond(run_dir: Path, step: int) -> float:
    """Seconds from now to the first step after `step`. RuntimeError if the run was already at its end."""
    if step >= STEPS:
        raise RuntimeError("the run had ended before it was disturbed: nothing was shown")
    since = time.monotonic()
    wait_for_step(run_dir, step + 1)
    return time.monotonic() - since


def described(drill: Any) -> tuple[str, str, str]:
    """What a drill does, what must hold and how it is observed: the paragraphs of its docstring."""
    what, holds, observed = (" ".join(part.split()) for part in re.split(r"\n\s*\n", drill.__doc__.strip()))
    return what, holds.removeprefix("Must hold: "), observed.removeprefix("Observed: ")
