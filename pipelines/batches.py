"""Feature rows to padded batches: from the stream (a collate for Ray) and from the Parquet cache, in a fixed order.

Letters: B rows · S tokens of the longest row · C feature width · L tapped layers.
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

if TYPE_CHECKING:
    from ray.data.collate_fn import ArrowBatchCollateFn


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows padded at the end with token 0, mask False and features 0."""

    sample_ids: list[str]
    input_ids_BS: Tensor  # int64
    loss_mask_BS: Tensor  # bool
    features_BSC: Tensor  # as stored: bfloat16 (or the dtype that was asked for), or float8_e4m3fn with scales
    scales_BSL: Tensor | None = None  # float32, of float8 features

    def features_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """States [B, S, C] in the type of the arithmetic: over the bus as stored, widened on the device."""
        features_BSC = self.features_BSC.to(device, non_blocking=True)
        if self.scales_BSL is None:
            return features_BSC.to(dtype)
        return features.dequantize(features_BSC, self.scales_BSL.to(device, non_blocking=True), dtype)


def pad_batch(
    table: pa.Table,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_length: int | None = None,
    pin_memory: bool = False,
) -> Batch:
    """Feature rows to a Batch; rows longer than `max_length` are cut (tokens, mask and features alike).

    The padded length is that of the longest row: blocks are drawn from the mask, so it changes no result.
    pin_memory: the features lie where a GPU fetches them by itself.
    """
    full_lengths = table["num_tokens"].to_numpy()
    lengths = full_lengths if max_length is None else np.minimum(full_lengths, max_length)
    rows, width = len(lengths), int(lengths.max(initial=1))
    inside_BS = np.arange(width) < lengths[:, None]
    input_ids_BS = np.zeros((rows, width), np.int64)
    input_ids_BS[inside_BS] = _ragged(table["input_ids"], full_lengths, lengths)
    loss_mask_BS = np.zeros((rows, width), bool)
    loss_mask_BS[inside_BS] = _ragged(table["loss_mask"], full_lengths, lengths) != 0
    features_BSC, scales_BSL = _pad_features(table, full_lengths, lengths, dtype, pin_memory)
    return Batch(
        sample_ids=table["sample_id"].to_pylist(),
        input_ids_BS=torch.from_numpy(input_ids_BS),
        loss_mask_BS=torch.from_numpy(loss_mask_BS),
        features_BSC=features_BSC,
        scales_BSL=scales_BSL,
    )


def _pad_features(
    table: pa.Table, full_lengths: np.ndarray, lengths: np.ndarray, dtype: torch.dtype, pin_memory: bool
) -> tuple[Tensor, Tensor | None]:
    """(features [B, S, C], scales [B, S, L] of float8 features, which stay what they are whatever `dtype`)."""
    assert len(lengths), "an empty table is no batch"
    rows, width = len(lengths), int(lengths.max())
    scaled = "scales" in table.column_names
    kind = features.FP8 if scaled else "bfloat16"
    values = [
        features.stored_bytes(v, int(n), dtype=kind) for v, n in zip(table["features"], full_lengths, strict=True)
    ]
    # Gigabytes a second come through here: one copy, of bytes, and zeros only where there is padding.
    bits_BSX = torch.empty(rows, width, values[0].shape[1], dtype=torch.uint8, pin_memory=pin_memory)
    padded_BSX = bits_BSX.numpy()
    for row, (length, bits_SX) in enumerate(zip(lengths, values, strict=True)):
        padded_BSX[row, :length] = bits_SX[:length]
        padded_BSX[row, length:] = 0
    features_BSC = bits_BSX.view(getattr(torch, kind))
    if not scaled:
        return features_BSC.to(dtype), None
    scales = [
        features.stored_scales(value.values.to_numpy(), int(full_lengths[row]))
        for row, value in enumerate(table["scales"])
    ]
    scales_BSL = torch.zeros(rows, width, scales[0].shape[1])
    for row, scales_SL in enumerate(scales):
        scales_BSL[row, : lengths[row]] = scales_SL[: lengths[row]]
    return features_BSC, scales_BSL


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

    class PadFeatureRows(ArrowBatchCollateFn):
        def __call__(self, batch: pa.Table) -> Batch:
            return pad_batch(batch, dtype=dtype, max_length=max_length, pin_memory=pin_memory)

    return PadFeatureRows()


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
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self.meta = read_manifest(folder)
        self.batch_size, self.dtype = batch_size, dtype
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
            batch = pad_batch(pa.concat_tables(tables), dtype=self.dtype)
            assert batch.sample_ids == ids, "the cache changed under its reader"
            yield batch


@lru_cache(maxsize=1)
def _index(folder: Path, _written: int) -> dict[str, tuple[Path, int]]:
    """One look serves all epochs of a process, unless files came since."""
    return cached_rows(folder)


@lru_cache(maxsize=64)
def _open(path: Path) -> pq.ParquetFile:
    """A shuffled order returns to the same files: keep their footers."""
    return pq.ParquetFile(path, memory_map=True)
