"""The state of everything on one screen: Ray, jobs, the endpoint, the registry, the last training run.

    python -m jobs.status --preset tiny
    python -m jobs.status --preset qwen3_8b target=Qwen/Qwen3-8B root=/data/domino --json

Starts and changes nothing. A part that is not there is said to be missing, with the reason.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_core.redact import redacted
from jobs.overrides import job_parser, load, run_job

if TYPE_CHECKING:
    from jobs.presets import JobConfig


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """nodes: resources of each by its address; running: entry points, or why they cannot be told."""

    nodes: dict[str, dict[str, float]]
    total: dict[str, float]
    free: dict[str, float]
    running: list[str]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """replicas: how many by state. live: version of the replica that was asked; problem: why it is not the alias's."""

    url: str
    status: str
    replicas: dict[str, int]
    message: str = ""
    live: str = ""
    problem: str = ""
    requests: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A version behind an alias. tau: by data set, as the gate measured it. canary: of its tag, "" for none."""

    version: str
    gate: str
    canary: str
    tau: dict[str, float]
    speedup: float | None


@dataclass(frozen=True, kw_only=True)
class Training:
    """The run that wrote last, so many seconds ago. metrics: of its last log line; tau: from jobs.evaluate."""

    name: str
    state: str
    total_steps: int
    seconds_ago: float
    metrics: dict[str, float]
    tau: float | None
    balance: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """What was found; `missing` says of each other part why it is not here."""

    cluster: Cluster | None
    endpoint: Endpoint | None
    registry: dict[str, Registered] | None
    training: Training | None
    missing: dict[str, str]


class MissingError(ValueError):
    """A part that is not there, and why."""


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=("target",))
    if args.plan:
        print("would look at Ray, the endpoint, the registry and the runs, and change nothing")
        return
    from jobs.status_screen import screen

    found = status(job)
    print(json.dumps(asdict(found), indent=1) if args.json else "\n".join(screen(found, job.target)))


def status(job: JobConfig) -> Status:
    """Look at every part; none of them has to be there."""
    missing: dict[str, str] = {}

    def look(name: str, at: Callable[[JobConfig], Any]) -> Any:
        try:  # each part is a boundary to something that may be away
            return at(job)
        except MissingError as reason:
            missing[name] = redacted(str(reason))
            return None

    return Status(
        cluster=look("cluster", cluster),
        endpoint=look("endpoint", endpoint),
        registry=look("registry", registry),
        training=look("training", training),
        missing=missing,
    )


def cluster(job: JobConfig) -> Cluster:
    """The Ray of RAY_ADDRESS, or the one that runs on this machine. MissingError where there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from jobs.ray_session import connected

    if os.environ.get("RAY_ADDRESS") == "local" and not ray.is_initialized():
        raise MissingError("no cluster: RAY_ADDRESS=local asks for none that is running; unset it, or name one")
    if not ray.is_initialized():
        try:
            there = connected()
        except ValueError as error:
            raise MissingError(f"no cluster: {error}") from error
        if not there:
            raise MissingError("no cluster: start one (ray start --head), or name it with RAY_ADDRESS")
    nodes = {node["NodeManagerAddress"]: shown(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    total, free = shown(ray.cluster_resources()), shown(ray.available_resources())
    return Cluster(nodes=nodes, total=total, free=free, running=running_jobs())


def shown(resources: Mapping[str, float]) -> dict[str, float]:
    """CPUs, GPUs and GB; Ray's own entries for nodes and accelerators left out."""
    units = {"CPU": 1.0, "GPU": 1.0, "memory": 1e9, "object_store_memory": 1e9}
    return {name: round(resources.get(name, 0.0) / unit, 2) for name, unit in units.items()}


def running_jobs() -> list[str]:
    """Entry points of submitted jobs that run, this one left out. Ray's dashboard keeps the list."""
    import ray
    from ray.util.state import list_jobs
    from ray.util.state.exception import RayStateApiException

    here = ray.get_runtime_context()
    try:
        found = list_jobs(address=here.gcs_address, filters=[("status", "=", "RUNNING")])
    except RayStateApiException:
        return ["unknown: this Ray runs without its dashboard"]
    return [redacted(str(job["entrypoint"])) for job in found if job["job_id"] != here.get_job_id()]


def endpoint(job: JobConfig) -> Endpoint:
    """The application on the connected Ray, or else what answers at serve.host and serve.port."""
    import ray

    url = f"http://{job.serve.host}:{job.serve.port}/health"
    health = ask(url)
    if ray.is_initialized():
        from ray import serve as ray_serve
        from ray.serve.context import _get_global_client

        # The Ray that is connected may be another's, with an application of this name behind another port.
        controller = _get_global_client(raise_if_no_controller_running=False)
        here = controller is not None and controller.http_config.port == job.serve.port
        application = ray_serve.status().applications.get(job.serve.app_name) if here else None
        if application is not None:
            replicas = {
                str(state): count  # Serve gives the names
                for deployment in application.deployments.values()
                for state, count in deployment.replica_states.items()
            }
            return answered(url, health, str(application.status.value), replicas, application.message)
    if not health:
        raise MissingError(f"no endpoint: no application {job.serve.app_name} on a Ray, and nobody answers at {url}")
    return answered(url, health, health.get("status", "unknown"), {}, "")


def answered(url: str, health: dict[str, Any], state: str, replicas: dict[str, int], message: str) -> Endpoint:
    """An endpoint with what one replica said of itself."""
    drafter = health.get("drafter", {})
    requests = {name: count for name, count in health.get("requests", {}).items() if isinstance(count, int)}
    live, problem = str(drafter.get("live", "")), str(drafter.get("problem", ""))
    return Endpoint(
        url=url, status=state, replicas=replicas, message=message, live=live, problem=problem, requests=requests
    )


def ask(url: str) -> dict[str, Any]:
    """A replica's /health, also when it says that it failed; {} where nobody, or somebody else, answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            found = json.load(response)
    except urllib.error.HTTPError as error:
        found = {"status": f"answers {error.code}"}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def registry(job: JobConfig) -> dict[str, Registered]:
    """Aliases of the target's drafters. MissingError where there is no registry, or nothing in it."""
    from pipelines.registry import registered_name
    from pipelines.tracking import check_store, connect, tracking_uri

    uri, name = tracking_uri(job.tracking_uri, job.root), registered_name(job.target)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        raise MissingError(f"no registry: there is no {uri}")
    try:
        check_store(uri)
    except ValueError as error:
        raise MissingError(f"no registry: {error}") from error
    client = connect(uri)
    models = client.search_registered_models(f"name = '{name}'")
    if not models:
        raise MissingError(f"{uri} has no drafter of {job.target} yet ({name}): python -m jobs.promote")
    return {
        alias: registered(client.get_model_version(name, str(number)).tags, str(number))
        for alias, number in sorted(models[0].aliases.items())
    }


def registered(tags: dict[str, str], number: str) -> Registered:
    """A version by the tags that the gate left."""
    tau = {key.removeprefix("tau."): float(value) for key, value in tags.items() if key.startswith("tau.")}
    speedup = float(tags["speedup"]) if "speedup" in tags else None
    gate, canary = tags.get("gate", "not run"), tags.get("canary", "")
    return Registered(version=number, gate=gate, canary=canary, tau=tau, speedup=speedup)


def training(job: JobConfig) -> Training:
    """The run below the root that wrote last. MissingError where there is none."""
    from domino_core.json_files import read_json
    from pipelines.supply import Balance
    from pipelines.train_state import FINISHED_FILE, LIVE_FILE, RUN_FILE, STOPPED_FILE

    def last_word(folder: Path) -> float:
        names = (RUN_FILE, LIVE_FILE, FINISHED_FILE, STOPPED_FILE)
        return max((folder / name).stat().st_mtime for name in names if (folder / name).exists())

    runs = [file.parent for file in Path(job.root).glob(f"*/{RUN_FILE}")]
    if not runs:
        raise MissingError(f"no training run below {job.root}")
    folder = max(runs, key=last_word)
    live = read_json(folder / LIVE_FILE)["metrics"] if (folder / LIVE_FILE).exists() else {}
    state, history = ("under way or interrupted" if live else "started"), [live]
    if (folder / STOPPED_FILE).exists():
        state = f"stopped: {read_json(folder / STOPPED_FILE)}"
    elif (folder / FINISHED_FILE).exists():
        state, history = "finished", read_json(folder / FINISHED_FILE)["result"]["history"]
    measured = folder / "evaluation.json"
    balance = Balance.of(history)
    capture, train = job.capture, job.train
    return Training(
        name=folder.name,
        state=state,
        total_steps=read_json(folder / RUN_FILE)["started_with"]["total_steps"],
        seconds_ago=round(max(0.0, time.time() - last_word(folder)), 1),
        metrics=live or history[-1],
        tau=read_json(measured)["tau"] if measured.exists() else None,
        balance=balance.advice(capture.num_actors, train.num_workers) if balance else "",
    )


if __name__ == "__main__":
    sys.exit(run_job(main))
