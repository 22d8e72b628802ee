"""The deployed application on a real Ray Serve, called by the openai client: streams, disconnects, promotion."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from domino_core.checkpoint import save_drafter
from domino_core.drafter import Drafter
from domino_core.target import load_vocabulary, target_hash
from jobs.drill_ground import free_port
from jobs.overrides import apply
from jobs.presets import tiny
from jobs.status import status
from jobs.status_screen import screen
from serve.config import ServeConfig
from tests.dashboards import scraped, used
from tests.serving import HTTP, Registry, damage, drafter_config, wait_until

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = [{"role": "user", "content": "def read(path):"}]


@pytest.fixture(scope="module")
def registry(tmp_path_factory, embedded_target):
    """Three versions: 1 and 2 fit and draft noise, 3 is damaged. 1 is champion."""
    root = tmp_path_factory.mktemp("registry")
    registry = Registry(root, embedded_target)
    for number, block_size in ((1, 4), (2, 6), (3, 5)):
        drafter = Drafter(drafter_config(embedded_target, block_size=block_size), *load_vocabulary(embedded_target))
        folder = save_drafter(drafter, root / f"drafter-{number}", {"target_hash": target_hash(embedded_target)})
        assert registry.add(damage(folder) if number == 3 else folder) == str(number)
    registry.promote("1")
    return registry


@pytest.fixture(scope="module")
def config(registry, embedded_target, tmp_path_factory):
    return ServeConfig(
        target=str(embedded_target),
        drafter=registry.champion,
        tracking_uri=registry.uri,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        poll_seconds=0.5,
        port=free_port(),
        max_length=512,
        max_rows=8,
        max_replicas=2,
        target_ongoing_requests=16,
        upscale_delay_s=1.0,
        canary_share=0.3,
    )


@pytest.fixture(scope="module")
def base_url(local_ray, config):
    from ray import serve as ray_serve

    from jobs.deploy import deploy

    yield deploy(config)
    ray_serve.shutdown()


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def health(base_url: str) -> dict:
    return HTTP.get(base_url.removesuffix("/v1") + "/health").json()


def ask(client: openai.OpenAI, **fields):
    request = {"model": "tiny-qwen3", "messages": MESSAGES, "temperature": 0, "max_tokens": 32}
    return client.chat.completions.create(**(request | fields))


def test_whole_and_streamed_answers_are_one_text(client):
    whole = ask(client, extra_body={"ignore_eos": True})
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 32
    assert whole.metrics["speculative_decoding"]["num_spec_tokens"] == 4
    assert whole.system_fingerprint.endswith("-drafter-1")


def test_bias_and_penalties_reach_the_engine(client):
    plain, biased = ask(client), ask(client, logit_bias={"5": 100})
    assert plain.choices[0].message.content != biased.choices[0].message.content
    assert plain.choices[0].message.content != ask(client, presence_penalty=2).choices[0].message.content


def test_errors_come_through_the_proxy_unchanged(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, logit_bias={"5": 101})
    assert caught.value.param == "logit_bias"
    with pytest.raises(openai.NotFoundError):
        ask(client, model="other")


def test_a_requests_lines_are_in_the_replicas_log_under_its_id(client, local_ray):
    answer = ask(client, extra_headers={"X-Request-ID": "seen-by-the-client"})
    assert answer._request_id == "seen-by-the-client"
    folder = Path(local_ray._private.worker._global_node.get_session_dir_path()) / "logs" / "serve"

    def lines() -> list[str]:
        text = "".join(log.read_text() for log in folder.glob("replica_domino_domino_*.log"))
        return [line for line in text.splitlines() if "seen-by-the-client" in line]

    wait_until(lambda: len(lines()) >= 3, 10)  # Serve's own line of the request is the third
    assert any("start: 1 answers" in line for line in lines())
    assert any(f"finish: {answer.usage.completion_tokens} tokens, tau" in line for line in lines())


def test_clients_that_leave_free_their_rows_streamed_or_not(base_url):
    body = {"model": "tiny-qwen3", "prompt": ["x"] * 4, "max_tokens": 500, "temperature": 0, "ignore_eos": True}
    with HTTP.stream("POST", f"{base_url}/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()  # kept: dropping it closes the response
        next(lines)
        wait_until(lambda: health(base_url)["requests"]["running"] == 4, 5)
    wait_until(lambda: health(base_url)["requests"]["running"] == 0, 5)
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{base_url}/completions", json=body, timeout=httpx.Timeout(60, read=1.0))
    wait_until(lambda: health(base_url)["requests"]["running"] == 0, 5)


def test_metrics_page(base_url):
    page = HTTP.get(base_url.removesuffix("/v1") + "/metrics").text
    assert 'vllm:generation_tokens_total{drafter_version="1"' in page


def test_board_and_alerts_find_their_metrics_and_labels_on_rays_port(base_url, local_ray):
    wanted = {name: labels for name, labels in used().items() if not name.startswith("ray_domino_train_")}

    def missing() -> dict[str, set[str]]:
        there = scraped(local_ray)
        return {name: labels - there.get(name, set()) for name, labels in wanted.items() if name not in there}

    # In a text that repeats itself even a drafter that drafts noise is right now and then.
    body = {"model": "tiny-qwen3", "prompt": ["x"] * 4, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    assert HTTP.post(f"{base_url}/completions", json=body).status_code == 200
    wait_until(lambda: not missing(), 60, every=1)
    there = scraped(local_ray)
    assert {name: labels - there[name] for name, labels in wanted.items() if labels - there[name]} == {}


def test_status_tells_cluster_endpoint_and_champion(base_url, config, registry):
    job = apply(tiny(), [f"root={registry.root}", f"tracking_uri={registry.uri}", f"serve.port={config.port}"])
    registry.tag("1", **{"tau.heldout": "1.75", "speedup": "1.1", "gate": "passed"})
    registry.tag("3", canary="rolled back")
    registry.promote("3", "challenger")
    found = status(job)
    assert found.missing == {"training": f"no training run below {registry.root}"}
    assert found.cluster is not None
    assert found.cluster.total["CPU"] == 4
    assert found.cluster.running == ["unknown: this Ray runs without its dashboard"]
    assert found.endpoint is not None
    assert (found.endpoint.status, found.endpoint.replicas, found.endpoint.live) == ("RUNNING", {"RUNNING": 1}, "1")
    told = "\n".join(screen(found, job.target))
    assert "drafter version 1 (champion) live" in told
    assert "champion is version 1: gate passed, τ 1.75 on heldout, 1.10× plain" in told
    assert "challenger is version 3: gate not run, canary rolled back" in told
    elsewhere = status(apply(job, [f"serve.port={free_port()}"]))  # the application that runs is not the one meant
    assert elsewhere.endpoint is None


def test_promotion_under_load_fails_no_request_and_a_damaged_version_changes_nothing(client, base_url, registry):
    expected = ask(client).choices[0].message.content
    seen: list[str] = []
    failures: list[Exception] = []
    done = threading.Event()

    def keep_asking(stream: bool) -> None:
        while not done.is_set():
            try:
                if stream:
                    chunks = list(ask(client, stream=True))
                    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                    version = chunks[0].system_fingerprint
                else:
                    answer = ask(client)
                    text, version = answer.choices[0].message.content, answer.system_fingerprint
                assert text == expected
                seen.append(version.rpartition("-")[2])
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=keep_asking, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(seen) >= 4, 60)
        registry.promote("2")
        wait_until(lambda: seen[-4:] == ["2"] * 4, 60)
        registry.promote("3")
        wait_until(lambda: "version 3 is refused" in health(base_url)["drafter"]["problem"], 60, every=0.2)
        count = len(seen)
        wait_until(lambda: len(seen) >= count + 4, 60)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert set(seen) == {"1", "2"}
    assert seen[-1] == "2"
    state = health(base_url)
    assert (state["status"], state["drafter"]["live"]) == ("ok", "2")
    assert "damaged" in state["drafter"]["problem"]
    registry.promote("2")
    wait_until(lambda: health(base_url)["drafter"]["problem"] == "", 30, every=0.2)


def test_canary_on_serve_is_reported_and_a_request_id_decides_where_it_goes(client, base_url, registry):
    """Serve gives every request an id, which its answer names; the version before the canary is 2."""
    expected = ask(client).choices[0].message.content
    registry.try_out("1")
    wait_until(lambda: health(base_url)["canary"]["state"] == "running", 30, every=0.2)
    versions: dict[str, str] = {}
    for number in range(40):
        answer = ask(client, extra_headers={"X-Request-Id": f"mine-{number}"} if number < 3 else {})
        assert answer.choices[0].message.content == expected
        versions[str(answer._request_id)] = answer.system_fingerprint.rpartition("-")[2]
        if set(versions.values()) == {"1", "2"} and number > 3:
            break
    assert set(versions.values()) == {"1", "2"}
    assert {f"mine-{number}" for number in range(3)} <= versions.keys()
    for name, version in versions.items():
        assert ask(client, max_tokens=1, extra_headers={"X-Request-Id": name}).system_fingerprint.endswith(version)
    (report,) = HTTP.get(base_url.removesuffix("/v1") + "/canary").json()["replicas"]
    assert (report["champion"], report["version"], report["share"]) == ("2", "1", 0.3)
    assert sum(arm["requests"] for arm in report["figures"].values()) == 2 * len(versions)
    registry.tag("1", canary="ended")
    wait_until(lambda: health(base_url)["canary"]["state"] == "none", 30, every=0.2)


def test_another_port_on_the_same_ray_is_refused(base_url, config):
    from jobs.deploy import deploy

    port = free_port()
    with pytest.raises(ValueError, match=f"not on 127.0.0.1:{port}"):
        deploy(replace(config, port=port))


def running_replicas() -> int:
    from ray import serve as ray_serve

    states = ray_serve.status().applications["domino"].deployments["domino"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


@pytest.mark.slow
def test_overload_is_refused_with_503_and_brings_a_second_replica(base_url, config):
    from jobs.deploy import deploy

    small = {"max_rows": 1, "target_ongoing_requests": 1.0, "max_ongoing_requests": 2, "max_queued_requests": 2}
    deploy(replace(config, **small, upscale_delay_s=0.5))
    told: Counter[tuple[int, str]] = Counter()
    done = threading.Event()

    def keep_asking() -> None:
        body = {"model": "tiny-qwen3", "prompt": "x", "max_tokens": 100, "ignore_eos": True}
        while not done.is_set():
            response = HTTP.post(f"{base_url}/completions", json=body)
            told[response.status_code, response.headers.get("retry-after", "")] += 1
            time.sleep(0.25)  # a refusal comes at once: asking on without pause would starve the replica that starts

    threads = [threading.Thread(target=keep_asking) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        assert running_replicas() == 1
        wait_until(lambda: running_replicas() == 2, 240, every=0.5)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert set(told) == {(200, ""), (503, str(config.retry_after_s))}
    assert HTTP.post(f"{base_url}/completions", json={"model": "tiny-qwen3", "prompt": "x"}).status_code == 200
    # Of both replicas, whoever answers.
    reports = HTTP.get(base_url.removesuffix("/v1") + "/canary").json()["replicas"]
    assert len(reports) == 2
    assert len({report["champion"] for report in reports}) == 1


def test_requests_of_a_killed_replica_get_503_with_a_time_to_come_back(base_url, config):
    from jobs.deploy import deploy

    deploy(replace(config, min_replicas=1, max_replicas=1))
    wait_until(lambda: running_replicas() == 1, 120, every=0.5)
    body = {"model": "tiny-qwen3", "prompt": ["x"] * 4, "max_tokens": 500, "temperature": 0, "ignore_eos": True}
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(HTTP.post(f"{base_url}/completions", json=body)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: health(base_url)["requests"]["running"] > 0, 30)
    (replica,) = replicas_of_this_ray()
    os.kill(replica, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert {(answer.status_code, answer.headers.get("retry-after")) for answer in answers} == {(503, "2")}
    assert {answer.json()["error"]["code"] for answer in answers} == {"replica_lost"}
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=20, timeout=60) as patient:
        assert ask(patient).usage.completion_tokens > 0


def test_settings_that_cannot_be_served_say_who_answers_now_and_good_ones_repair_it(base_url, config):
    from jobs.deploy import deploy

    small = replace(config, min_replicas=1, max_replicas=1)
    said = r"(?s)max_rows=1000000 needs .* GB are free.*(no replica is left|1 replicas of before)"
    with pytest.raises(RuntimeError, match=said):
        deploy(replace(small, max_rows=10**6))
    deploy(small)
    assert HTTP.post(f"{base_url}/completions", json={"model": "tiny-qwen3", "prompt": "x"}).status_code == 200


def replicas_of_this_ray() -> list[int]:
    """Process ids of the replicas below the Ray that this process has started."""
    titles = ((process.pid, process.cmdline()) for process in psutil.Process().children(recursive=True))
    return [pid for pid, title in titles if title and title[0].startswith("ray::ServeReplica:")]


ENVIRONMENT = {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1"}


def start_command(*overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jobs.deploy", "--preset", "tiny", *overrides]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
def test_command_serves_until_it_is_ended_and_leaves_nothing_behind(tmp_path):
    port = free_port()
    process = start_command(f"serve.port={port}", "serve.drafter=none", "serve.max_length=256", f"root={tmp_path}")
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if "Ctrl-C" in line:
            break
    assert f"http://127.0.0.1:{port}/v1" in "".join(printed)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        answer = ask(client)
    assert answer.usage.completion_tokens > 0
    assert answer.metrics["speculative_decoding"] is None
    process.send_signal(signal.SIGTERM)  # Ctrl-C takes the same way
    process.communicate(timeout=60)
    assert process.returncode == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
