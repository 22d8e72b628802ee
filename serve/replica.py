"""The engine loop of a replica: one thread that owns the engines, and requests that join and leave between rounds.

Everything that touches an engine, or the device it is on, happens on the loop's thread; others leave a note in its
inbox. Normally there is one engine. While a new drafter version is tried there are two, and after the swap the old one
stays until its last request is answered: new requests go to the live engine, running ones finish where they began. A
canary is a second engine that stays: its share of the new requests goes there (serve/canary.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from domino_core.engine import Engine
from domino_core.request import Output, Request
from serve.figures import Figures

logger = logging.getLogger("ray.serve.domino")

Result = TypeVar("Result")
Sink = Callable[["Output | Exception"], None]


class EngineError(RuntimeError):
    """The engine raised in the middle of a round; its requests are lost, and a live engine's replica is unhealthy."""


@dataclass(eq=False)
class Member:
    """An engine of the loop, the drafter version in it, its requests by the engine's ids, and what it did for them."""

    engine: Engine
    version: str
    tickets: dict[int, Ticket] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    failure: str = ""

    @property
    def busy(self) -> bool:
        return not self.failure and self.engine.has_work


@dataclass(eq=False)
class Ticket:
    """One request on its way. `sink` gets every Output, or one exception and nothing after it; called by the loop."""

    member: Member
    request: Request
    sink: Sink
    request_id: int | None = None  # the engine's; None until it was added, and again once it is over


class EngineLoop:
    """Runs `step` of its engines while they have work. Methods may be called from any thread."""

    def __init__(self, engine: Engine, version: str) -> None:
        self.live = Member(engine, version)
        self.canary: Member | None = None
        self._members = [self.live]
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # no request slips into the inbox behind the note that ends the thread
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why requests cannot be answered, or "" when all is well."""
        return "the server is shutting down" if self._closed else self.live.failure

    def submit(self, request: Request, sink: Sink, member: Member | None = None) -> Ticket:
        """Queue a request on the live engine, or on a given one. EngineError when nothing would answer."""
        member = member or self.live
        ticket = Ticket(member, request, sink)
        with self._lock:
            if member.failure or self._closed:
                raise EngineError(member.failure or self.failure)
            self._inbox.put(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Free the request's row before the next round. Nothing happens if it is already over."""
        self._inbox.put(lambda: self._leave(ticket))

    def generate(self, request: Request, member: Member, timeout_s: float) -> list[Output]:
        """All outputs of one request, for callers that are not asynchronous. TimeoutError after `timeout_s`."""
        outputs: queue.SimpleQueue[Output | Exception] = queue.SimpleQueue()
        ticket = self.submit(request, outputs.put, member)
        received: list[Output] = []
        while not received or received[-1].finish_reason is None:
            try:
                output = outputs.get(timeout=timeout_s)
            except queue.Empty:
                self.cancel(ticket)
                raise TimeoutError(f"drafter {member.version}: no round within {timeout_s:g} s") from None
            if isinstance(output, Exception):
                raise output
            received.append(output)
        return received

    def call(self, work: Callable[[], Result]) -> Result:
        """Do something on the loop's thread, between two rounds, and wait for its result or exception."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                raise EngineError(self.failure)
            self._inbox.put(partial(_carry_out, future, work))
        try:
            return future.result()
        finally:
            del future  # see _carry_out

    def promote(self, member: Member) -> None:
        """From now on new requests go to this engine. The old one leaves when its last request is answered."""
        self.live = member
        if self.canary is member:
            self.canary = None
        self._inbox.put(lambda: None)  # wakes the thread, which then drops what has drained

    def try_out(self, member: Member | None) -> None:
        """Keep this engine beside the live one, for the requests that are submitted to it; None: no longer."""
        self.canary = member
        self._inbox.put(lambda: None)

    def counts(self) -> tuple[int, int]:
        """Requests that have a row, and requests that wait for one."""
        engines = [member.engine for member in list(self._members)]
        return sum(engine.num_running for engine in engines), sum(engine.num_waiting for engine in engines)

    @property
    def draining(self) -> str:
        """The version of an engine that takes no more requests and still answers some; "" if there is none."""
        old = (member for member in list(self._members) if not self._stays(member) and member.tickets)
        return next((member.version for member in old), "")

    def _stays(self, member: Member) -> bool:
        return member is self.live or member is self.canary

    def versions(self) -> list[str]:
        """Drafter versions of the engines that are here: the live one, a canary's, and those that still answer."""
        return sorted({self.live.version, *(member.version for member in list(self._members))})

    def close(self) -> None:
        """End the thread after the round it is in; requests still running get an EngineError."""
        with self._lock:
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._read_inbox():
            for member in self._members:
                if member.busy:
                    self._advance(member)
            self._members = [member for member in self._members if self._stays(member) or member.tickets]
        for member in self._members:
            self._fail(member, "the server is shutting down")

    def _read_inbox(self) -> bool:
        """Carry out what was asked since the last round; wait for something when there is nothing to do."""
        idle = not any(member.busy for member in self._members)
        while idle or not self._inbox.empty():
            note = self._inbox.get()
            if note is None:
                return False
            note()
            del note  # an error's frames would keep it
            idle = False
        return True

    def _add(self, ticket: Ticket) -> None:
        member = ticket.member
        if member.failure:
            ticket.sink(EngineError(member.failure))
            return
        if member not in self._members:
            self._members.append(member)
        try:
            ticket.request_id = member.engine.add(ticket.request)
        except ValueError as error:  # a request that can never fit: its sender's mistake, not the engine's
            ticket.sink(error)
            return
        member.tickets[ticket.request_id] = ticket

    def _leave(self, ticket: Ticket) -> None:
        if ticket.request_id is not None and ticket.request_id in ticket.member.tickets:
            ticket.member.engine.cancel(ticket.request_id)
            del ticket.member.tickets[ticket.request_id]

    def _advance(self, member: Member) -> None:
        """One round of one engine. Whatever it raises ends its requests and marks it; other engines go on."""
        engine, rows = member.engine, member.engine.num_running
        takes_prompts = engine.num_waiting > 0 and rows < engine.max_rows
        began = time.perf_counter()
        try:
            outputs = engine.step()
        except Exception as error:
            logger.exception("engine with drafter %s failed", member.version)
            self._fail(member, f"{type(error).__name__}: {error}")
            return
        if rows and not takes_prompts:
            tokens = sum(len(output.tokens) for output in outputs)
            member.figures.stepped(rows, time.perf_counter() - began, tokens)
        for output in outputs:
            ticket = member.tickets[output.request_id]
            if output.finish_reason is not None:
                del member.tickets[output.request_id]
            ticket.sink(output)

    def _fail(self, member: Member, reason: str) -> None:
        member.failure = reason
        tickets, member.tickets = list(member.tickets.values()), {}
        for ticket in tickets:
            ticket.sink(EngineError(reason))


def _carry_out(future: Future[Result], work: Callable[[], Result]) -> None:
    try:  # the caller's boundary: the loop goes on whatever is raised
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
        del future  # it holds the error, which holds this frame: a circle with all that `work` had on the device
