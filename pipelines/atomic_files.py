"""Files that are there whole or not at all, whoever writes them at the same time."""

import uuid
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = beside(path)
    made.write_bytes(content)
    made.replace(path)


def beside(path: Path) -> Path:
    """Where a file is made: no other process and no other thread, such as two calls of one actor, makes one there."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
