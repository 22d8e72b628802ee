"""A running server gets a new drafter, a bad drafter, a failing engine; its requests are answered or told so."""

import json
import queue
from dataclasses import replace

import httpx
import openai
import pytest
import torch

from domino_core.checkpoint import save_drafter
from domino_core.drafter import Drafter
from domino_core.engine import Output, Request
from domino_core.target import load_target, load_tokenizer, target_hash
from serve.config import ServeConfig
from serve.registry_alias import Version
from serve.replica import EngineError, EngineLoop
from serve.server import Server
from tests import serving
from tests.serving import KnownTexts, drafter_config, listening, wait_until

PROMPT = "import os\n\ndef "
MAX_LENGTH = 512


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def config(embedded_target):
    return ServeConfig(target=str(embedded_target), drafter="none", max_rows=3, max_length=MAX_LENGTH)


@pytest.fixture
def member(embedded_target, target):
    """Version "7", whose drafts are all wrong."""
    return serving.member(target, KnownTexts(embedded_target), "7")


@pytest.fixture
def server(config, member):
    server = Server(config)
    server.loop.promote(member)
    return server


@pytest.fixture
def client(server):
    with listening(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
def fitting(embedded_target, target):
    """A drafter that fits and drafts noise."""
    return Drafter(drafter_config(embedded_target), target.embed_VD, target.lm_head_VD)


def ask(client: openai.OpenAI, **fields):
    request = {"model": "tiny-qwen3", "prompt": PROMPT, "temperature": 0, "max_tokens": 40}
    return client.completions.create(**(request | fields))


def test_swap_while_answers_run_loses_none_and_new_ones_go_to_the_new_version(
    server, client, member, fitting, embedded_target, tmp_path
):
    expected = ask(client, max_tokens=200).choices[0].text
    save_drafter(fitting, tmp_path / "d", {"target_hash": target_hash(embedded_target)})
    member.engine.drafter.delay_s = 0.02
    running = ask(client, max_tokens=200, stream=True)
    first = next(running)
    server.accept(tmp_path / "d", Version(number="8", source="models:/m-8"))
    fresh = ask(client, max_tokens=200)
    assert (fresh.system_fingerprint, fresh.choices[0].text) == (f"{server.target_hash}-drafter-8", expected)
    assert first.system_fingerprint == f"{server.target_hash}-drafter-7"
    rest = "".join(choice.text for chunk in running for choice in chunk.choices)
    assert first.choices[0].text + rest == expected
    wait_until(lambda: server.loop.versions() == ["8"])  # the old engine is gone, and its memory with it


def test_drafters_that_do_not_fit_are_refused_and_change_nothing(server, client, fitting, tmp_path):
    live, version = server.loop.live, Version(number="9", source="")
    save_drafter(fitting, tmp_path / "other", {"target_hash": "0123456789abcdef"})
    with pytest.raises(ValueError, match="made for the target 0123456789abcdef"):
        server.accept(tmp_path / "other", version)
    save_drafter(fitting, tmp_path / "tagged", {})
    with pytest.raises(ValueError, match="made for the target fedcba"):
        server.accept(tmp_path / "tagged", replace(version, target_hash="fedcba"))
    save_drafter(fitting, tmp_path / "cut", {})
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        server.accept(tmp_path / "cut", version)
    layers = json.loads((tmp_path / "tagged" / "config.json").read_text())
    layers["num_target_layers"] += 1
    (tmp_path / "tagged" / "config.json").write_text(json.dumps(layers))
    with pytest.raises(ValueError, match="layers"):
        server.accept(tmp_path / "tagged", version)
    with pytest.raises(ValueError, match="no drafter"):
        server.accept(tmp_path / "none", version)
    assert server.loop.live is live
    assert ask(client).system_fingerprint.endswith("-drafter-7")


def test_candidate_whose_answers_differ_from_plain_decoding_is_refused(config, fitting, tmp_path):
    # Output cannot depend on a drafter; an engine that is wrong is had by changing the target after the server's start.
    server = Server(config)
    plain = server.loop.live
    plain.engine.target.embed_VD.zero_()
    save_drafter(fitting, tmp_path / "d", {})
    with pytest.raises(ValueError, match="self-check: token 0 is"):
        server.accept(tmp_path / "d", Version(number="9", source=""))
    assert server.loop.live is plain
    server.close()


def test_candidate_whose_engine_fails_is_refused_and_nothing_else_happens(server, client, embedded_target, target):
    bad = KnownTexts(embedded_target)
    bad.failure = RuntimeError("device lost")
    with pytest.raises(EngineError, match="device lost"):
        server.self_check(serving.member(target, bad, "9"))
    assert server.loop.failure == ""
    assert ask(client).usage.completion_tokens == 40


def test_engine_failure_ends_requests_with_an_error_and_fails_health(client, member):
    member.engine.drafter.delay_s = 0.02
    running = ask(client, max_tokens=400, stream=True)
    next(running)
    member.engine.drafter.failure = RuntimeError("device lost")
    with pytest.raises(openai.APIError, match="device lost"):
        list(running)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="device lost") as caught:
            ask(client, stream=stream)
        assert caught.value.status_code == 503
    health = httpx.get(str(client.base_url.join("/health")))
    assert health.status_code == 503
    assert "device lost" in health.json()["failure"]


def test_a_defect_of_ours_is_a_500_in_openais_shape_without_its_details(server, client):
    server.vocabulary = None
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client)
    assert caught.value.status_code == 500
    assert "internal error (AttributeError)" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def take(outputs: "queue.SimpleQueue[Output | Exception]") -> Output | Exception:
    return outputs.get(timeout=10)


def test_loop_cancels_running_and_waiting_requests_and_ends_the_rest_on_close(member, embedded_target):
    member.engine.drafter.delay_s = 0.01
    loop = EngineLoop(member.engine, "7")
    prompt = tuple(load_tokenizer(embedded_target).encode(PROMPT))
    sinks = [queue.SimpleQueue() for _ in range(5)]
    tickets = [loop.submit(Request(prompt_ids=prompt, max_tokens=400), sink.put) for sink in sinks]
    assert isinstance(take(sinks[0]), Output)
    wait_until(lambda: loop.counts() == (3, 2))
    loop.cancel(tickets[4])  # waits for a row
    wait_until(lambda: loop.counts() == (3, 1))
    loop.cancel(tickets[0])  # has one, which the fourth gets
    assert isinstance(take(sinks[3]), Output)
    wait_until(lambda: loop.counts() == (3, 0))
    loop.cancel(tickets[0])  # nothing more to cancel
    loop.close()
    for sink in sinks[1:4]:
        while isinstance(last := take(sink), Output):
            pass
        assert isinstance(last, EngineError)
    assert sinks[4].empty()
    with pytest.raises(EngineError, match="shutting down"):
        loop.submit(Request(prompt_ids=prompt, max_tokens=4), sinks[0].put)


def test_request_that_can_never_fit_comes_back_as_its_senders_mistake(member):
    loop, outputs = EngineLoop(member.engine, "7"), queue.SimpleQueue()
    loop.submit(Request(prompt_ids=(5,), max_tokens=MAX_LENGTH), outputs.put)
    assert "max_length" in str(take(outputs))
    loop.close()
