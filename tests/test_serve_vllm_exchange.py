"""A version into vLLM's running engine, with an engine that only notes what it is asked: order, rollback, failure."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from domino_core.checkpoint import read_config
from domino_core.target import target_hash
from serve import vllm_engine
from serve.config import ServeConfig
from serve.registry_alias import Version
from serve.vllm_engine import VllmServer

RESET = "reset with the running"


class NotingEngine:
    """Every call is noted; those to load a drafter fail as often as `failures` says."""

    def __init__(self, failures: int) -> None:
        self.calls: list[str] = []
        self.failures = failures
        self.errored = False
        self.dead_error = RuntimeError("the engine is dead")
        self.hangs = False
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(RESET if reset_running_requests else "reset")
        return True

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> None:
        assert method == "load_drafter"
        self.calls.append(Path(args[0]).name)
        if self.hangs:
            self.errored = True
            await asyncio.Event().wait()
        if self.failures > 0:
            self.failures -= 1
            raise RuntimeError(f"no room for {Path(args[0]).name}")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def server(embedded_target, reference_dir, loop, tmp_path, monkeypatch) -> Any:
    """One with version 1 in its engine, which the test gives it; both versions are the same files."""
    monkeypatch.setattr(vllm_engine, "check_target", lambda *_: None)
    checkpoint = reference_dir / "draft_shift1_p1"
    for name in ("old", "new"):
        (tmp_path / name).symlink_to(checkpoint)
    server: Any = VllmServer(ServeConfig(target=str(embedded_target), engine="vllm", drafter="none", max_length=512))
    server._loop, server.version = loop, "1"
    server._folder, server._drafter = tmp_path / "old", read_config(checkpoint)
    server._state = SimpleNamespace(_state={"chat": SimpleNamespace(system_fingerprint="")})
    return server


def exchange(server: Any, engine: NotingEngine | None) -> None:
    server._engine = engine
    server.accept(server._folder.parent / "new", Version(number="2", source="new"))


def test_weights_are_exchanged_in_a_pause(server, embedded_target):
    engine = NotingEngine(failures=0)
    exchange(server, engine)
    assert engine.calls == ["pause", "new", RESET, "resume"]
    assert (server.version, server.failure) == ("2", "")
    fingerprint = server._state._state["chat"].system_fingerprint
    assert fingerprint == f"{target_hash(embedded_target)}-drafter-2"


def test_weights_that_cannot_be_loaded_are_rolled_back(server):
    engine = NotingEngine(failures=1)
    with pytest.raises(RuntimeError, match="no room for new"):
        exchange(server, engine)
    assert engine.calls == ["pause", "new", "old", RESET, "resume"]
    assert (server.version, server._folder.name, server.failure) == ("1", "old", "")


def test_engine_with_weights_of_neither_version_stays_paused_and_is_reported(server):
    engine = NotingEngine(failures=2)
    with pytest.raises(RuntimeError, match="no room for new"):
        exchange(server, engine)
    assert engine.calls == ["pause", "new", "old"]
    assert "no room for old" in server.failure
    state = server.health()
    assert (state["status"], state["failure"]) == ("failed", server.failure)


def test_engine_that_dies_meanwhile_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(vllm_engine, "ALIVE_S", 0.05)
    engine = NotingEngine(failures=0)
    engine.hangs = True
    with pytest.raises(RuntimeError, match="the engine is dead"):
        exchange(server, engine)
    assert server.version == "1"


def test_engine_without_routes_is_shut_down(server, monkeypatch):
    """The next version begins from nothing."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine: Any = NotingEngine(failures=0)
    engine.shutdown = lambda: engine.calls.append("shutdown")

    async def tasks() -> None:
        engine.calls.append(f"begins with {server.version}")
        raise RuntimeError("no tasks")

    engine.get_supported_tasks = tasks
    settings = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", lambda *_: settings)
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", lambda *_, **__: engine)
    server.version = "none"
    with pytest.raises(RuntimeError, match="no tasks"):
        exchange(server, None)
    assert engine.calls == ["begins with 2", "shutdown"]
    assert (server._engine, server.version) == (None, "none")
    assert "/health" not in [getattr(route, "path", "") for route in server.http_app().routes]
