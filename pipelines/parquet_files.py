"""Opening a Parquet file that somebody hands in: what asks to be unpickled is refused before a value is read.

Where Ray Data is imported, Arrow knows its type for columns of Python objects, and turning such a column into values
runs whatever is in it. Ray's own readers refuse it; ours, which go to Arrow directly, do here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PICKLED = "ray.data.arrow_pickled_object"


def open_parquet(path: str | Path, *, memory_map: bool = False) -> pq.ParquetFile:
    """ValueError, which names the file, for what is no Parquet file and for columns of pickled objects."""
    with refusing_damage(path):
        file = pq.ParquetFile(path, memory_map=memory_map)
        schema = file.schema_arrow
    check_unpickled(schema, path)
    return file


@contextmanager
def refusing_damage(path: str | Path) -> Iterator[None]:
    """Around what reads a Parquet file: what pyarrow says of a damaged one becomes a ValueError that names it."""
    try:  # a damaged file is the user's to repair; values in it may be damaged where its structure is not
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"{path} is no Parquet file, or a damaged one: {error}") from error


def check_unpickled(schema: pa.Schema, path: str | Path) -> None:
    """ValueError if a column, or something in one, is of Ray's type for pickled objects."""
    for field in schema:
        if any(_name(part) == PICKLED for part in _parts(field)):
            raise ValueError(
                f"{path}: column {field.name} holds pickled objects, which can run code and are not read; "
                "write it with plain values, where you trust it"
            )


def _name(field: pa.Field) -> str:
    """Of the field's extension type, known to this process or not (yet)."""
    if isinstance(field.type, pa.BaseExtensionType):
        return field.type.extension_name
    return (field.metadata or {}).get(b"ARROW:extension:name", b"").decode(errors="replace")


def _parts(field: pa.Field) -> Iterator[pa.Field]:
    yield field
    kind = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
    for index in range(kind.num_fields):
        yield from _parts(kind.field(index))
