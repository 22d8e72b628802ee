"""What a request must have before an engine sees it: a key where there is one, a body of a bounded size.

    request --> Admission --> the torch engine's routes, or vLLM's

Both engines stand behind it, so that a key, a limit and `Retry-After` mean the same on either. Keys are read once,
where the application is put together, and only their digests go to replicas: no setting, log, page or answer has a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEY_VARIABLE = "DOMINO_API_KEY"
MIN_KEY_LENGTH = 16  # a digest of less could be guessed
BODY_TIMEOUT_S = 20.0
"""Until a body is there: a sender who stops in the middle would hold a place of a replica for ever."""
OPEN_PATHS = ("/health", "/metrics", "/canary")  # for probes, scrapers and jobs.promote: figures, no text of anybody


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape."""
    kind = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "internal_server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def read_keys(file: str) -> tuple[str, ...]:
    """The keys that clients may send: the lines of a file, or $DOMINO_API_KEY; none of either leaves the endpoint open.

    ValueError, without a key in it, for a file that cannot be read or holds none, and for keys that are too short.
    """
    if file:
        source = f"api_key_file={file}"
        try:  # a user's file
            keys = tuple(line.strip() for line in Path(file).expanduser().read_text().splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} cannot be read ({error}): name a text file with one key a line") from error
        if not keys:
            raise ValueError(f"{source} holds no key: write one a line")
    else:
        source, given = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
        if given is None:
            return ()
        keys = (given.strip(),)
    for key in keys:
        if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                f"{source}: a key needs at least {MIN_KEY_LENGTH} characters, printable ASCII without spaces "
                '(python -c "import secrets; print(secrets.token_urlsafe(32))" makes one)'
            )
    return keys


def digests(keys: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def saying_when(start: Message, retry_after_s: int) -> Message:
    """The start of a response; one that refuses for now, and does not say until when, then does."""
    headers = start.get("headers", ())
    if start["status"] not in (429, 503) or any(name.lower() == b"retry-after" for name, _ in headers):
        return start
    return {**start, "headers": [*headers, (b"retry-after", str(retry_after_s).encode())]}


class Admission:
    """An application behind a key, a limit of bytes, and the rule that who is refused for now is told when to return.

    keys: digests of the keys that are accepted; none: nobody is asked. failure(): why the engine cannot answer, or "".
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: tuple[bytes, ...],
        max_body_bytes: int,
        retry_after_s: int,
        failure: Callable[[], str],
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app, self._keys, self._failure, self._body_timeout_s = app, keys, failure, body_timeout_s
        self._max_body_bytes, self._retry_after_s = max_body_bytes, retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        open_to_all = path in OPEN_PATHS or scope.get("method") == "OPTIONS"  # which browsers send without a key
        if self._keys and not open_to_all and not self._knows(headers.get(b"authorization", b"")):
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            message = "this server asks for an API key: send it as `Authorization: Bearer KEY`"
            refusal = JSONResponse(
                error_body(401, message, code="invalid_api_key"), 401, {"WWW-Authenticate": "Bearer"}
            )
            return await refusal(scope, receive, send)
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        if not open_to_all and (failure := self._failure()):
            return await self._engine_down(failure)(scope, receive, send)
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            return await self._too_large()(scope, receive, send)
        await self._counted(scope, receive, self._saying_when(scope, receive, send))

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        found = hashlib.sha256(key.strip()).digest()
        # All of them are compared, in constant time: how long it takes says nothing about any.
        same = [hmac.compare_digest(found, known) for known in self._keys]
        return any(same) and scheme.lower() == b"bearer"

    def _too_large(self) -> JSONResponse:
        message = f"the request body is larger than {self._max_body_bytes} bytes (serve.max_body_bytes): send less"
        return JSONResponse(error_body(413, message, code="request_too_large"), 413, {"Connection": "close"})

    def _too_late(self) -> JSONResponse:
        message = f"the request body was not there within {self._body_timeout_s:g} s: send it again"
        return JSONResponse(error_body(408, message, code="request_timeout"), 408, {"Connection": "close"})

    def _engine_down(self, failure: str) -> JSONResponse:
        body = error_body(503, f"the engine is down: {failure}", code="engine_down")
        return JSONResponse(body, 503, {"Retry-After": str(self._retry_after_s)})

    def _saying_when(self, scope: Scope, receive: Receive, send: Send) -> Send:
        replaced = False

        async def told(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start":
                # vLLM's own word for requests whose engine died under them is 500, which nobody sends again.
                if message["status"] == 500 and (failure := self._failure()):
                    replaced = True
                    return await self._engine_down(failure)(scope, receive, send)
                message = saying_when(message, self._retry_after_s)
            if not replaced:
                await send(message)

        return told

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body that grows too long, or does not come, is answered here, whatever the routes say."""
        read, begun = 0, False
        refusal: JSONResponse | None = None
        loop = asyncio.get_running_loop()
        deadline: float | None = loop.time() + self._body_timeout_s  # None: the body is there

        async def counted() -> Message:
            nonlocal read, refusal, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                refusal = self._too_late()
                return {"type": "http.disconnect"}
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self._max_body_bytes:
                    refusal = self._too_large()
                    return {"type": "http.disconnect"}
            if not message.get("more_body", False):
                deadline = None
            return message

        async def passed_on(message: Message) -> None:
            nonlocal begun
            if refusal is None or begun:
                begun = True
                await send(message)

        try:
            await self._app(scope, counted, passed_on)
        except Exception:  # of routes that were told that the client has left
            if refusal is None:
                raise
        if refusal is not None and not begun:
            await refusal(scope, receive, send)
