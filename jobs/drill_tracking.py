"""Drills of an MLflow server that is down: at the start, during training, at promotion, during serving.

The server is MLflow's own, on a database and a folder of artifacts that outlive it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from domino_core.json_files import read_json
from jobs.drill_cluster import answers
from jobs.drill_ground import ROOT, Ground, Outcome, free_port, wait_until
from jobs.drill_load import HUNG, REPLICA, TARGET, Load, endpoint, health
from jobs.drill_serving import NAME, REPLICA_GONE, another, problem_of, served
from jobs.drill_training import RUN, STEPS, judged, training, undisturbed, undisturbed_run, wait_for_step

FEW = ["evaluate.num_prompts=4", "evaluate.max_tokens=24", "evaluate.repeats=1"]
FEW += ["gate.min_tau=1.0", "gate.min_speedup=0.0", "gate.margin=0.5"]


@dataclass(kw_only=True)
class Server:
    """An MLflow server that is killed and started again."""

    ground: Ground
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Until it answers."""
        place = self.ground.folder
        place.mkdir(parents=True, exist_ok=True)
        store = ["--backend-store-uri", f"sqlite:///{place}/server.db", "--artifacts-destination", f"{place}/artifacts"]
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        with self.ground.log("server").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *store, *address],
                cwd=ROOT,
                env=self.ground.environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: answers(f"{self.uri}/health"), 120, "an MLflow server", every=0.3)

    def kill(self) -> None:
        """SIGKILL, with its workers."""
        assert self.process is not None
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        self.ground.tell(f"killed the MLflow server (process {self.process.pid})")


def mlflow_down_at_start(ground: Ground) -> Outcome:
    """No MLflow server listens where one is named, when a command starts.

    Must hold: training, promotion and serving end within a minute, with one line that names the server, before anything
    is started or written; when the server is there, the same command goes through its checks.

    Observed: exit codes, what was printed, and the folder below root=.
    """
    server, root = Server(ground=ground, port=free_port()), ground.folder / "root"
    place = [f"root={root}", f"tracking_uri={server.uri}"]
    problems: list[str] = []
    seconds: dict[str, float] = {}
    for job in ("jobs.train", "jobs.promote", "jobs.deploy"):
        since = time.monotonic()
        said = ground.run(job, job, *place, code=2)
        seconds[job] = round(time.monotonic() - since, 1)
        if "Traceback" in said or server.uri not in said or "does not answer" not in said:
            problems.append(f"{job} does not say it in a line: …{said[-300:]}")
        if seconds[job] > 60:
            problems.append(f"{job} took {seconds[job]} s to say it")
    if root.exists():
        problems.append(f"{sorted(path.name for path in root.rglob('*'))} were written")
    since = time.monotonic()
    server.start()
    ground.run("again", "jobs.train", *place, "--plan")
    return Outcome(
        problems=problems, seconds_to_recover=round(time.monotonic() - since, 1), seen={"seconds_to_refuse": seconds}
    )


def mlflow_down_in_training(ground: Ground) -> Outcome:
    """The MLflow server is SIGKILLed in the middle of a run, and is back only after its end.

    Must hold: training goes on to its end and exports the drafter, with the undisturbed curve, and says what the server
    lacks; the same command, when the server is back, brings it every step once and ends the run there.

    Observed: the loss of every step against a run that nothing happened to; the history of the loss in MLflow.
    """
    from pipelines.tracking import connect

    expected = undisturbed(ground)
    with running(ground) as server:
        command = training(ground, f"tracking_uri={server.uri}")
        process = ground.start("train", *command)
        at = wait_for_step(ground.folder / RUN, 6)
        server.kill()
        code = process.wait(400)
        problems: list[str] = []
        if code != 0 or not (ground.folder / RUN / "drafter").is_dir():
            problems.append(f"training ended with {code}: …{ground.text('train')[-800:]}")
        elif "lacks a part of this run" not in ground.text("train"):
            problems.append("nothing says that the server lacks a part of the run")
        server.start()
        since = time.monotonic()
        ground.run("train-again", *command)
        recovered = time.monotonic() - since
        tracked = read_json(ground.folder / RUN / "run.json")
        client = connect(server.uri)
        steps = sorted(metric.step for metric in client.get_metric_history(tracked["run_id"], "final_loss"))
        status = client.get_run(tracked["run_id"]).info.status
    if steps != list(range(1, STEPS + 1)) or status != "FINISHED":
        problems.append(f"MLflow has steps {steps}, and says {status}")
    found = judged(ground, 0, expected, recovered, {"killed_at_step": at, "steps_in_mlflow": len(steps)})
    found.problems.extend(problems)
    return found


def mlflow_down_at_promotion(ground: Ground) -> Outcome:
    """The MLflow server is SIGKILLed while the gate measures a version that is to become champion.

    Must hold: the command ends with an error that names the server; the champion is the old one; the same command, when
    the server is back, registers nothing twice and makes the version champion.

    Observed: exit code and output; aliases and versions in the registry.
    """
    from pipelines.registry import CHAMPION
    from pipelines.tracking import connect

    with running(ground) as server:
        place = [f"root={ground.folder}", f"tracking_uri={server.uri}", *FEW]
        drafters(ground)
        ground.run("promote-first", "jobs.promote", *place, "--run", "first")
        process = ground.start("promote", "jobs.promote", *place, "--run", "second")
        client = connect(server.uri)
        wait_until(
            lambda: len(client.search_model_versions(f"name = '{NAME}'")) == 2, 120, "a registered version", 0.02
        )
        server.kill()
        code, problems = process.wait(200), []
        said = ground.text("promote")
        if code == 0 or "Traceback" in said or server.uri not in said:
            problems.append(f"the command ended with {code}: …{said[-500:]}")
        server.start()
        before = client.get_registered_model(NAME).aliases
        if before.get(CHAMPION) != "1":
            problems.append(f"the aliases are {before}")
        since = time.monotonic()
        ground.run("promote-again", "jobs.promote", *place, "--run", "second")
        recovered = time.monotonic() - since
        after = client.get_registered_model(NAME).aliases
        versions = len(client.search_model_versions(f"name = '{NAME}'"))
    if after.get(CHAMPION) != "2" or versions != 2:
        problems.append(f"afterwards {versions} versions, aliases {after}")
    line = next((line for line in said.splitlines() if line.startswith("error: ")), "")
    if not line:
        problems.append("no line says what is wrong")
    seen = {"exit_code": code, "said": line[:160]}
    return Outcome(problems=problems, seconds_to_recover=round(recovered, 1), seen=seen)


def mlflow_down_while_serving(ground: Ground) -> Outcome:
    """The MLflow server is SIGKILLED under the endpoint's load, and then the replica is, too.

    Must hold: answers go on, and `/health` names the server; the replica that Serve starts serves the version accepted
    last; when the server is back, a new champion is served within seconds; no request is lost or wrong.

    Observed: two clients that compare every answer and see its drafter version; `/health`.
    """
    from pipelines.registry import CHAMPION, promote, register
    from pipelines.tracking import connect

    with running(ground) as server:
        client, numbers = connect(server.uri), []
        for folder in drafters(ground):
            numbers.append(register(client, folder, str(TARGET), ground.folder))
        versions = [client.get_model_version(NAME, number) for number in numbers]
        promote(client, versions[0])
        settings = [f"serve.drafter=models:/{NAME}@{CHAMPION}", "serve.poll_seconds=0.5"]
        with endpoint(ground, f"tracking_uri={server.uri}", *settings) as url:
            load = Load(url=url)
            load.learn()
            with load.running(clients=2):
                load.wait_for_answers()
                server.kill()
                wait_until(lambda: "does not answer" in problem_of(url), 60, "a word about the server in /health", 0.2)
                reason = problem_of(url)
                load.wait_for_answers()
                undisturbed_by_server = not load.repeated
                replica = ground.kill(REPLICA)
                time.sleep(0.3)  # answers that were on their way
                without_replica = load.wait_for_answers(seconds=200)
                wait_until(lambda: another(ground, REPLICA, replica.pid), 10, "another replica")
                started_with = health(url)["drafter"]
                server.start()
                promote(client, versions[1])
                since = time.monotonic()
                wait_until(lambda: load.versions[-1] == numbers[1], 60, "the new champion")
                swapped = time.monotonic() - since
    seen = {"said": reason[:160], "the_new_replica": started_with, "seconds_to_swap": round(swapped, 1)}
    found = served(load, without_replica, seen, REPLICA_GONE | {HUNG})  # there is no other replica meanwhile
    if not undisturbed_by_server:
        found.problems.append("requests were disturbed by the server's end")
    if started_with["live"] != numbers[0] or "does not answer" not in started_with["problem"]:
        found.problems.append(f"the new replica said {started_with}")
    return found


@contextlib.contextmanager
def running(ground: Ground) -> Iterator[Server]:
    """A server until the end. Its clients, here too, give up after seconds."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    server = Server(ground=ground, port=free_port())
    server.start()
    try:  # the process is ours to end
        yield server
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            server.kill()


def drafters(ground: Ground) -> list:
    """Two drafters in runs of their own, `first` and `second`: the undisturbed run's, and it three steps earlier."""
    run = undisturbed_run(ground)
    earlier = sorted(run.glob("checkpoint_2*"))[-2]
    sources = {"first": run / "drafter", "second": earlier / "drafter"}
    return [shutil.copytree(source, ground.folder / name / "drafter") for name, source in sources.items()]
