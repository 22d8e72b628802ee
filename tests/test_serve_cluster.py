"""The deployed application on a real Ray Serve, called by the openai client: streams, disconnects, promotion."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from domino_core.checkpoint import save_drafter
from domino_core.config import DrafterConfig, default_target_layer_ids
from domino_core.drafter import Drafter
from domino_core.target import load_vocabulary, read_target_config, target_hash
from serve.schema import ServeConfig

pytestmark = pytest.mark.cluster

NAME = "domino-tiny-qwen3"
ROOT = Path(__file__).resolve().parent.parent
MESSAGES = [{"role": "user", "content": "def read(path):"}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def save_random_drafter(target: Path, folder: Path, block_size: int) -> Path:
    """A drafter that fits; what it drafts is noise, which output does not depend on."""
    shape = read_target_config(target)
    config = DrafterConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_target_layers=shape.num_hidden_layers,
        target_layer_ids=default_target_layer_ids(shape.num_hidden_layers, 2),
        mask_token_id=1,
        block_size=block_size,
        emb_dim=16,
        gru_hidden_dim=16,
    )
    return save_drafter(Drafter(config, *load_vocabulary(target)), folder, {"target_hash": target_hash(target)})


class Registry:
    """The registry as pipelines/registry.py writes it."""

    def __init__(self, root: Path) -> None:
        import mlflow
        from mlflow import MlflowClient

        self.uri = f"sqlite:///{root}/mlflow.db"
        mlflow.set_tracking_uri(self.uri)  # version creation resolves its source there
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self.experiment = self.client.create_experiment("drafters", artifact_location=(root / "artifacts").as_uri())
        self.client.create_registered_model(NAME)

    def register(self, folder: Path) -> str:
        model = self.client.create_logged_model(self.experiment, name="drafter")
        self.client.log_model_artifacts(model.model_id, str(folder))
        self.client.finalize_logged_model(model.model_id, "READY")
        source = f"models:/{model.model_id}"
        return str(self.client.create_model_version(NAME, source=source, model_id=model.model_id).version)

    def promote(self, version: str) -> None:
        self.client.set_registered_model_alias(NAME, "champion", version)


@pytest.fixture(scope="module")
def registry(tmp_path_factory, embedded_target):
    """Versions 1 and 2 fit, 3 is damaged; 1 is champion."""
    root = tmp_path_factory.mktemp("registry")
    registry = Registry(root)
    for number, block_size in ((1, 4), (2, 6), (3, 5)):
        folder = save_random_drafter(embedded_target, root / f"drafter-{number}", block_size)
        if number == 3:
            (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-64])
        registry.register(folder)
    registry.promote("1")
    return registry


@pytest.fixture(scope="module")
def config(registry, embedded_target, tmp_path_factory):
    return ServeConfig(
        target=str(embedded_target),
        drafter=f"models:/{NAME}@champion",
        tracking_uri=registry.uri,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        poll_seconds=0.5,
        port=free_port(),
        max_length=512,
        max_rows=8,
        max_replicas=2,
        target_ongoing_requests=16,
        upscale_delay_s=1.0,
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
    return httpx.get(base_url.removesuffix("/v1") + "/health", timeout=30).json()


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


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


def test_errors_come_through_the_proxy_unchanged(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, logit_bias={"5": 1})
    assert caught.value.param == "logit_bias"
    with pytest.raises(openai.NotFoundError):
        ask(client, model="other")


def test_clients_that_leave_free_their_rows_streamed_or_not(base_url):
    body = {"model": "tiny-qwen3", "prompt": ["x"] * 4, "max_tokens": 500, "temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{base_url}/completions", json=body | {"stream": True}, timeout=60) as response:
        lines = response.iter_lines()  # kept: dropping it closes the response
        next(lines)
        wait_until(lambda: health(base_url)["requests"]["running"] == 4, 5)
    wait_until(lambda: health(base_url)["requests"]["running"] == 0, 5)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{base_url}/completions", json=body, timeout=httpx.Timeout(60, read=1.0))
    wait_until(lambda: health(base_url)["requests"]["running"] == 0, 5)


def test_metrics_page(base_url):
    page = httpx.get(base_url.removesuffix("/v1") + "/metrics").text
    assert 'vllm:generation_tokens_total{drafter_version="1"' in page


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
        wait_until(lambda: "version 3 is refused" in health(base_url)["drafter"]["problem"], 60)
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
    wait_until(lambda: health(base_url)["drafter"]["problem"] == "", 30)


def test_another_port_on_the_same_ray_is_refused(base_url, config):
    from dataclasses import replace

    from jobs.deploy import deploy

    port = free_port()
    with pytest.raises(ValueError, match=f"not on 127.0.0.1:{port}"):
        deploy(replace(config, port=port))


ENVIRONMENT = {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1"}


def start_command(*overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jobs.deploy", "--preset", "tiny", *overrides]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_it_is_ended_and_leaves_nothing_behind(tmp_path, end):
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
    process.send_signal(end)
    process.communicate(timeout=60)
    assert process.returncode == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
