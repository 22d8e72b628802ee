"""Ends that a job can clean up after."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """A termination and a closed terminal end the block as Ctrl-C does, for what it has started must not stay."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
