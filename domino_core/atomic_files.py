"""Files that are there whole or not at all, whoever writes them at the same time."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Generator
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    with whole(path) as made:
        made.write_bytes(content)


@contextlib.contextmanager
def whole(path: Path) -> Generator[Path]:
    """Where a file is made that `path` is to be when it is done; if that fails, nothing stays.

    No other process and no other thread, such as two calls of one actor, makes one there. Process ids are no names:
    containers that share a folder may have the same one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield made
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


@contextlib.contextmanager
def sole_writer(path: Path) -> Generator[None]:
    """ValueError while another process is in here for `path`. One that was killed is in here no more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(file.fileno()).st_nlink > 0  # or it is the lock of one that has ended just now
        except BlockingIOError:
            ours = False
        except OSError:  # a file system without locks
            ours = True
        if not ours:
            raise ValueError(f"{path} is being written by another run; wait for its end, or name another file")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
