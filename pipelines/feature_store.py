"""Features on disk: a folder of Parquet files with a manifest, and beside it the record of what became of every row.

Files are written beside their place and renamed, and are named by the rows in them: whoever writes the same rows again
overwrites them. Nothing here needs Ray.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from domino_core.atomic_files import whole, write_atomically
from domino_core.features import FeatureMeta, fit_problems
from domino_core.json_files import read_json, read_object
from pipelines.parquet_files import open_parquet, refusing_damage

MANIFEST = "manifest.json"
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Events:
    """What became of rows: ids that were answered and captured; ids with a reason that failed or were skipped."""

    answered: set[str] = field(default_factory=set)
    captured: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """One line of counts, and the first reasons below it."""
        counts = f"{len(self.answered)} answered, {len(self.captured)} captured, "
        counts += f"{len(self.skipped)} skipped, {len(self.failed)} failed"
        named = [*self.failed.items(), *self.skipped.items()]
        more = [f"  and {len(named) - 5} more"] if len(named) > 5 else []
        return "\n".join([counts, *(f"  {sample_id}: {reason}" for sample_id, reason in named[:5]), *more])


def record(folder: str | Path, events: Events) -> None:
    """Add to the record of a run. Many workers write at once: each call makes a file of its own, named by content."""
    values = asdict(events) | {"answered": sorted(events.answered), "captured": sorted(events.captured)}
    if not any(values.values()):
        return
    for sample_id, reason in events.failed.items():
        log.warning("row %s failed: %s", sample_id, reason)
    text = json.dumps(values, sort_keys=True)
    write_atomically(Path(folder) / f"{digest([text])}.json", text.encode())


def read_events(folder: str | Path) -> Events:
    """The whole record. A row that was captured in the end did not fail, whatever happened on the way."""
    total = Events()
    for path in sorted(Path(folder).glob("*.json")):
        values = read_object(path)
        check_events(values, path)
        total.answered.update(values["answered"])
        total.captured.update(values["captured"])
        total.failed.update(values["failed"])
        total.skipped.update(values["skipped"])
    for sample_id in total.captured:
        total.failed.pop(sample_id, None)
        total.skipped.pop(sample_id, None)
    return total


def check_events(values: dict[str, Any], path: Path) -> None:
    """ValueError for a file that `record` did not write."""
    lists, reasons = ("answered", "captured"), ("failed", "skipped")
    texts: list[Any] = [*(values.get(key) for key in lists), *(values.get(key) for key in reasons)]
    right = all(isinstance(each, list) for each in texts[:2]) and all(isinstance(each, dict) for each in texts[2:])
    if not right or not all(isinstance(text, str) for each in texts for text in each):
        raise ValueError(
            f"{path} is damaged: expected lists {', '.join(lists)} and objects {', '.join(reasons)} of ids"
        )


def read_ledger(path: str | Path | None) -> frozenset[str]:
    """Sample ids to leave out, from a JSON list; none if there is no file yet. ValueError if it holds anything else."""
    if path is None or not Path(path).exists():
        return frozenset()
    return _ledger(str(path), Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _ledger(path: str, _written: int) -> frozenset[str]:
    """Every chunk asks, and a ledger can name a million rows: read once per process and version of the file."""
    ids = read_json(Path(path))
    if not isinstance(ids, list):
        raise ValueError(f"{path} is no ledger: expected a JSON list of sample ids, found {type(ids).__name__}")
    return frozenset(str(sample_id) for sample_id in ids)


def write_ledger(path: str | Path, sample_ids: Iterable[str]) -> None:
    """A ledger for `read_ledger`."""
    write_atomically(Path(path), json.dumps(sorted(sample_ids)).encode())


def check_cache(folder: str | Path, meta: FeatureMeta) -> None:
    """ValueError if `folder` holds features of another target, tokenizer or other layers. An empty one is fine."""
    if not (Path(folder) / MANIFEST).exists():
        if any(Path(folder).glob("*.parquet")):
            raise ValueError(
                f"{folder} holds Parquet files without {MANIFEST}; give a folder of its own to the features"
            )
        return
    found = read_manifest(folder)
    problems = fit_problems(found, _Reader(meta.layer_ids, meta.hidden_size), meta.target_hash)
    if found.tokenizer_hash != meta.tokenizer_hash:
        problems.append("another tokenizer or chat template made its tokens")
    if found.dtype != meta.dtype:
        problems.append(f"they are {found.dtype}, not {meta.dtype}")
    if problems:
        raise ValueError(
            f"{folder} holds other features: {'; '.join(problems)}. Give another folder, or remove this one."
        )


@dataclass(frozen=True)
class _Reader:
    """`fit_problems` asks what a drafter reads; here it is what we are about to write."""

    target_layer_ids: tuple[int, ...]
    hidden_size: int


def write_manifest(folder: str | Path, meta: FeatureMeta) -> None:
    """State what the folder holds, before its first row."""
    write_atomically(Path(folder) / MANIFEST, json.dumps(meta.to_dict(), indent=1).encode())


def read_manifest(folder: str | Path) -> FeatureMeta:
    """ValueError if the folder has no manifest: then nobody wrote features there."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} has no {MANIFEST}: write features there first (`python -m jobs.features`)")
    values = read_json(path)
    try:  # it does not say where it was read
        return FeatureMeta.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_table(folder: str | Path, table: pa.Table) -> Path:
    """One file of feature rows. Rows are row groups, so that a reader in shuffled order reads no more than it needs.

    Not compressed: the bits of hidden states do not shrink.
    """
    path = Path(folder) / f"{digest(table['sample_id'].to_pylist())}.parquet"
    with whole(path) as made:
        pq.write_table(table, made, row_group_size=1, compression="none", use_dictionary=False, write_statistics=False)
    return path


def cached_rows(folder: str | Path) -> dict[str, tuple[Path, int]]:
    """Where each sample id of the cache is: file and row group. Of rows written twice, in other company, one counts."""
    found: dict[str, tuple[Path, int]] = {}
    for path in sorted(Path(folder).glob("*.parquet")):
        with refusing_damage(path):
            ids = open_parquet(path).read(columns=["sample_id"])["sample_id"].to_pylist()
        for group, sample_id in enumerate(ids):
            found.setdefault(sample_id, (path, group))
    return found


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
