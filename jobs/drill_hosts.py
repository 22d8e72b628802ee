"""The whole path over two hosts: not a fault, but what every drill and every run on a cluster rests on.

The hosts are two nodes of Ray on this machine, at 127.0.0.2 and 127.0.0.3, each with ports, CPUs, a temporary folder
and an object store of its own: what goes from one to the other goes through sockets. Engines, workers and replicas ask
for more than half of a node's CPUs, so no node can hold two of them. Runs and features lie in one folder, as on the
network file system that a cluster's nodes share; the registry is a server.
"""

import re
import socket
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.drill_cluster import answers, ends_with, scratch, start_node, submit
from jobs.drill_ground import Ground, Outcome, free_port, wait_until
from jobs.drill_load import PROMPTS, TARGET, Load
from jobs.drill_serving import NAME, served
from jobs.drill_tracking import FEW, Server
from jobs.drill_training import RUN, SMALL, history, judged

HOSTS = ("127.0.0.2", "127.0.0.3")
ENGINE, WORKER, REPLICA = "FeatureActor", "RayTrainWorker", "ServeReplica:domino"
TOKENS = "ray_vllm_generation_tokens_total"


def two_hosts(ground: Ground) -> Outcome:
    """Submitted jobs capture, train, gate, promote and deploy on a cluster of two hosts, and clients ask the endpoint.

    Must hold: on each host one engine captures, one worker trains and one replica answers; every sample once an epoch,
    and the losses of a run on one host; the gate makes the version champion; every answer is that of plain decoding.

    Observed: the nodes of Ray's actors, and the tokens on each host's metrics port; ledgers, and the loss of every step
    against a run on the same features without a cluster; six clients that compare every answer with the target's own.
    """
    if missing := [host for host in HOSTS if not can_listen(host)]:
        return Outcome(skipped=f"this machine has no address {', '.join(missing)}")
    place, port = ground.folder, free_port()
    features = place / "features"
    small = [*SMALL, "capture.num_actors=2", "capture.cpus_per_actor=2", "train.cpus_per_worker=2"]
    server, problems, hosts = Server(ground=ground, port=free_port()), [], {}
    server.start()
    where = [f"root={place}", f"tracking_uri={server.uri}"]
    with scratch(ground) as folder:
        address, metrics = two_nodes(ground, folder)

        def carry_out(*command: str) -> None:
            ground.tell(f"submitted {command[0]}")
            problems.extend(ends_with(ground, address, submit(ground, address, list(command)), "SUCCEEDED"))

        carry_out("jobs.features", *where, f"features={features}", *small)
        carry_out("jobs.train", *where, f"name={RUN}", f"features={features}", *small)
        carry_out("jobs.promote", *where, *FEW, "--run", RUN)
        serving = ["serve.min_replicas=2", "serve.max_replicas=2", "serve.cpus_per_replica=2", "serve.max_length=256"]
        # A replica takes two requests at a time: Serve's proxy sends to the one on its own host while that has room.
        serving += ["serve.max_ongoing_requests=2", "serve.target_ongoing_requests=2", f"serve.port={port}"]
        carry_out("jobs.deploy", *where, *serving)
        if problems:
            return Outcome(problems=problems)
        load = Load(url=f"http://127.0.0.1:{port}/v1", expected=plain_answers())
        with load.running(clients=6):
            load.wait_for_answers(40)
            wait_until(lambda: all(tokens(url) for url in metrics.values()), 90, "tokens from both hosts", every=1.0)
        made = {host: tokens(url) for host, url in metrics.items()}
        for kind in (ENGINE, WORKER, REPLICA):
            hosts[kind] = hosts_of(address, kind)
    ground.run("one-host", "jobs.train", f"root={place}", "name=one-host", f"features={features}", *SMALL)
    trained = judged(ground, 0, history(place / "one-host"), 0.0, {})
    found = served(load, 0.0, {"tokens": made, "versions": dict(Counter(load.versions))})
    problems += trained.problems + found.problems
    problems += [f"{kind}: on {on}, not on each of {HOSTS}" for kind, on in hosts.items() if on != sorted(HOSTS)]
    if load.repeated:
        problems.append(f"requests were sent again: {dict(load.repeated)}")
    if set(load.versions) != {"1"}:
        problems.append(f"versions {sorted(set(load.versions))} of {NAME} were served, not 1")
    return replace(
        found,
        problems=problems,
        seconds_to_recover=None,
        lost=trained.lost + found.lost,
        wrong=trained.wrong + found.wrong,
        seen=trained.seen | found.seen,
    )


def can_listen(host: str) -> bool:
    with socket.socket() as probe:
        try:  # the only way to ask
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def two_nodes(ground: Ground, folder: Path) -> tuple[str, dict[str, str]]:
    """(job address, metrics page of each host) of a head and a node that has joined it."""
    gcs, dashboard = free_port(), free_port()
    metrics = {host: free_port() for host in HOSTS}
    own = [[f"--node-ip-address={host}", "--num-cpus=3", f"--metrics-export-port={metrics[host]}"] for host in HOSTS]
    head = ["--head", f"--port={gcs}", f"--dashboard-host={HOSTS[0]}", f"--dashboard-port={dashboard}"]
    address = f"http://{HOSTS[0]}:{dashboard}"
    start_node(ground, "head", folder, *head, *own[0])
    wait_until(lambda: answers(f"{address}/api/version"), 120, "a head node", every=0.5)
    joined = start_node(ground, "joined", folder, f"--address={HOSTS[0]}:{gcs}", *own[1])
    urls = {host: f"http://{host}:{port}/metrics" for host, port in metrics.items()}
    try:  # only to say what the node itself has said
        wait_until(lambda: joined.poll() is not None or all(map(answers, urls.values())), 240, "both nodes", every=0.5)
    except RuntimeError as error:
        raise RuntimeError(f"{error}: …{ground.text('joined')[-800:]}") from error
    if joined.poll() is not None:
        raise RuntimeError(f"the second node ended: …{ground.text('joined')[-800:]}")
    return address, urls


def hosts_of(address: str, kind: str) -> list[str]:
    """The hosts of all actors of a class, also of those that have ended."""
    from ray.util.state import list_actors, list_nodes

    nodes: list[Any] = list_nodes(address=address)
    actors: list[Any] = list_actors(address=address, limit=1000)
    hosts = {node.node_id: node.node_ip for node in nodes}
    return sorted(hosts[each.node_id] for each in actors if kind in str(each.class_name))


def tokens(metrics: str) -> int:
    """Tokens that replicas of a host have generated."""
    with urllib.request.urlopen(metrics, timeout=10) as page:
        found = re.findall(rf"^{TOKENS}{{.*}} (\S+)$", page.read().decode(), re.M)
    return int(sum(map(float, found)))


def plain_answers() -> dict[str, str]:
    """What the target says by itself, decoded in this process without Ray or a drafter."""
    import torch

    from domino_core.engine import Engine
    from domino_core.request import Request
    from domino_core.sampling_params import SamplingParams
    from domino_core.target import load_target, load_tokenizer

    tokenizer = load_tokenizer(str(TARGET))
    target = load_target(str(TARGET), device="cpu", dtype=torch.float32)
    engine = Engine(target, None, max_rows=1, max_length=256)
    asked = [
        Request(prompt_ids=tuple(tokenizer.encode(prompt)), max_tokens=48, sampling=SamplingParams())
        for prompt in PROMPTS
    ]
    return {prompt: tokenizer.decode(done.tokens) for prompt, done in zip(PROMPTS, engine.generate(asked), strict=True)}
