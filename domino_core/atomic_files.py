"""Files that are there whole or not at all, whoever writes them at the same time."""

import contextlib
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
