"""Prompt files: JSONL, JSON and Parquet as checked rows with stable ids, in chunks that a cluster can share out.

A file is checked once, before any work: a missing or empty file, broken JSON, a row of unknown shape and a repeated id
are ValueErrors that name file, line and remedy. What stays in memory is where each chunk begins, never the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines.prompt_rows import ID_KEYS, SHAPES, Row, check_shape


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`num_rows` consecutive rows of a file. `offset` is a byte in JSONL, else the position of the first row."""

    path: str
    offset: int
    first_line: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class CheckedRow:
    """A row of a file where it stands. `row` is None if it could not be read, `problem` is None if it is in order."""

    row: Row | None
    line: int
    offset: int
    problem: str | None


def read_prompts(path: str | Path, num_rows: int | None = None) -> Iterator[Row]:
    """Raw rows with two keys added: `sample_id` (str) and `source` ("file:line"). Checks the whole file first."""
    for chunk in prompt_chunks(path, num_rows=num_rows):
        yield from read_chunk(chunk)


def prompt_chunks(path: str | Path, rows_per_chunk: int = 256, num_rows: int | None = None) -> list[Chunk]:
    """Check a prompt file (its first `num_rows` rows) and cut it into chunks, in file order.

    ValueError as in the module's docstring.
    """
    chunks: list[Chunk] = []
    for found in check_rows(path, num_rows):
        if found.problem:
            raise ValueError(found.problem)
        if not chunks or chunks[-1].num_rows == rows_per_chunk:
            chunks.append(Chunk(path=str(path), offset=found.offset, first_line=found.line, num_rows=1))
        else:
            chunks[-1] = replace(chunks[-1], num_rows=chunks[-1].num_rows + 1)
    return chunks


def check_rows(path: str | Path, num_rows: int | None = None) -> Iterator[CheckedRow]:
    """Every row of a file with what is wrong with it. ValueError if the file as a whole cannot be read, or is empty."""
    path = Path(path)
    if num_rows is not None and num_rows < 1:
        raise ValueError(f"num_rows={num_rows}: expected at least 1, or none for all rows of {path}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give one .jsonl, .json or .parquet file")
    if not path.is_file():
        raise ValueError(f"{path}: no such prompt file; give a .jsonl, .json or .parquet file with {SHAPES}")
    seen: dict[str, int] = {}
    line = 0
    for line, offset, raw in islice(_scan(path), num_rows):
        row, problem = None, None
        try:  # what is wrong with one row is told beside the others
            row = _identified(_parse(raw, path, line), path, line)
            check_shape(row)
        except ValueError as error:
            problem = str(error)
        except RecursionError:  # a little less deep than what cannot be parsed
            problem = f"{path}:{line}: is damaged: nested too deeply; remove or repair the row"
        if row is not None and (first := seen.setdefault(row["sample_id"], line)) != line:
            problem = f"{row['source']}: id {row['sample_id']!r} is also on line {first}; give every row its own id"
        yield CheckedRow(row=row, line=line, offset=offset, problem=problem)
    if not line:
        raise ValueError(f"{path}: no rows; one JSON object per line with {SHAPES} is expected")


def read_chunk(chunk: Chunk) -> Iterator[Row]:
    """The rows of a chunk, with `sample_id` and `source`."""
    path = Path(chunk.path)
    if _is_lines(path):
        rows = ((line, raw) for line, _, raw in _scan_lines(path, chunk.offset, chunk.first_line))
    elif path.suffix == ".parquet":
        rows = enumerate(_parquet_rows(path, chunk.offset, chunk.num_rows), chunk.first_line)
    else:
        rows = enumerate(_json_array(str(path))[chunk.offset :], chunk.first_line)
    for _, (line, raw) in zip(range(chunk.num_rows), rows, strict=False):
        yield _identified(_parse(raw, path, line), path, line)


def _identified(raw: object, path: Path, line: int) -> Row:
    """A row with `sample_id` and `source`. Rows without an id get one from their content and place."""
    source = f"{path}:{line}"
    if not isinstance(raw, dict):
        raise ValueError(f"{source}: {raw!r:.60} is not a JSON object; expected one with {SHAPES}")
    given = next((raw[key] for key in ID_KEYS if raw.get(key) not in (None, "")), None)
    if given is None:
        digest = hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()
        given = f"{digest[:12]}-{line}"
    return {**raw, "sample_id": str(given), "source": source}


def _is_lines(path: Path) -> bool:
    """JSONL by name, and .json files that do not begin with a bracket."""
    if path.suffix == ".parquet":
        return False
    if path.suffix == ".jsonl":
        return True
    if path.suffix != ".json":
        raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; give .jsonl, .json or .parquet")
    with path.open("rb") as file:
        return not file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _scan(path: Path) -> Iterator[tuple[int, int, object]]:
    """(line, offset, row as `_parse` takes it) of every row, lines counted from 1."""
    if _is_lines(path):
        yield from _scan_lines(path, 0, 1)
    elif path.suffix == ".parquet":
        yield from ((index + 1, index, raw) for index, raw in enumerate(_parquet_rows(path, 0, None)))
    else:
        yield from ((index + 1, index, raw) for index, raw in enumerate(_json_array(str(path))))


def _scan_lines(path: Path, offset: int, first_line: int) -> Iterator[tuple[int, int, object]]:
    with path.open("rb") as file:
        file.seek(offset)
        for line, text in enumerate(file, first_line):
            if text.strip():
                yield line, offset, text
            offset += len(text)


def _parse(raw: object, path: Path, line: int) -> object:
    """A line of JSON as an object; what comes from other files is one already."""
    try:
        return json.loads(raw) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or brackets nested by the thousand
        raise ValueError(f"{path}:{line}: not valid JSON ({error}); every line must be one JSON object") from None


@lru_cache(maxsize=1)
def _json_array(path: str) -> list[object]:
    """A JSON array has no lines to seek to: it is read whole, and kept for the next chunk."""
    rows = _parse(Path(path).read_bytes(), Path(path), 1)
    assert isinstance(rows, list)
    return rows


def _parquet_rows(path: Path, start: int, count: int | None) -> Iterator[Row]:
    """Rows [start, start + count) of a Parquet file, reading only the row groups that hold them."""
    from pipelines.parquet_files import open_parquet, refusing_damage

    file = open_parquet(path)
    stop = file.metadata.num_rows if count is None else start + count
    first = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first < stop and first + rows > start:
            with refusing_damage(path):
                part = file.read_row_group(group).slice(
                    max(0, start - first), min(stop, first + rows) - max(start, first)
                )
            for batch in part.to_batches(max_chunksize=256):
                with refusing_damage(path):
                    read = batch.to_pylist()
                yield from (_without_nulls(row) for row in read)
        first += rows


def _without_nulls(row: Row) -> Row:
    """A table gives every tool and every call all keys that any of them has: those that are null were not there."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(item) for item in value]
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if item is not None}
        return value

    def clean_turn(turn: Any) -> Any:
        return (
            {**turn, "tool_calls": clean(turn["tool_calls"])}
            if isinstance(turn, dict) and turn.get("tool_calls")
            else turn
        )

    cleaned = {**row, "tools": clean(row["tools"])} if "tools" in row else dict(row)
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list):
            cleaned[key] = [clean_turn(turn) for turn in row[key]]
    return cleaned
