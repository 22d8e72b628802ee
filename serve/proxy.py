"""Ray Serve's proxy, where it has no answer of a replica: 503, and a time to come back.

A replica that is killed takes its requests along, and Serve's proxy then ends without having answered; uvicorn makes a
bare 500 of that, as of headers that it cannot decode. For a deployment that failed the proxy has a 503 that does not
say when. Nothing in a replica can repair any of it, so this runs in the proxy, by Serve's own hook for middleware:

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve.proxy:middlewares    where Ray is started
"""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.admission import error_body, saying_when

RETRY_AFTER_S = 2  # Serve has replaced a replica's routes by then, where another one runs


def middlewares() -> list[Middleware]:
    """Called by Serve's proxies when they start."""
    return [Middleware(Unanswered)]


class Unanswered:
    """The proxy; what it leaves without any answer gets a 503 in OpenAI's shape, and every 503 says when."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noticed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(saying_when(message, RETRY_AFTER_S) if message["type"] == "http.response.start" else message)

        try:
            await self._app(scope, receive, noticed)
        except UnicodeDecodeError as error:  # of a header that Serve reads itself: a request's id, a session's
            if begun or scope["type"] != "http":
                raise
            body = error_body(400, f"a header of the request is not UTF-8: {error}", code="invalid_header")
            return await JSONResponse(body, 400)(scope, receive, send)
        if scope["type"] == "http" and not begun:
            message = "the replica that had this request is gone: send it again"
            body = error_body(503, message, code="replica_lost")
            await JSONResponse(body, 503, {"Retry-After": str(RETRY_AFTER_S)})(scope, receive, send)
