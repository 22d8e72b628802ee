"""What jobs.soak calls an error, a wrong answer and growth: on the real app, disturbed, and on made-up figures."""

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import httpx
import psutil
import pytest
from starlette.responses import JSONResponse, Response

from jobs.soak import MAX_FD_GROWTH, MAX_RSS_GROWTH_MB, Sample, Watched, judged
from jobs.soak_load import Soak, asks, choices_of, events
from serve.config import ServeConfig
from serve.openai_routes import http_app
from serve.server import Server


@pytest.fixture(scope="module")
def app(embedded_target):
    server = Server(ServeConfig(target=str(embedded_target), drafter="none", max_rows=8, max_length=256))
    yield http_app(server)
    server.close()


def soaked(app, disturb=None, seconds: float = 3.0) -> Soak:
    """Four clients of the app in this process. disturb: gives an answer of its own, or None, once learnt."""
    learnt = False

    async def maybe_disturbed(scope, receive, send):
        other = disturb() if disturb is not None and learnt else None
        await (other or app)(scope, receive, send)

    async def run() -> Soak:
        nonlocal learnt
        transport = httpx.ASGITransport(maybe_disturbed)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1/", timeout=60) as http:
            soak = Soak(http=http, asks=asks("tiny-qwen3", count=12))
            await soak.learn()
            learnt = True
            await soak.run(clients=4, seconds=seconds)
            return soak

    return asyncio.run(run())


def test_the_app_is_found_right_and_errors_of_clients_are_no_errors(app):
    soak = soaked(app, seconds=6.0)
    assert (soak.errors, soak.wrong, dict(soak.busy)) == ([], [], {})
    assert soak.answered > 5
    assert soak.refused > 0
    assert soak.requests == soak.answered + soak.refused + soak.left


def test_a_failure_is_an_error_and_busy_is_asked_again(app):
    busy = iter([JSONResponse({}, 503, headers={"retry-after": "0.01"})] * 3)
    soak = soaked(app, lambda: next(busy, None))
    assert soak.busy == {"503": 3}
    assert soak.errors == []
    broken = iter([JSONResponse({"error": "?"}, 500), Response("data: {}\n\n"), Response("no JSON")])
    soak = soaked(app, lambda: next(broken, None))
    assert 1 <= len(soak.errors) <= 3  # a client may have left before one of them
    assert judged(soak, [])


def test_another_answer_than_the_quiet_one_is_wrong(app):
    ask = next(ask for ask in asks("tiny-qwen3") if ask.repeats and "n" not in ask.body and "stop" not in ask.body)
    body = ask.body | {"prompt": "x"}
    ask = type(ask)(name=ask.name, route=ask.route, body=body)
    soak = Soak(http=httpx.AsyncClient(), asks=[ask], expected={ask.name: [("right", "length")]})
    chunks = [{"choices": [{"index": 0, "logprobs": [1]}], "usage": {"completion_tokens": 1}}]
    assert soak.problems(ask, chunks, [("right", "length")]) == []
    assert soak.problems(ask, chunks, [("wrong", "length")])
    assert soak.problems(ask, chunks, [("right", "stop")])
    assert soak.problems(ask, chunks, [("right", "length")] * 2)


def test_streams_that_stop_or_tell_an_error_are_none():
    chunk = '{"choices": [{"index": 0, "text": "a", "finish_reason": null}]}'
    with pytest.raises(ValueError, match="stream ends with"):
        events(f"data: {chunk}\n\n")
    with pytest.raises(ValueError, match="have begun"):
        choices_of(events(f"data: {chunk}\n\ndata: [DONE]\n\n"))


def test_growth_is_seen_once_warm_and_not_before():
    def watched(rss, fds=lambda second: 60) -> Watched:
        process = SimpleNamespace(is_running=lambda: True)
        each = Watched(name="replica 1", process=process, port=1, fds_at_rest=[60, 60])
        each.samples += [Sample(float(second), rss(second), fds(second), 9) for second in range(0, 600, 5)]
        return each

    soak = Soak(http=httpx.AsyncClient(), asks=[], answered=1)
    warming = watched(lambda second: 700.0 + min(second, 100) * 5)  # 500 MB, in the first minutes
    assert judged(soak, [warming]) == []
    leaking = watched(lambda second: 700.0 + second / 4)
    assert leaking.growth("rss_mb") > MAX_RSS_GROWTH_MB
    assert "rss_mb grew" in judged(soak, [leaking])[0]
    files = watched(lambda second: 700.0, lambda second: 60 + second // 20)
    assert files.growth("fds") > MAX_FD_GROWTH
    assert "fds grew" in judged(soak, [files])[0]
    left_open = watched(lambda second: 700.0)
    left_open.fds_at_rest = [60, 80]
    assert "open before and after" in judged(soak, [left_open])[0]
    gone = watched(lambda second: 700.0)
    gone.process = SimpleNamespace(is_running=lambda: False)
    assert judged(soak, [gone]) == ["replica 1 was replaced"]


def test_connections_that_clients_hold_are_no_open_files_until_they_have_left():
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        each = Watched(name="proxy 1", process=psutil.Process(), port=listening.getsockname()[1])
        clients = [stack.enter_context(socket.create_connection(listening.getsockname())) for _ in range(3)]

        def fds() -> int:
            found = each.look(0.0)
            assert found is not None
            return found.fds

        before = fds()
        accepted = [stack.enter_context(listening.accept()[0]) for _ in clients]
        assert fds() == before
        clients[0].close()
        assert fds() == before  # one end less, and the other one is ours to close
        accepted[0].close()
        assert fds() == before - 1
