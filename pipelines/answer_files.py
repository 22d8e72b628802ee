"""Answers on disk: part files that become one file in the order of the prompts, and turn into a part again when more
prompts join. Answers do not stay in memory; what is known of each is where it is, and to which prompt.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from domino_core.atomic_files import write_atomically
from domino_core.json_files import read_object
from pipelines.feature_store import Events, check_events, read_events, record
from pipelines.prompt_files import read_prompts
from pipelines.prompt_rows import Row, is_conversation, tools
from pipelines.prompts import prompts_for_answering

if TYPE_CHECKING:
    from pipelines.regenerate import AnswerRun

# Named, because the first thousand answers need not have every key that a later one has.
_TURN = pa.struct(
    [(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")]
)
_ANSWERED = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(_TURN)),
        ("tools", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("finish_reason", pa.string()),
        ("prompt_hash", pa.string()),
    ]
)


@dataclass(frozen=True)
class Place:
    """Where an answer is, and the hash of the prompt that it answers ("": the file does not say)."""

    path: Path
    offset: int
    prompt_hash: str


def prompt_hash(row: Row) -> str:
    """16 hex digits over what the target is asked in a row: another answer given there is no part of it."""
    if is_conversation(row):
        asked: Any = [prompts_for_answering(row), tools(row)]
    else:
        asked = [row.get("text"), row.get("input_ids"), row.get("loss_mask")]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def reopen(run: AnswerRun) -> dict[str, Place]:
    """Turn a finished output back into a part, and its record into events, so that new prompts can join it.

    ValueError if the prompts are no longer those that were answered.
    """
    if Path(run.output).exists() and not (run.parts / "finished.jsonl").exists():
        run.parts.mkdir(parents=True, exist_ok=True)
        beside = run.parts / "finished.jsonl.tmp"
        with beside.open("w", encoding="utf-8") as file:
            for row in read_prompts(run.output):
                kept = {key: value for key, value in row.items() if key not in ("sample_id", "source")}
                file.write(json.dumps(kept) + "\n")
        beside.rename(run.parts / "finished.jsonl")
        record(run.parts / "events", refused_before(run))
    places = _places(run)
    _check_same_prompts(run, places)
    return places


def refused_before(run: AnswerRun) -> Events:
    """Rows that a finished run left out, by its record. ValueError if it is damaged."""
    info = read_object(run.info)
    found = {"answered": [], "captured": [], "failed": info.get("failed", {}), "skipped": info.get("skipped", {})}
    check_events(found, run.info)
    return Events(failed=found["failed"], skipped=found["skipped"])


def finish(run: AnswerRun) -> None:
    """Put the answers into one file in the order of the prompts, counts and reasons beside it; remove the parts."""
    events = read_events(run.parts / "events")
    places = _places(run)
    reasons: Counter[str] = Counter()
    left: dict[str, dict[str, str]] = {"skipped": {}, "failed": {}}

    def lines() -> Iterator[str]:
        for row in read_prompts(run.data, run.num_rows):
            sample_id = row["sample_id"]
            if sample_id in places:
                with places[sample_id].path.open("rb") as file:
                    file.seek(places[sample_id].offset)
                    line = file.readline().decode()
                reasons[json.loads(line)["finish_reason"]] += 1
                yield line
            elif sample_id in events.failed:
                left["failed"][sample_id] = events.failed[sample_id]
            else:
                assert sample_id in events.skipped, f"{row['source']}: neither answered nor refused"
                left["skipped"][sample_id] = events.skipped[sample_id]

    beside = Path(f"{run.output}.tmp")
    every = lines()
    first = next(every, None)
    if first is None:
        reason = next(iter({**left["failed"], **left["skipped"]}.values()), "no rows")
        raise ValueError(f"no prompt could be answered, so there is no {run.output}; the first: {reason}")
    write = write_lines if Path(run.output).suffix == ".jsonl" else write_parquet
    write(beside, chain([first], every))
    beside.replace(run.output)
    # Of the rows that were asked for: every one of them is one of the three.
    counts = {"rows": reasons.total() + sum(map(len, left.values())), "answered": reasons.total()}
    counts |= {name: len(left[name]) for name in left}
    counts |= {f"finish_{reason}": count for reason, count in sorted(reasons.items())}
    write_atomically(run.info, json.dumps({"asked": run.asked, "counts": counts, **left}, indent=1).encode())
    shutil.rmtree(run.parts)


def write_lines(path: Path, lines: Iterator[str]) -> None:
    """JSON lines as they are."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def write_parquet(path: Path, lines: Iterator[str]) -> None:
    """JSON lines as Parquet, a thousand rows at a time."""
    with pq.ParquetWriter(path, _ANSWERED) as writer:
        while rows := [json.loads(line) for line in islice(lines, 1000)]:
            writer.write_table(pa.Table.from_pylist(rows, schema=_ANSWERED))


def _places(run: AnswerRun) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for path in sorted(run.parts.glob("*.jsonl")):
        with path.open("rb") as file:
            offset = 0
            for line in file:
                row = json.loads(line)
                places.setdefault(row["id"], Place(path, offset, row.get("prompt_hash") or ""))
                offset += len(line)
    return places


def _check_same_prompts(run: AnswerRun, places: dict[str, Place]) -> None:
    """ValueError where an answer would go to another prompt, or be lost: it may have cost hours."""
    gone = set(places)
    for row in read_prompts(run.data, run.num_rows) if places else ():
        sample_id = row["sample_id"]
        if sample_id not in gone:
            continue
        gone.remove(sample_id)
        known = places[sample_id].prompt_hash
        if known and known != prompt_hash(row):
            remedy = "give the row another id, or another output"
            raise ValueError(f"{row['source']}: {sample_id!r} has been answered with another prompt; {remedy}")
    if gone:
        rows = f"the first {run.num_rows:,} rows of {run.data}" if run.num_rows else run.data
        example = f"{len(gone):,} prompts that are not in {rows} (such as {min(gone)!r})"
        raise ValueError(f"{run.output} has answers to {example}, which would be lost; give another output")
