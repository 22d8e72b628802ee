"""How a server makes its engines: room for the next version, warm before traffic, the verified length set and shown."""

import contextlib
import gc
import threading
import time
import weakref
from dataclasses import replace

import httpx
import pytest
import torch

from domino_core.checkpoint import save_drafter
from domino_core.drafter import Drafter
from domino_core.engine import Engine
from domino_core.memory import CPU_ROWS, MOST_ROWS, EngineMemory, cache_bytes, drafter_bytes
from domino_core.request import Request
from domino_core.target import load_target
from serve.config import ServeConfig
from serve.follower import NotYetError
from serve.registry_alias import Version
from serve.replica import EngineError, EngineLoop
from serve.server import Server
from tests import serving
from tests.serving import KnownTexts, drafter_config, listening, wait_until

MAX_LENGTH = 256
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def drafter(embedded_target, target):
    torch.manual_seed(0)
    return Drafter(drafter_config(embedded_target), target.embed_VD, target.lm_head_VD)


@pytest.fixture(scope="module")
def folder(drafter, tmp_path_factory):
    save_drafter(drafter, path := tmp_path_factory.mktemp("drafters") / "d", {})
    return path


@pytest.fixture
def serve(embedded_target):
    """Makes servers, and ends them."""
    servers: list[Server] = []

    def make(**fields) -> Server:
        config = ServeConfig(target=str(embedded_target), max_length=MAX_LENGTH, drafter="none")
        servers.append(Server(replace(config, **fields)))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def card(monkeypatch, target):
    """A device of some size, less what the engines on it take."""

    class Card:
        def __init__(self) -> None:
            self.size, self.engines = 0, []

        def free(self, device, share=1.0) -> int:
            taken = 0
            for engine in self.engines:
                config = engine.drafter.config if engine.drafter is not None else None
                taken += EngineMemory.of(target.config, config, engine.max_length, 4).needed(engine.max_rows)
            return int(self.size * share) - taken

    card = Card()
    monkeypatch.setattr("serve.server.free_bytes", card.free)
    return card


def test_rows_are_planned_where_no_number_is_given(serve, folder):
    assert serve().loop.live.engine.max_rows == CPU_ROWS
    assert serve(max_rows=None, drafter=str(folder)).loop.live.engine.max_rows == CPU_ROWS
    server = serve(max_rows=3, drafter=str(folder))
    assert server.health()["requests"] == {"running": 0, "waiting": 0, "rows": 3}


def test_a_followed_drafter_leaves_room_for_its_successor(serve, card, target, drafter, folder):
    one = EngineMemory.of(target.config, drafter.config, MAX_LENGTH, 4)
    weights = drafter_bytes(drafter)
    card.size = 2 * (one.needed(5) + weights)
    alone = serve(drafter=str(folder)).loop.live.engine.max_rows
    assert alone == min(MOST_ROWS, one.fitting(card.size - weights))
    assert alone >= 10

    server = serve()
    server._followed = True
    server.accept(folder, Version(number="1", source=""))
    first = server.loop.live.engine
    assert first.max_rows == 5
    # With the first one on the card there is room for another of its size, weights included, and it has the same rows.
    card.engines = [first]
    server.accept(folder, Version(number="2", source=""))
    assert server.loop.live.engine is not first
    assert server.loop.live.engine.max_rows == 5
    card.size = 2 * one.needed(5)  # somebody else has come
    with pytest.raises(ValueError, match=r"max_rows=5 needs .* GB are free: give fewer rows"):
        server.accept(folder, Version(number="3", source=""))
    assert server.loop.live.version == "2"


def test_rows_that_cannot_fit_with_a_successor_are_refused_at_the_start(serve, card, target, drafter, folder):
    one = EngineMemory.of(target.config, drafter.config, MAX_LENGTH, 4)
    card.size = one.needed(9) + drafter_bytes(drafter)
    assert serve(drafter=str(folder), max_rows=8).loop.live.engine.max_rows == 8
    server = serve(max_rows=1)
    server._followed, server.config = True, replace(server.config, max_rows=8)
    with pytest.raises(ValueError, match=r"max_rows=8 needs"):
        server.accept(folder, Version(number="1", source=""))


def test_half_a_card_is_half_a_card(serve, card, target, monkeypatch):
    plain = EngineMemory.of(target.config, None, MAX_LENGTH, 4)
    card.size = 2 * plain.needed(6)
    assert serve(device="cpu", gpus_per_replica=0.5).loop.live.engine.max_rows == 6
    assert plain.row_bytes > cache_bytes(target.config, None, MAX_LENGTH, 4)


def test_a_third_version_waits_until_the_first_has_gone(serve, folder, embedded_target, target):
    server = serve(max_rows=2)
    slow = KnownTexts(embedded_target)
    slow.delay_s = 0.02
    old = serving.member(target, slow, "1", max_length=MAX_LENGTH)
    server.loop.promote(old)
    heard: list[object] = []
    server.loop.submit(Request(prompt_ids=PROMPT, max_tokens=60), heard.append)
    wait_until(lambda: bool(heard))
    server.accept(folder, Version(number="2", source=""))
    assert (server.loop.draining, server.loop.versions()) == ("1", ["1", "2"])
    with pytest.raises(NotYetError, match="version 3 waits until the last requests of version 1"):
        server.accept(folder, Version(number="3", source=""))
    wait_until(lambda: server.loop.draining == "")
    server.accept(folder, Version(number="3", source=""))
    assert server.loop.live.version == "3"


def test_every_engine_is_warm_before_it_takes_traffic_and_others_go_on_meanwhile(
    serve, folder, embedded_target, target, monkeypatch
):
    server = serve(max_rows=2, num_verify="auto")
    slow = KnownTexts(embedded_target)
    slow.delay_s = 0.005
    server.loop.promote(serving.member(target, slow, "1", max_length=MAX_LENGTH))
    heard: list[float] = []
    server.loop.submit(Request(prompt_ids=PROMPT, max_tokens=200), lambda output: heard.append(time.monotonic()))
    wait_until(lambda: bool(heard))
    pieces: list[tuple[float, str]] = []
    honest = Engine.warm_up_steps

    def noted(engine, kinds):
        def run(step):
            assert server.loop.live.version == "1"
            step()
            pieces.append((time.monotonic(), threading.current_thread().name))

        return [lambda step=step: run(step) for step in honest(engine, kinds)]

    monkeypatch.setattr(Engine, "warm_up_steps", noted)
    server.accept(folder, Version(number="2", source=""))
    assert len(pieces) > 6  # batches of 1 and 2, lengths of 0, 1, 2 and 5
    assert {thread for _, thread in pieces} == {"engine-loop"}
    begun, over = pieces[0][0], pieces[-1][0]
    assert any(begun < moment < over for moment in heard)  # a round of the old version between two pieces
    assert server.loop.live.engine._length is not None  # it was measured, and is not again


def test_work_on_the_loops_thread_gives_its_result_or_its_error(embedded_target, target):
    loop = EngineLoop(serving.member(target, None, "none").engine, "none")
    assert loop.call(lambda: threading.current_thread().name) == "engine-loop"
    held = []

    def fail() -> None:
        heavy = torch.zeros(3)
        held.append(weakref.ref(heavy))
        raise ZeroDivisionError

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            loop.call(fail)
        assert loop.call(lambda: held[0]() is None)  # what failed has left nothing on the device
    finally:
        gc.enable()
    assert loop.failure == ""
    loop.close()
    with pytest.raises(EngineError, match="shutting down"):
        loop.call(lambda: None)


@pytest.mark.parametrize(("setting", "shown"), [(None, {5}), (2, {2}), (99, {5}), ("auto", {0, 1, 2, 5})])
def test_the_verified_length_is_what_is_set_and_is_shown(serve, folder, setting, shown):
    server = serve(drafter=str(folder), num_verify=setting, max_rows=2)
    body = {"model": "tiny-qwen3", "prompt": list(PROMPT), "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    with listening(server) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        page = httpx.get(f"{url}/metrics").text
        health = httpx.get(f"{url}/health").json()
    samples = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    values = {name.partition("{")[0]: float(value) for name, value in samples.items()}
    assert values["vllm:spec_decode_verified_drafts"] in shown
    assert health["drafter"]["verified_drafts"] == values["vllm:spec_decode_verified_drafts"]
    if setting != "auto":  # the mean, from counters
        mean = values["vllm:spec_decode_num_draft_tokens_total"] / values["vllm:spec_decode_num_drafts_total"]
        assert {mean} == shown
    assert answer["usage"]["completion_tokens"] == 30
