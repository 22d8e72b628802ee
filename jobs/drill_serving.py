"""Drills of the endpoint: its processes are killed, clients leave, the alias names a version that is no good."""

import shutil
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import httpx

from jobs.drill_ground import Ground, Outcome, wait_until
from jobs.drill_load import CONTROLLER, PROXY, REPLICA, TARGET, Load, answers_since, endpoint, health, untrained
from jobs.drill_training import undisturbed_run

NAME = "domino-tiny-qwen3"
# What a client may be told before it asks again. 500: what Serve's proxy has for a request that its replica took along.
ALLOWED = {"503", "no connection", "cut off"}
REPLICA_GONE = ALLOWED | {"500"}


def serve_replica_killed(ground: Ground) -> Outcome:
    """One of two replicas is SIGKILLed under load.

    Must hold: no request is lost or wrong; those that the replica had are cut off or get a 500 or 503, and are answered
    when they are sent again, as the openai client does by itself; Serve starts another replica, which answers.

    Observed: four clients, half of them streaming, that compare every answer with the one before the kill; the metrics
    of a replica that began to answer after it.
    """
    with endpoint(ground, "serve.min_replicas=2", "serve.max_replicas=2") as url:
        load = Load(url=url)
        load.learn()
        with load.running():
            load.wait_for_answers()
            killed, since, then = ground.kill(REPLICA), time.monotonic(), time.time()
            first = load.wait_for_answers()
            wait_until(lambda: answers_since(url) > then, 200, "another replica that answers", every=0.2)
            replaced = time.monotonic() - since
            load.wait_for_answers()
    assert not killed.is_running()
    return served(load, first, {"seconds_to_replace": round(replaced, 1)}, REPLICA_GONE)


def serve_controller_or_proxy_killed(ground: Ground) -> Outcome:
    """Serve's controller is SIGKILLed under load, then its proxy.

    Must hold: without the controller requests are answered as before; without the proxy they are cut off or find nobody
    until Ray has started another one; none is lost or wrong; the replica and its engine stay.

    Observed: four clients, half of them streaming, that compare every answer; the replica's process is the same before
    and after.
    """
    with endpoint(ground) as url:
        load, replica = Load(url=url), ground.family(REPLICA)
        load.learn()
        with load.running():
            load.wait_for_answers()
            controller = ground.kill(CONTROLLER)
            without_controller = load.wait_for_answers()
            repeated = dict(load.repeated)
            wait_until(lambda: another(ground, CONTROLLER, controller.pid), 120, "another controller", every=0.2)
            load.wait_for_answers()
            ground.kill(PROXY)
            time.sleep(0.3)  # answers that were on their way
            without_proxy = load.wait_for_answers()
        same = [process.pid for process in ground.family(REPLICA)] == [process.pid for process in replica]
    found = served(load, max(without_controller, without_proxy), {"replica_stayed": same})
    if repeated:
        found.problems.append(f"requests were disturbed by the controller's end: {repeated}")
    if not same:
        found.problems.append("the replica was replaced")
    return found


def client_disconnects(ground: Ground) -> Outcome:
    """Clients leave in the middle of their streams, while others go on.

    Must hold: the rows of those who left are free long before their answers would have ended; no answer of the others
    is lost, wrong or cut off.

    Observed: `/health` counts the requests under way, against the seconds of such an answer that is read to its end;
    two clients that compare every answer.
    """
    body = {
        "model": TARGET.name,
        "prompt": ["x"] * 3,
        "max_tokens": 1000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with endpoint(ground, "serve.max_length=1024") as url, httpx.Client(timeout=60) as http:
        load, most = Load(url=url), 0
        load.learn()
        since = time.monotonic()
        http.post(f"{url}/completions", json=body).raise_for_status()
        whole = time.monotonic() - since
        with load.running(clients=2):
            for _ in range(6):
                with http.stream("POST", f"{url}/completions", json=body) as response:
                    lines = response.iter_lines()  # kept: dropping it closes the response
                    next(lines)
                    most = max(most, health(url)["requests"]["running"])
            since = time.monotonic()
            wait_until(lambda: health(url)["requests"]["running"] <= 2, 30, "the rows of clients that left")
            freed = time.monotonic() - since
            load.wait_for_answers()
        wait_until(lambda: health(url)["requests"]["running"] == 0, 30, "the end of all requests")
    found = served(load, freed, {"most_running": most, "seconds_of_an_answer": round(whole, 1)})
    if freed > whole / 3:
        found.problems.append(f"rows were free after {freed:.1f} s, and answers take {whole:.1f} s to their end")
    if load.repeated:
        found.problems.append(f"others were disturbed: {dict(load.repeated)}")
    if most < 4:
        found.problems.append(f"only {most} requests were running: nothing was shown")
    return found


def alias_moved(ground: Ground) -> Outcome:
    """The champion alias is moved by hand to a version that is corrupt, to one of another target, and to a slower one.

    Must hold: the old version keeps serving, no request is lost, wrong or sent again, and `/health` says why the
    version is not served; one that is good is then served within seconds. The gate has refused the slower one.

    Observed: two clients that compare every answer and see its drafter version; `/health`; `jobs.promote`.
    """
    from pipelines.registry import CHAMPION
    from pipelines.tracking import connect

    versions = registered(ground)
    client, reasons = connect(f"sqlite:///{ground.folder}/mlflow.db"), {}
    with endpoint(ground, f"serve.drafter=models:/{NAME}@{CHAMPION}", "serve.poll_seconds=0.5") as url:
        load = Load(url=url)
        load.learn()
        with load.running(clients=2):
            for kind in ("corrupt", "other-target", "slower"):
                client.set_registered_model_alias(NAME, CHAMPION, versions[kind])
                said = f"version {versions[kind]} is refused"
                wait_until(lambda said=said: said in problem_of(url), 60, f"the refusal of the {kind} version", 0.2)
                reasons[kind] = problem_of(url)
                load.wait_for_answers(4)
            served_meanwhile = set(load.versions)
            client.set_registered_model_alias(NAME, CHAMPION, versions["good"])
            since = time.monotonic()
            wait_until(lambda: load.versions[-1] == versions["good"], 60, "the good version")
            swapped = time.monotonic() - since
            load.wait_for_answers(4)
    found = served(load, swapped, {"reasons": {kind: reason[:160] for kind, reason in reasons.items()}})
    if served_meanwhile != {versions["first"]}:
        found.problems.append(f"versions {sorted(served_meanwhile)} were served, not {versions['first']} alone")
    if load.repeated:
        found.problems.append(f"requests were disturbed: {dict(load.repeated)}")
    return found


def registered(ground: Ground) -> dict[str, str]:
    """Numbers of five versions: the first is champion by the gate, which also refused the slower one."""
    from pipelines.registry import register
    from pipelines.tracking import connect

    run, place = undisturbed_run(ground), ground.folder
    drafters = {kind: place / kind / "drafter" for kind in ("first", "good", "corrupt")}
    shutil.copytree(run / "drafter", drafters["first"])
    shutil.copytree(sorted(run.glob("checkpoint_2*"))[-2] / "drafter", drafters["good"])
    untrained(ground, TARGET, "slower")
    shutil.copytree(drafters["good"], drafters["corrupt"])
    weights = drafters["corrupt"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    other = another_target(place)

    few = [f"root={place}", "evaluate.num_prompts=4", "evaluate.max_tokens=24", "evaluate.repeats=1"]
    few += ["gate.min_tau=1.0", "gate.min_speedup=0.0"]
    ground.run("promote-first", "jobs.promote", *few, "--run", "first")
    said = ground.run("promote-slower", "jobs.promote", *few, "--run", "slower", code=1)
    if "FAILED" not in said:
        raise RuntimeError(f"the gate did not refuse the slower version: …{said[-800:]}")
    client = connect(f"sqlite:///{place}/mlflow.db")
    numbers = {"first": "1", "slower": "2"}
    for kind in ("corrupt", "good"):
        numbers[kind] = register(client, drafters[kind], str(TARGET), place)
    drafted_elsewhere = untrained(ground, other, "other-target")
    numbers["other-target"] = register(client, drafted_elsewhere, str(other), place)
    return numbers


def another_target(place: Path) -> Path:
    """The embedded target with other weights and the same name, as two machines may have it."""
    from safetensors.torch import load_file, save_file

    folder = place / "elsewhere" / TARGET.name
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("prompts"))
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    return folder


def served(load: Load, recovered: float, seen: dict[str, Any], allowed: Set[str] = ALLOWED) -> Outcome:
    """The outcome of a drill under load: nothing lost, nothing wrong, and no other refusal than is allowed."""
    problems = [f"a request got {why}" for why in load.repeated if why not in allowed]
    problems += [f"lost: {each}" for each in load.lost[:3]] + [f"wrong: {each}" for each in load.wrong[:3]]
    return Outcome(
        problems=problems,
        seconds_to_recover=round(recovered, 1),
        lost=len(load.lost),
        wrong=len(load.wrong),
        seen=load.seen() | seen,
    )


def another(ground: Ground, title: str, pid: int) -> bool:
    return any(process.pid != pid for process in ground.family(title))


def problem_of(url: str) -> str:
    return health(url).get("drafter", {}).get("problem", "")
