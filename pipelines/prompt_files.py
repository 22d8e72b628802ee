"""Prompt files: JSONL, JSON and Parquet as checked rows with stable ids, in chunks that a cluster can share out.

A file is checked once, before any work: a missing or empty file, broken JSON, a row of unknown shape and a repeated id
are ValueErrors that name file, line and remedy. What stays in memory is where each chunk begins, never the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

ID_KEYS = ("id", "sample_id", "conversation_id", "primary_id")
SHAPES = "messages, conversations, text, or input_ids with loss_mask"

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`num_rows` consecutive rows of a file. `offset` is a byte in JSONL, else the position of the first row."""

    path: str
    offset: int
    first_line: int
    num_rows: int


def read_prompts(path: str | Path, num_rows: int | None = None) -> Iterator[Row]:
    """Raw rows with two keys added: `sample_id` (str) and `source` ("file:line"). Checks the whole file first."""
    for chunk in prompt_chunks(path, num_rows=num_rows):
        yield from read_chunk(chunk)


def prompt_chunks(path: str | Path, rows_per_chunk: int = 256, num_rows: int | None = None) -> list[Chunk]:
    """Check a prompt file (its first `num_rows` rows) and cut it into chunks, in file order.

    ValueError as in the module's docstring.
    """
    path = Path(path)
    if num_rows is not None and num_rows < 1:
        raise ValueError(f"num_rows={num_rows}: expected at least 1, or none for all rows of {path}")
    if not path.is_file():
        raise ValueError(f"{path}: no such prompt file; give a .jsonl, .json or .parquet file with {SHAPES}")
    chunks: list[Chunk] = []
    seen: dict[str, int] = {}
    for line, offset, raw in islice(_scan(path), num_rows):
        row = _identified(raw, path, line)
        check_shape(row)
        if (sample_id := row["sample_id"]) in seen:
            first = seen[sample_id]
            raise ValueError(f"{row['source']}: id {sample_id!r} is also on line {first}; give every row its own id")
        seen[sample_id] = line
        if not chunks or chunks[-1].num_rows == rows_per_chunk:
            chunks.append(Chunk(path=str(path), offset=offset, first_line=line, num_rows=1))
        else:
            last = chunks[-1]
            chunks[-1] = Chunk(
                path=last.path, offset=last.offset, first_line=last.first_line, num_rows=last.num_rows + 1
            )
    if not chunks:
        raise ValueError(f"{path}: no rows; one JSON object per line with {SHAPES} is expected")
    return chunks


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
        yield _identified(raw, path, line)


def check_shape(row: Row) -> None:
    """ValueError unless the row has one of the accepted shapes and its parts have the right types."""
    where = row["source"]
    if row.get("input_ids") is not None or row.get("loss_mask") is not None:
        if not isinstance(row.get("input_ids"), list) or not isinstance(row.get("loss_mask"), list):
            raise ValueError(f"{where}: a pre-tokenised row needs both input_ids and loss_mask, as lists")
        if len(row["input_ids"]) != len(row["loss_mask"]):
            lengths = f"{len(row['input_ids'])} input_ids, {len(row['loss_mask'])} mask values"
            raise ValueError(f"{where}: {lengths}; give one mask value for each token")
    elif row.get("messages") is not None or row.get("conversations") is not None:
        turns(row)
    elif not isinstance(row.get("text"), str):
        raise ValueError(f"{where}: keys {sorted(set(row) - {'sample_id', 'source'})}, expected {SHAPES}")
    else:
        _check_encodable(row["text"], f"{where}: text")


ROLES = {"system": "system", "developer": "developer", "user": "user", "human": "user", "tool": "tool"} | {
    "assistant": "assistant",
    "gpt": "assistant",
}


def turns(row: Row) -> list[dict[str, str]]:
    """The conversation of a row as [{"role", "content", "reasoning_content"?}]. ValueError names the wrong turn."""
    where = row["source"]
    raw = row["messages"] if row.get("messages") is not None else row["conversations"]
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{where}: the conversation is {raw!r:.60}, expected a list of turns")
    found: list[dict[str, str]] = []
    for number, turn in enumerate(raw, 1):
        if not isinstance(turn, dict):
            raise ValueError(f"{where}: turn {number} is {turn!r:.60}, expected an object with role and content")
        role = turn.get("role") or turn.get("from")
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where}: turn {number} has role {role!r}; known are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"{where}: content of turn {number} is {content!r:.60}; only plain text can be used")
        message = {"role": ROLES[role], "content": content}
        if isinstance(turn.get("reasoning_content"), str):
            message["reasoning_content"] = turn["reasoning_content"]
        _check_encodable("".join(message.values()), f"{where}: turn {number}")
        found.append(message)
    return found


def _check_encodable(text: str, where: str) -> None:
    """JSON can spell half of a surrogate pair ("\\ud800"), which is no character and has no tokens."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where} contains an unpaired surrogate, which is no character; remove or repair the row")


def _identified(raw: object, path: Path, line: int) -> Row:
    """A row with `sample_id` and `source`. Rows without an id get one from their content and place."""
    source = f"{path}:{line}"
    if not isinstance(raw, dict):
        raise ValueError(f"{source}: {raw!r:.60} is not a JSON object; expected one with {SHAPES}")
    given = next((raw[key] for key in ID_KEYS if raw.get(key) is not None), None)
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
        return not file.read(64).lstrip().startswith(b"[")


def _scan(path: Path) -> Iterator[tuple[int, int, object]]:
    """(line, offset, raw row) of every row, lines counted from 1."""
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
                yield line, offset, _parse(text, path, line)
            offset += len(text)


def _parse(text: bytes, path: Path, line: int) -> object:
    try:
        return json.loads(text)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError alike
        raise ValueError(f"{path}:{line}: not valid JSON ({error}); every line must be one JSON object") from None


@lru_cache(maxsize=1)
def _json_array(path: str) -> list[object]:
    """A JSON array has no lines to seek to: it is read whole, and kept for the next chunk."""
    rows = _parse(Path(path).read_bytes(), Path(path), 1)
    assert isinstance(rows, list)
    return rows


def _parquet_rows(path: Path, start: int, count: int | None) -> Iterator[Row]:
    """Rows [start, start + count) of a Parquet file, reading only the row groups that hold them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:  # the library's message does not say which file it is
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file, or a damaged one: {error}") from error
    stop = file.metadata.num_rows if count is None else start + count
    first = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first < stop and first + rows > start:
            part = file.read_row_group(group).slice(max(0, start - first), min(stop, first + rows) - max(start, first))
            for batch in part.to_batches(max_chunksize=256):
                yield from batch.to_pylist()
        first += rows
