"""Secrets out of what is shown or stored: addresses with a password in them, and settings whose name says secret."""

import re

_USER_INFO = re.compile(r"(?<=://)([^\s/:@'\"]*):[^\s/'\"]*@")
_SECRET = "password|passwd|secret|api[_-]?key|access[_-]?token|hf[_-]token"
_NAMED = re.compile(rf"((?:^|[?&\s'\"])[\w.-]*(?:{_SECRET}))=[^\s&'\"]+", re.IGNORECASE)


def without_user(address: str) -> str:
    """The address for clients that take no `user:password@` in it, as Python's own does not."""
    return re.sub(r"(?<=://)[^/]*@", "", address)


def redacted(text: str) -> str:
    """The text with `://user:PASSWORD@host` and `password=VALUE` (token, key, secret) masked, all else as it is."""
    return _NAMED.sub(r"\1=***", _USER_INFO.sub(r"\1:***@", text))
