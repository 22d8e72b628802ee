"""Drills of submitted jobs: the driver is killed, the job is stopped, and the same job is submitted again.

On a Ray of their own that outlives the job, as a cluster does; what a job has started must not.
"""

import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from domino_core.json_files import read_json
from jobs.drill_ground import ROOT, Ground, Outcome, free_port, wait_until
from jobs.drill_training import (
    KILL_AT,
    RUN,
    checkpoints,
    judged,
    seconds_until_beyond,
    step_of,
    training,
    undisturbed,
    wait_for_step,
)

WORKER, DRIVER = "RayTrainWorker", "python -m jobs.train"


def driver_killed(ground: Ground) -> Outcome:
    """The driver of a submitted training job is SIGKILLed, and the same job is submitted again.

    Must hold: the cluster ends the job's workers; the second job goes on from the last checkpoint; every sample once an
    epoch; the undisturbed curve.

    Observed: the job's status, the processes, ledgers in the checkpoints, and the loss of every step against a run that
    nothing happened to.
    """
    expected, command = undisturbed(ground), training(ground)
    with head_node(ground) as address:
        job = submit(ground, address, command)
        wait_for_step(ground.folder / RUN, KILL_AT)
        driver = ground.kill(DRIVER)
        problems = ends_with(ground, address, job, "FAILED")
        problems += [f"process {driver.pid} is still there"] if driver.is_running() else []
        at, kept = step_of(ground.folder / RUN), checkpoints(ground.folder / RUN)
        again = submit(ground, address, command)
        recovered = seconds_until_beyond(ground.folder / RUN, at)
        problems += ends_with(ground, address, again, "SUCCEEDED")
    found = judged(ground, 0, expected, recovered, {"killed_at_step": at}, kept)
    found.problems.extend(problems)
    return found


def ray_job_stop(ground: Ground) -> Outcome:
    """A training job is ended by `ray job stop`, and the same job is submitted again.

    Must hold: the job's workers end, its run is not left as running in MLflow; the second job goes on from the last
    checkpoint; every sample once an epoch; the undisturbed curve.

    Observed: the status of job and run, the processes, ledgers in the checkpoints, and the loss of every step against a
    run that nothing happened to.
    """
    from pipelines.tracking import connect

    expected, command = undisturbed(ground), training(ground)
    with head_node(ground) as address:
        job = submit(ground, address, command)
        wait_for_step(ground.folder / RUN, KILL_AT)
        # What the command asks for, without the seconds that it takes to start.
        urllib.request.urlopen(urllib.request.Request(f"{address}/api/jobs/{job}/stop", method="POST")).close()
        ground.tell(f"stopped job {job}")
        problems = ends_with(ground, address, job, "STOPPED")
        tracked = read_json(ground.folder / RUN / "run.json")
        status = connect(tracked["tracking_uri"]).get_run(tracked["run_id"]).info.status
        if status == "RUNNING":
            problems.append("MLflow says that the stopped run is running")
        at, kept = step_of(ground.folder / RUN), checkpoints(ground.folder / RUN)
        again = submit(ground, address, command)
        recovered = seconds_until_beyond(ground.folder / RUN, at)
        problems += ends_with(ground, address, again, "SUCCEEDED")
    found = judged(ground, 0, expected, recovered, {"stopped_at_step": at, "status_in_mlflow": status}, kept)
    found.problems.extend(problems)
    return found


@contextlib.contextmanager
def head_node(ground: Ground) -> Iterator[str]:
    """The job address of a head node on free ports, which the drill's end stops with all that it started."""
    with scratch(ground) as folder:
        port = free_port()
        flags = ["--head", f"--port={free_port()}", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]
        start_node(ground, "head", folder, *flags, "--node-ip-address=127.0.0.1", "--num-cpus=4")
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{address}/api/version"), 120, "a head node", every=0.5)
        yield address


@contextlib.contextmanager
def scratch(ground: Ground) -> Iterator[Path]:
    """A folder for nodes, which are stopped when it goes. Its path is short: sockets lie below it."""
    folder = Path("/tmp") / f"ray-{ground.mark[:8]}"
    try:  # the cluster is ours to end
        yield folder
    finally:
        ground.end()
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def start_node(ground: Ground, name: str, folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    """`ray start` of a node on free ports, with a temporary folder and an object store of its own."""
    agent = ["--dashboard-agent-listen-port", "--dashboard-agent-grpc-port"]
    agent += ["--ray-client-server-port"] if "--head" in flags else []
    ports = [f"{flag}={free_port()}" for flag in agent]
    command = ["start", "--block", "--object-store-memory=268435456", f"--temp-dir={folder / name}", *ports, *flags]
    return ground.start(name, "ray.scripts.scripts", *command, RAY_TMPDIR=str(folder / name), RAY_ADDRESS="")


def answers(url: str) -> bool:
    try:  # nobody may listen
        urllib.request.urlopen(url, timeout=2).close()
    except OSError:
        return False
    return True


def ray(ground: Ground, *arguments: str) -> str:
    """A `ray` command's output."""
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ground.environment(RAY_ADDRESS=""), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ray {' '.join(arguments[:2])} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def submit(ground: Ground, address: str, command: list[str]) -> str:
    """The id of a submitted job, which is on its way."""
    flags = ["--address", address, "--working-dir", ".", "--no-wait"]
    said = ray(ground, "job", "submit", *flags, "--", "python", "-m", *command)
    found = re.search(r"raysubmit_\w+", said)
    assert found, said
    return found[0]


def ends_with(ground: Ground, address: str, job: str, wanted: str) -> list[str]:
    """What is wrong with the end of a job: another status than `wanted`, or workers that outlive it for a minute."""

    def status() -> str:
        with urllib.request.urlopen(f"{address}/api/jobs/{job}", timeout=30) as response:
            said = json.load(response)["status"]
        return said if said in ("SUCCEEDED", "FAILED", "STOPPED") else ""

    found = wait_until(status, 300, f"the end of {job}", every=1.0)
    if found != wanted:
        log = ray(ground, "job", "logs", "--address", address, job)[-800:]
        return [f"job {job} {found}, not {wanted}: …{log}"]
    try:
        wait_until(lambda: not ground.family(WORKER), 60, "the end of the workers", every=0.5)
    except RuntimeError as error:
        return [str(error)]
    return []
