"""A prompt file becomes a stream of feature rows: read, answer, capture, and write through to a cache if asked.

The stream is Ray Data: chunks of the file → rows of tokens (tasks) → features (a pool of actors with one engine each).
Nothing is computed before somebody iterates. Rows that are not wanted again (the ledger) are left out before they cost
anything, and a row that cannot be used is counted with its reason, never dropped in silence.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from domino_core import features
from domino_core.features import FeatureMeta
from pipelines.capture import CaptureConfig, TargetActor, chunk_dataset, on_engines
from pipelines.feature_store import (
    Events,
    cached_rows,
    check_cache,
    read_ledger,
    record,
    write_ledger,
    write_manifest,
    write_table,
)
from pipelines.prompt_files import Chunk, prompt_chunks, read_chunk
from pipelines.prompts import TokenRow, has_anchor, prepare_row
from pipelines.regenerate import AnswerConfig
from pipelines.supply import SupplyFile

if TYPE_CHECKING:
    from ray.data import Dataset

ROWS_TRIED_FIRST = 16
_PREPARED = pa.schema(
    [
        ("sample_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("needs_answer", pa.bool_()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class FeatureSource:
    """Where features come from and go to; what every worker of the stream is told. Built by `feature_source`."""

    data: str
    num_rows: int | None = None  # the first rows of data; None: all
    meta: FeatureMeta
    answer: AnswerConfig
    capture: CaptureConfig
    events: str  # folder: what became of every row (`read_events`)
    cache: str | None = None  # folder: every row is also written here
    ledger: str | None = None  # JSON list of sample ids to leave out; read when a chunk is, absent means none


def feature_source(  # noqa: PLR0913 (all of it is what a stream is)
    *,
    data: str,
    target: str,
    layer_ids: tuple[int, ...],
    answer: AnswerConfig,
    capture: CaptureConfig,
    events: str | Path,
    cache: str | Path | None = None,
    ledger: str | Path | None = None,
    num_rows: int | None = None,
) -> FeatureSource:
    """Check everything that can be checked before work starts, and describe the stream.

    ValueError: the file or its first rows cannot be used, lengths exceed the target's, or `cache` holds other features.
    """
    from domino_core.target import load_tokenizer, read_target_config, target_hash, tokenizer_hash

    config = read_target_config(target)
    if layer_ids and max(layer_ids) >= config.num_hidden_layers:
        raise ValueError(f"layer {max(layer_ids)} cannot be tapped: {target} has {config.num_hidden_layers} layers")
    if capture.max_length >= config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(f"capture.max_length={capture.max_length}: {target} takes {limit} positions; one stays free")
    tokenizer = load_tokenizer(target)
    meta = FeatureMeta(
        target=str(target),
        target_hash=target_hash(target),
        layer_ids=layer_ids,
        hidden_size=config.hidden_size,
        tokenizer_hash=tokenizer_hash(tokenizer),
        dtype=capture.features_dtype,
    )
    source = FeatureSource(
        data=str(data),
        num_rows=num_rows,
        meta=meta,
        answer=answer,
        capture=capture,
        events=str(events),
        cache=str(cache) if cache else None,
        ledger=str(ledger) if ledger else None,
    )
    first = prompt_chunks(data, ROWS_TRIED_FIRST)[0]
    prepare_rows(read_chunk(first), source, tokenizer, trial=True)
    if cache:
        check_cache(cache, meta)
    return source


def feature_dataset(source: FeatureSource, *, seed: int | None = None, preserve_order: bool = False) -> Dataset:
    """The stream of feature rows (`features.schema`) of one epoch, lazily.

    seed: shuffle the chunks and the rows inside them; None keeps the file's order. Ray delivers blocks as they are
    ready unless `preserve_order`, which waits for stragglers.
    """
    if source.cache:
        write_manifest(source.cache, source.meta)
    chunks = prompt_chunks(source.data, source.capture.batch_size, source.num_rows)
    if seed is not None:
        random.Random(seed).shuffle(chunks)
    dataset = chunk_dataset(chunks, preserve_order=preserve_order)
    if source.capture.gpus_per_actor:
        # Tokenising beside the engine keeps a GPU busy; on the CPU it would only be one more process on the same cores.
        prepare = partial(prepare_chunk, source=source, seed=seed)
        dataset = dataset.map_batches(prepare, batch_size=None, batch_format="pyarrow")
    # From here on they are rows of tokens, or chunks still.
    size = source.capture.batch_size if source.capture.gpus_per_actor else 1
    return captured(dataset, FeatureActor, source, preserve_order=preserve_order, rows_per_call=size, seed=seed)


def captured(
    dataset: Dataset,
    actor: type,
    source: FeatureSource,
    *,
    preserve_order: bool,
    rows_per_call: int,
    **settings: Any,
) -> Dataset:
    """Send rows of tokens (or chunks) through a pool of `actor(source, **settings)`: a FeatureActor."""
    # Slices leave as they are: Ray would cut larger blocks, and join smaller ones, with one copy more.
    dataset.context.target_max_block_size = int(0.7 * source.capture.slice_bytes)
    # In order, a call could hold the engine while everybody waits for the call before it.
    calls = 1 if preserve_order else 2
    return on_engines(
        dataset, actor, source.capture, rows_per_call=rows_per_call, calls=calls, source=source, **settings
    )


def cache_features(source: FeatureSource) -> Iterator[int]:
    """Capture what the cache lacks; yields counts of rows, those of earlier runs first."""
    assert source.cache is not None, "there must be a cache to fill"
    assert source.ledger is not None, "a ledger says what it has"
    have = cached_rows(source.cache)
    write_ledger(source.ledger, have)
    yield len(have)
    # The features are on disk: only their ids need come here.
    written = feature_dataset(source).select_columns(["sample_id"])
    for batch in written.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield len(batch["sample_id"])


def prepare_chunk(batch: pa.Table, source: FeatureSource, seed: int | None = None) -> pa.Table:
    """Rows of tokens of a chunk, without those in the ledger."""
    prepared: list[dict[str, Any]] = []
    for item in batch.to_pylist():
        rows = list(read_chunk(Chunk(**item)))
        if seed is not None:
            random.Random(f"{seed}:{item['first_line']}").shuffle(rows)
        done = read_ledger(source.ledger)
        rows = [row for row in rows if row["sample_id"] not in done]
        prepared += prepare_rows(rows, source, _tokenizer(source.meta.target))
    return pa.Table.from_pylist(prepared, schema=_PREPARED)


def prepare_rows(
    rows: Iterable[dict[str, Any]], source: FeatureSource, tokenizer: Any, *, trial: bool = False
) -> list[dict[str, Any]]:
    """{sample_id, input_ids, loss_mask, needs_answer}; prompts that need an answer have an empty mask.

    A row that cannot be used is recorded as failed or skipped. In a trial nothing is recorded: failing is a ValueError.
    """
    prepared: list[dict[str, Any]] = []
    events = Events()
    for row in rows:
        found = prepare_row(row, tokenizer, source.answer, source.capture)
        if isinstance(found, TokenRow):
            prepared.append({name: getattr(found, name) for name in _PREPARED.names})
        elif trial and found.failed:
            raise ValueError(found.reason)
        else:
            (events.failed if found.failed else events.skipped)[found.sample_id] = found.reason
    if not trial:
        record(source.events, events)
    return prepared


class FeatureActor:
    """One engine of the pool: rows of tokens in, feature rows out, a few at a time so that big ones leave early.

    While a table is on its way, the engine goes on with the rows behind it.
    """

    def __init__(self, source: FeatureSource, seed: int | None) -> None:
        self.source, self.seed = source, seed
        self.target = TargetActor(source.meta.target, source.meta.layer_ids, source.capture)
        self.supply = SupplyFile(source.events)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        prepared = batch if "input_ids" in batch.column_names else prepare_chunk(batch, self.source, self.seed)
        rows = prepared.to_pylist()
        events = Events()
        self.answer([row for row in rows if row["needs_answer"]], events)
        usable = [row for row in rows if has_anchor(row["loss_mask"])]
        short = [row["sample_id"] for row in rows if not has_anchor(row["loss_mask"])]
        events.skipped.update(dict.fromkeys(short, "answer of fewer than two tokens"))
        if not usable:
            yield features.schema(self.source.meta).empty_table()
        for table in self.capture(usable, events):
            if self.source.cache and table.num_rows:
                write_table(self.source.cache, table)
            yield table
            del table  # its memory goes back to the engine
            self.supply.write(self.target.clock)
        self.supply.write(self.target.clock, at_once=True)
        record(self.source.events, events)

    def answer(self, rows: list[dict[str, Any]], events: Events) -> None:
        """Let the target answer, in place: the answer's tokens are supervised, the prompt's are not."""
        prompts = [row["input_ids"] for row in rows]
        answers = self.target.answer(prompts, [row["sample_id"] for row in rows], self.source.answer)
        for row, prompt, answer in zip(rows, prompts, answers, strict=True):
            row["input_ids"] = prompt + answer.token_ids
            row["loss_mask"] = [0] * len(prompt) + [1] * len(answer.token_ids)
        events.answered.update(row["sample_id"] for row in rows)

    def capture(self, rows: list[dict[str, Any]], events: Events) -> Iterator[pa.Table]:
        """The feature tables of some rows. Rows with states that are not finite fail by name."""
        meta = self.source.meta
        parts = list(slices(rows, self.source.capture.slice_bytes // meta.bytes_per_token))
        sequences = [[row["input_ids"] for row in part] for part in parts]
        with contextlib.closing(self.target.stream(sequences, getattr(torch, meta.dtype))) as stream:
            for part in parts:
                captured = next(stream)
                finite = captured.wait()
                table = features.packed_table(meta, part, captured.values_TLD, captured.scales_TL)
                del captured
                for row, good in zip(part, finite, strict=True):
                    if good:
                        events.captured.add(row["sample_id"])
                    else:
                        events.failed[row["sample_id"]] = f"hidden states are not finite in {self.target.dtype}"
                yield table if all(finite) else table.filter(pa.array(finite))
                del table


def slices(rows: Iterable[dict[str, Any]], max_tokens: int) -> Iterator[list[dict[str, Any]]]:
    """Consecutive rows of at most `max_tokens` tokens in all, at least one row each."""
    part: list[dict[str, Any]] = []
    tokens = 0
    for row in rows:
        if part and tokens + len(row["input_ids"]) > max_tokens:
            yield part
            part, tokens = [], 0
        part.append(row)
        tokens += len(row["input_ids"])
    if part:
        yield part


@lru_cache(maxsize=1)
def _tokenizer(target: str) -> Any:
    """One load for all chunks that a worker process prepares."""
    from domino_core.target import load_tokenizer

    return load_tokenizer(target)
