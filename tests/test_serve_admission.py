"""What stands before both engines: the key, the limit of bytes, and when to come back."""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from fastapi.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import admission
from serve.admission import MIN_KEY_LENGTH, OPEN_PATHS, digests, read_keys
from serve.app import application
from serve.config import ServeConfig
from serve.proxy import RETRY_AFTER_S, Unanswered
from serve.server import Server
from tests.serving import HTTP, listening

KEYS = ("first-key-of-a-test", "second-key-of-a-test")
LIMIT = 4096
BODY = {"model": "tiny-qwen3", "prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def server(embedded_target):
    return Server(ServeConfig(target=str(embedded_target), drafter="none", max_length=128, max_body_bytes=LIMIT))


@pytest.fixture(scope="module")
def url(server):
    with listening(server, *KEYS) as url:
        yield url


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_accepted(url, key):
    assert HTTP.post(f"{url}/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
    assert HTTP.get(f"{url}/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        bearer(KEYS[0][:-1]),
        bearer(KEYS[0] + "x"),
        {"Authorization": f"Basic {KEYS[0]}"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/", "/openapi.json", "/health/", "//health", "/x"])
def test_without_a_key_every_path_but_the_open_ones_is_401_and_no_key_is_in_the_answer(url, path, headers):
    response = HTTP.request("POST" if path.endswith("completions") else "GET", url + path, headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert not any(key[:-1] in response.text for key in KEYS)


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_figures_are_open(url, path):
    response = HTTP.get(url + path)
    assert response.status_code == 200
    assert not any(key in response.text for key in KEYS)


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def noted(found: bytes, known: bytes) -> bool:
        compared.append(known)
        return compare(found, known)

    monkeypatch.setattr(admission.hmac, "compare_digest", noted)

    async def nothing(*_):
        raise AssertionError("nobody is served")

    app = admission.Admission(nothing, keys=digests(KEYS), max_body_bytes=1, retry_after_s=1, failure=lambda: "")
    assert app._knows(b"Bearer " + KEYS[0].encode())
    assert compared == [hashlib.sha256(key.encode()).digest() for key in KEYS]


def pieces(count: int) -> Iterator[bytes]:
    yield b'{"model": "tiny-qwen3", "prompt": "'
    for _ in range(count):
        yield b"x " * 512
    yield b'"}'


def test_a_body_that_is_too_large_is_a_413_announced_or_not(url):
    announced = HTTP.post(f"{url}/v1/completions", content=b"".join(pieces(5)), headers=bearer(KEYS[0]))
    streamed = HTTP.post(f"{url}/v1/completions", content=pieces(50), headers=bearer(KEYS[0]))
    for response in (announced, streamed):
        assert response.status_code == 413
        assert f"{LIMIT} bytes (serve.max_body_bytes)" in response.json()["error"]["message"]
    assert HTTP.post(f"{url}/v1/completions", json=BODY, headers=bearer(KEYS[0])).status_code == 200
    unread = HTTP.post(f"{url}/v1/completions", content=pieces(50))
    assert unread.status_code == 401


def test_while_the_engine_is_down_answers_say_when_to_come_back(server, url):
    server.loop.live.failure = "RuntimeError: for a test"
    try:
        for path in ("/v1/models", "/health"):
            response = HTTP.get(url + path, headers=bearer(KEYS[0]))
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert "for a test" in response.text
    finally:
        server.loop.live.failure = ""


def test_keys_come_from_a_file_or_the_environment_and_only_digests_go_further(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(admission.KEY_VARIABLE, "key-of-the-environment")
    assert read_keys("") == ("key-of-the-environment",)
    file = tmp_path / "keys"
    file.write_text("\n".join(("", *KEYS, "")))
    assert read_keys(str(file)) == KEYS
    with caplog.at_level(logging.DEBUG):
        bound = application(ServeConfig(target="x", drafter="none", api_key_file=str(file)))._bound_deployment
    assert list(bound.init_args)[1:] == [digests(KEYS)]
    assert not any(key in f"{bound.init_args}{caplog.text}" for key in KEYS)
    monkeypatch.delenv(admission.KEY_VARIABLE)
    assert read_keys("") == ()


@pytest.mark.parametrize(
    "text", ["", "\n \n", "k" * (MIN_KEY_LENGTH - 1), "two words in one key", "schlüssel-schlüssel"]
)
def test_what_is_no_key_is_refused_and_not_repeated(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"api_key_file=.*(holds no key|at least 16 characters)") as caught:
        read_keys(str(file))
    assert not text.strip() or text not in str(caught.value)


def test_vllms_routes_stand_behind_the_same_key(embedded_target):
    from serve.app import admitted
    from serve.vllm_engine import VllmServer

    server = VllmServer(ServeConfig(target=str(embedded_target), drafter="none", engine="vllm"))
    client = TestClient(admitted(server, digests(KEYS)))
    for path in ("/v1/models", "/invocations", "/tokenize", "/version"):
        assert client.post(path, json={}).status_code == 401
    assert client.post("/invocations", json={}, headers=bearer(KEYS[0])).status_code == 503  # no engine yet


def test_httpx_reads_what_is_sent_when_a_body_is_cut_off(url):
    """The connection is closed after a 413, so that nobody reads the rest of a body."""
    response = httpx.post(f"{url}/v1/completions", content=b"x" * (LIMIT + 1), headers=bearer(KEYS[0]))
    assert response.headers["connection"] == "close"


def routes(status: int) -> FastAPI:
    """Routes that answer everything with a status, in two pieces."""
    app = FastAPI()

    @app.get("/")
    def answer() -> StreamingResponse:
        return StreamingResponse(iter([b"not ", b"for clients"]), status)

    return app


def sent_by(app: ASGIApp, *headers: tuple[bytes, bytes]) -> list[Message]:
    """All messages that answer a GET: clients look at none behind the end of an answer."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "GET", "path": "/"}

    async def answer() -> None:
        await app(scope | {"headers": [*headers], "query_string": b""}, receive, send)

    asyncio.run(answer())
    return sent


@pytest.mark.parametrize(("failure", "status"), [("EngineDeadError", 503), ("", 500)])
def test_a_500_of_an_engine_that_died_under_a_request_is_a_503(failure, status):
    seen = iter(["", failure])  # it was well when the request came
    app = admission.Admission(routes(500), keys=(), max_body_bytes=1, retry_after_s=3, failure=lambda: next(seen))
    start, *rest = sent_by(app)
    assert {each["type"] for each in rest} == {"http.response.body"}
    assert (start["status"], dict(start["headers"]).get(b"retry-after")) == (status, b"3" if failure else None)
    body = b"".join(each["body"] for each in rest)
    assert (body == b"not for clients") == (status == 500)
    if failure:
        assert json.loads(body)["error"]["code"] == "engine_down"


def test_the_proxys_own_503_says_when_to_come_back():
    response = TestClient(Unanswered(routes(503))).get("/")
    assert (response.text, response.headers["retry-after"]) == ("not for clients", str(RETRY_AFTER_S))
    assert "retry-after" not in TestClient(Unanswered(routes(200))).get("/").headers


@pytest.mark.parametrize("status", [200, 404])
def test_a_body_that_does_not_come_holds_no_place(status):
    """The rest of it comes too late, or never; a client who leaves after its body is waited for as before."""
    seen: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass
        seen.append(await receive() if message["type"] == "http.request" else message)
        await Response(status_code=status)(scope, receive, send)

    def answered(*rest: Message) -> int:
        sent: list[Message] = []
        messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, *rest])

        async def receive() -> Message:
            if (message := next(messages, None)) is None:
                await asyncio.sleep(0.2)
                return {"type": "http.disconnect"}
            return message

        async def send(message: Message) -> None:
            sent.append(message)

        admitted = admission.Admission(
            app, keys=(), max_body_bytes=9, retry_after_s=1, failure=lambda: "", body_timeout_s=0.05
        )

        async def answer() -> None:
            await admitted({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)

        asyncio.run(answer())
        return sent[0]["status"]

    assert answered() == 408
    assert answered({"type": "http.request", "body": b"}", "more_body": False}) == status
    assert seen == [{"type": "http.disconnect"}] * 2


def test_a_header_that_the_proxy_cannot_decode_is_its_senders_fault():
    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = dict(scope["headers"])[b"x-request-id"].decode()  # as Serve's does
        await Response(request_id)(scope, receive, send)

    assert sent_by(Unanswered(proxy), (b"x-request-id", b"\xc3\xa9"))[0]["status"] == 200
    start, body = sent_by(Unanswered(proxy), (b"x-request-id", b"\xe9\xff"))
    assert (start["status"], json.loads(body["body"])["error"]["code"]) == (400, "invalid_header")
