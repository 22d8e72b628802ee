"""Feature rows to batches: from the stream (a collate for Ray) and from the Parquet cache, in a fixed order.

Letters: T tokens of all rows, end to end · S tokens of a row · C feature width · L tapped layers.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from domino_core import features
from pipelines.feature_store import cached_rows, read_manifest
from pipelines.parquet_files import open_parquet

if TYPE_CHECKING:
    from ray.data.collate_fn import ArrowBatchCollateFn


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows laid end to end, without padding."""

    sample_ids: list[str]
    lengths: list[int]  # tokens of each row
    input_ids_T: Tensor  # int64
    loss_mask_T: Tensor  # bool
    features_TC: Tensor  # as stored: bfloat16 (or the dtype that was asked for), or float8_e4m3fn with scales
    scales_TL: Tensor | None = None  # float32, of float8 features
    likely_TJ: Tensor | None = None  # as in domino_core.blocks.PackedRows, where they are known
    shares_TJ: Tensor | None = None

    def features_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """States [T, C] in the type of the arithmetic: over the bus as stored, widened on the device."""
        features_TC = self.features_TC.to(device, non_blocking=True)
        if self.scales_TL is None:
            return features_TC.to(dtype)
        return features.dequantize(features_TC, self.scales_TL.to(device, non_blocking=True), dtype)


def join_rows(
    table: pa.Table,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_length: int | None = None,
    pin_memory: bool = False,
) -> Batch:
    """Feature rows to a Batch; rows longer than `max_length` are cut (tokens, mask and features alike).

    pin_memory: the features lie where a GPU fetches them by itself.
    """
    assert len(table), "an empty table is no batch"
    full_lengths = table["num_tokens"].to_numpy()
    lengths = full_lengths if max_length is None else np.minimum(full_lengths, max_length)
    features_TC, scales_TL = _join_features(table, full_lengths, lengths, dtype, pin_memory)
    return Batch(
        sample_ids=table["sample_id"].to_pylist(),
        lengths=lengths.tolist(),
        input_ids_T=torch.from_numpy(_ragged(table["input_ids"], full_lengths, lengths).astype(np.int64)),
        loss_mask_T=torch.from_numpy(_ragged(table["loss_mask"], full_lengths, lengths) != 0),
        features_TC=features_TC,
        scales_TL=scales_TL,
    )


def _join_features(
    table: pa.Table, full_lengths: np.ndarray, lengths: np.ndarray, dtype: torch.dtype, pin_memory: bool
) -> tuple[Tensor, Tensor | None]:
    """(features [T, C], scales [T, L] of float8 features, which stay what they are whatever `dtype`)."""
    scaled = "scales" in table.column_names
    kind = features.FP8 if scaled else "bfloat16"
    rows = [
        features.stored_bytes(value, full, dtype=kind)[:length]
        for value, full, length in zip(
            features.row_bytes(table["features"]), full_lengths.tolist(), lengths.tolist(), strict=True
        )
    ]
    # Gigabytes a second come through here: one copy, of bytes.
    bits_TX = torch.empty(int(lengths.sum()), rows[0].shape[1], dtype=torch.uint8, pin_memory=pin_memory)
    np.concatenate(rows, out=bits_TX.numpy())
    features_TC = bits_TX.view(getattr(torch, kind))
    if not scaled:
        return features_TC.to(dtype), None
    scales = [
        features.stored_scales(value.values.to_numpy(), full)[:length]
        for value, full, length in zip(table["scales"], full_lengths.tolist(), lengths.tolist(), strict=True)
    ]
    return features_TC, torch.cat(scales)


def _ragged(column: pa.ChunkedArray, full_lengths: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The values of a list column one after the other, each row cut to its length."""
    values = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    assert len(values) == full_lengths.sum(), "num_tokens does not count the tokens"
    if (full_lengths == lengths).all():
        return values
    position = np.arange(len(values)) - np.repeat(np.cumsum(full_lengths) - full_lengths, full_lengths)
    return values[position < np.repeat(lengths, full_lengths)]


def stream_collate(
    *, dtype: torch.dtype = torch.bfloat16, max_length: int | None = None, pin_memory: bool = False
) -> ArrowBatchCollateFn:
    """`collate_fn` for `iter_torch_batches`: Arrow blocks become Batches, on the CPU."""
    from ray.data.collate_fn import ArrowBatchCollateFn

    class JoinFeatureRows(ArrowBatchCollateFn):
        def __call__(self, batch: pa.Table) -> Batch:
            return join_rows(batch, dtype=dtype, max_length=max_length, pin_memory=pin_memory)

    return JoinFeatureRows()


class CachedFeatures:
    """This rank's batches of one epoch from a Parquet cache, the same in every run.

    The order is a shuffle of the sorted ids by (seed, epoch); rank r of W takes every W-th id from r on. Every id that
    is not in `skip` comes exactly once over all ranks, whatever W; ranks differ by at most one row.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        batch_size: int,
        seed: int,
        epoch: int,
        rank: int = 0,
        world_size: int = 1,
        skip: Collection[str] = (),
        pin_memory: bool = False,
    ) -> None:
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self.meta = read_manifest(folder)
        self.batch_size, self.pin_memory = batch_size, pin_memory
        self.rows = _index(Path(folder).resolve(), Path(folder).stat().st_mtime_ns)
        if not self.rows:
            raise ValueError(f"{folder} holds no feature rows: write them first (`python -m jobs.features`)")
        order = sorted(self.rows)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        left_out = frozenset(skip)
        self.sample_ids = [sample_id for sample_id in order if sample_id not in left_out][rank::world_size]

    def __len__(self) -> int:
        """Batches of this rank; the last one may be smaller."""
        return -(-len(self.sample_ids) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.sample_ids), self.batch_size):
            ids = self.sample_ids[start : start + self.batch_size]
            tables = [_open(path).read_row_group(group) for path, group in (self.rows[sample_id] for sample_id in ids)]
            batch = join_rows(pa.concat_tables(tables), pin_memory=self.pin_memory)
            assert batch.sample_ids == ids, "the cache changed under its reader"
            yield batch


@lru_cache(maxsize=1)
def _index(folder: Path, _written: int) -> dict[str, tuple[Path, int]]:
    """One look serves all epochs of a process, unless files came since."""
    return cached_rows(folder)


@lru_cache(maxsize=64)
def _open(path: Path) -> pq.ParquetFile:
    """A shuffled order returns to the same files: keep their footers."""
    return open_parquet(path, memory_map=True)
