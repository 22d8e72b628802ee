"""A client that leaves, told to an application that waits for a message.

Ray Serve cancels the task of a request whose client has left. vLLM's routes work in a task of their own, which such a
cancellation does not reach; they listen for ASGI's `http.disconnect`, and end the request in the engine then.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send


class TellsOfLeaving:
    """The same application; where a request is cancelled it receives http.disconnect (or websocket.disconnect)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._leaving: set[asyncio.Task[None]] = set()  # a task that nobody holds may vanish before it is done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.Event()
        disconnect = {"type": f"{scope['type']}.disconnect"}

        async def received() -> Any:
            message, left = asyncio.ensure_future(receive()), asyncio.ensure_future(gone.wait())
            try:
                await asyncio.wait({message, left}, return_when=asyncio.FIRST_COMPLETED)
                return message.result() if message.done() and not gone.is_set() else disconnect
            finally:
                message.cancel()
                left.cancel()

        answering = asyncio.ensure_future(self._app(scope, received, send))
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            gone.set()
            self._leaving.add(answering)
            answering.add_done_callback(self._ended)
            raise

    def _ended(self, answering: asyncio.Task[None]) -> None:
        self._leaving.discard(answering)
        if not answering.cancelled():
            answering.exception()  # of an answer that nobody waits for; asked for, so that it is not reported
