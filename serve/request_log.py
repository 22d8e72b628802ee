"""One line where a request starts, one where it ends or is refused, under its id, and without a word of its text.

Under Serve's `logging_config` with `encoding: JSON` the figures are fields of their own, as they are here in `extra`.
Serve's proxy gives requests without an X-Request-ID one, and every answer has it in its header.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

from domino_core.decode import Acceptance

logger = logging.getLogger("ray.serve.domino")

HEADER = "x-request-id"
LONGEST_ID = 128
LONGEST_PARAM = 64  # an unknown parameter's name is whatever its sender made up


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id, or Serve's; a new one where there is neither. ValueError for one that no log should hold.

    Refused and not replaced: the proxy, which is Serve's, has logged it by now and would give it back as it came.
    """
    given = headers.get(HEADER)
    if given is None:
        return uuid.uuid4().hex
    if not re.fullmatch(f"[!-~]{{1,{LONGEST_ID}}}", given):
        raise ValueError(f"X-Request-ID: expected 1 to {LONGEST_ID} visible ASCII characters without spaces")
    return given


def started(request: str, *, answers: int, prompt_tokens: int, stream: bool) -> None:
    fields = {"event": "start", "answers": answers, "prompt_tokens": prompt_tokens, "stream": stream}
    logger.info("start: %d answers, %d prompt tokens", answers, prompt_tokens, extra=fields | {"request_id": request})


def finished(request: str, *, tokens: int, acceptance: Acceptance, seconds: float, reason: str, version: str) -> None:
    """reason: stop, length, abort (the client left) or error; several answers have theirs joined by commas."""
    tau = round(acceptance.tau, 3)
    fields = {"event": "finish", "completion_tokens": tokens, "tau": tau, "seconds": round(seconds, 4)}
    fields |= {"reason": reason, "drafter_version": version, "request_id": request}
    logger.info("finish: %d tokens, tau %.3f, %.3f s, %s", tokens, tau, seconds, reason, extra=fields)


def refused(headers: Mapping[str, str], status: int, param: str | None, code: str | None) -> None:
    """An answer other than 200. Its message stays out: it may quote what was sent."""
    try:  # an id that is itself what is refused
        own = request_id(headers)
    except ValueError:
        own = "invalid"
    shown = (param or "")[:LONGEST_PARAM]
    fields: dict[str, Any] = {"event": "refuse", "status": status, "param": shown, "code": code or ""}
    level = logging.INFO if status < 500 else logging.ERROR
    logger.log(level, "refuse: %d %s %s", status, shown, code or "", extra=fields | {"request_id": own})
