"""A cancelled request reaches an application that works in a task of its own and listens for http.disconnect."""

import asyncio
from typing import Any

import pytest

from serve.disconnects import TellsOfLeaving

DISCONNECT = {"type": "http.disconnect"}


class Application:
    """As vLLM's routes: the answer in one task, a listener for the client's leaving in another."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.told: list[Any] = []
        self.ended = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.told.append(await receive())
        work, listener = asyncio.create_task(self._answer(send)), asyncio.create_task(self._listen(receive))
        _, pending = await asyncio.wait([work, listener], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    async def _answer(self, send: Any) -> None:
        try:
            await asyncio.sleep(self.seconds)
            await send("answer")
            self.ended = "answered"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise

    async def _listen(self, receive: Any) -> None:
        self.told.append(await receive())


async def call(app: Application, cancel: bool, messages: list[Any], kind: str = "http") -> list[Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    request = asyncio.create_task(TellsOfLeaving(app)({"type": kind}, receive, send))
    await asyncio.sleep(0.02)
    if cancel:
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.sleep(0.02)
    else:
        await request
    return sent


def test_cancelled_request_is_told_and_ends():
    app = Application(seconds=30)
    assert asyncio.run(call(app, cancel=True, messages=["body"])) == []
    assert (app.told, app.ended) == (["body", DISCONNECT], "cancelled")


def test_websocket_is_told_in_its_own_words():
    app = Application(seconds=30)
    asyncio.run(call(app, cancel=True, messages=["body"], kind="websocket"))
    assert app.told == ["body", {"type": "websocket.disconnect"}]


def test_answer_comes_through():
    app = Application(seconds=0.05)
    assert asyncio.run(call(app, cancel=False, messages=["body"])) == ["answer"]
    assert (app.told, app.ended) == (["body"], "answered")


def test_servers_own_message_comes_through():
    app = Application(seconds=30)
    asyncio.run(call(app, cancel=False, messages=["body", DISCONNECT]))
    assert (app.told, app.ended) == (["body", DISCONNECT], "cancelled")
