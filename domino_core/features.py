"""The feature row: what capture writes, what training reads, and the refusal of rows that do not fit.

A row is one conversation: its tokens, which of them are supervised, and the target's hidden states of the tapped layers
for every token. Writer and reader share this module; a Parquet file or an Arrow stream describes itself through its
schema metadata.

States are stored as bfloat16, or in half of that as float8_e4m3fn with one scale per token and tapped layer (a column
of its own). The two are format versions 1 and 2: bfloat16 features are written as they always were.

Letters: S tokens of the row · L tapped layers, in ascending depth · D hidden size · C = L * D ·
T tokens of several rows.
"""

# pyarrow ships no types: strict checking of this one module would be noise.
# pyright: basic

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Protocol, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from domino_core.json_files import is_kind

StoredDtype = Literal["bfloat16", "float8_e4m3fn"]
FP8: StoredDtype = "float8_e4m3fn"
FORMAT_VERSIONS: dict[str, int] = {"bfloat16": 1, FP8: 2}
LAYER_MEANING = "output of block i, residual stream, before any final norm"
_METADATA_KEY = b"domino_features"
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class DrafterShape(Protocol):
    """The part of a drafter's configuration that decides which features it can read."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def hidden_size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class FeatureMeta:
    """Where features come from. `layer_ids`: 0-based blocks of the target, ascending, as in a drafter's config."""

    target: str
    target_hash: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    tokenizer_hash: str
    layer_meaning: str = LAYER_MEANING
    dtype: StoredDtype = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        if not all(is_kind(int, layer) and layer >= 0 for layer in self.layer_ids):
            raise ValueError(f"layer_ids must be whole numbers from 0, got {list(self.layer_ids)!r:.80}")
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"layer_ids must be distinct and ascending, got {list(self.layer_ids)}")
        if not is_kind(int, self.hidden_size) or self.hidden_size < 1:
            raise ValueError(f"hidden_size must be a whole number above 0, got {self.hidden_size!r:.80}")
        for name in ("target", "target_hash", "tokenizer_hash", "layer_meaning", "dtype"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text, got {getattr(self, name)!r:.80}")
        if self.dtype not in FORMAT_VERSIONS:
            raise ValueError(f"features are stored as {' or '.join(get_args(StoredDtype))}, not {self.dtype!r}")

    @property
    def feature_width(self) -> int:
        """C: numbers per token."""
        return len(self.layer_ids) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the features of a token, scales included; tokens and mask add five more."""
        return bytes_per_token(len(self.layer_ids), self.hidden_size, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, with the format version."""
        return {"format_version": FORMAT_VERSIONS[self.dtype], **asdict(self), "layer_ids": list(self.layer_ids)}

    @classmethod
    def from_dict(cls, values: Any) -> FeatureMeta:
        """Read `to_dict`. ValueError for another format version, and for missing, unknown and impossible values."""
        if not isinstance(values, dict) or not isinstance(values.get("layer_ids", []), list):
            raise ValueError(f"feature metadata is no object with a list of layer_ids: {values!r:.80}")
        given: dict[str, Any] = dict(values)
        version, known_versions = given.pop("format_version", None), FORMAT_VERSIONS.values()
        if version not in known_versions:
            reads = " and ".join(map(str, known_versions))
            raise ValueError(f"feature format version {version}, this code reads {reads}: capture them again")
        known = {field.name for field in fields(cls)}
        if set(given) != known:
            raise ValueError(
                f"feature metadata: missing {sorted(known - set(given))}, unknown {sorted(set(given) - known)}"
            )
        meta = cls(**given)
        if version != FORMAT_VERSIONS[meta.dtype]:
            raise ValueError(f"feature metadata: format version {version} does not hold {meta.dtype} features")
        return meta


def bytes_per_token(num_layers: int, hidden_size: int, dtype: StoredDtype) -> int:
    """Bytes of the stored states of one token, with their scales."""
    return num_layers * (hidden_size + 4 if dtype == FP8 else 2 * hidden_size)


def schema(meta: FeatureMeta) -> pa.Schema:
    """Arrow schema of a feature row, carrying `meta` in its metadata."""
    columns = [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("features", pa.large_binary(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
    ]
    if meta.dtype == FP8:
        columns.append(pa.field("scales", pa.list_(pa.float32()), nullable=False))
    return pa.schema(columns, metadata={_METADATA_KEY: json.dumps(meta.to_dict(), sort_keys=True).encode()})


def read_meta(found: pa.Schema, where: str = "features") -> FeatureMeta:
    """The FeatureMeta inside an Arrow schema. ValueError if `found` was not written by this module."""
    metadata = found.metadata or {}
    if _METADATA_KEY not in metadata:
        raise ValueError(f"{where} carries no feature metadata: it was not written by `python -m jobs.features`")
    try:  # the library's messages, and ours, do not say where it was read
        return FeatureMeta.from_dict(json.loads(metadata[_METADATA_KEY]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error


def pack(features_SLD: Tensor, dtype: StoredDtype) -> tuple[Tensor, Tensor | None]:
    """(states [S, L, D] as they are stored, their float8 scales [S, L] if any), computed on the states' own device."""
    if dtype == FP8:
        return quantize(features_SLD)
    return features_SLD.detach().to(torch.bfloat16), None


def stored(value: pa.Scalar | bytes, num_tokens: int, *, dtype: StoredDtype = "bfloat16") -> Tensor:
    """The bits of a row as they were stored, [num_tokens, C]. ValueError for a damaged row."""
    kind: torch.dtype = getattr(torch, dtype)
    # The copy makes the memory writable and ours: Arrow's buffer belongs to a block that may go away.
    return torch.from_numpy(stored_bytes(value, num_tokens, dtype=dtype).copy()).view(kind)


def row_bytes(column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    """The bytes of each row's features, where Arrow has them: to iterate over the column itself copies each value."""
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        width = np.int64 if pa.types.is_large_binary(chunk.type) else np.int32
        ends = np.frombuffer(offsets, width, len(chunk) + 1, chunk.offset * np.dtype(width).itemsize).tolist()
        bits = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
        yield from (bits[start:end] for start, end in itertools.pairwise(ends))


def stored_bytes(value: pa.Scalar | bytes | np.ndarray, num_tokens: int, *, dtype: StoredDtype) -> np.ndarray:
    """The bytes of a row, [num_tokens, bytes of a token], without a copy of them. ValueError for a damaged row."""
    bits = np.frombuffer(value if isinstance(value, bytes | np.ndarray) else value.as_buffer(), np.uint8)
    if num_tokens < 1 or not bits.size or bits.size % (num_tokens * getattr(torch, dtype).itemsize):
        raise ValueError(
            f"{bits.size} bytes of features are no whole number of values for {num_tokens} tokens: damaged row"
        )
    return bits.reshape(num_tokens, -1)


def decode(
    value: pa.Scalar | bytes,
    num_tokens: int,
    *,
    scales: Sequence[float] | np.ndarray | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The inverse of `pack`: features_SC [num_tokens, C] in `dtype`. ValueError for a damaged row.

    scales: those of a float8 row, S * L numbers; None for bfloat16.
    """
    if scales is None:
        return stored(value, num_tokens).to(dtype)
    scales_SL = stored_scales(scales, num_tokens)
    return dequantize(stored(value, num_tokens, dtype=FP8)[None], scales_SL[None], dtype)[0]


def stored_scales(scales: Sequence[float] | np.ndarray, num_tokens: int) -> Tensor:
    """The scales of a float8 row, [num_tokens, L] float32. ValueError for a damaged row."""
    values = np.array(scales, np.float32)
    if num_tokens < 1 or not values.size or values.size % num_tokens or not np.isfinite(values).all():
        raise ValueError(f"{values.size} scales for {num_tokens} tokens, or one that is not finite: damaged row")
    return torch.from_numpy(values.reshape(num_tokens, -1))


def quantize(features_SLD: Tensor) -> tuple[Tensor, Tensor]:
    """States as (float8_e4m3fn values [S, L, D], float32 scales [S, L]), values * scale being the states.

    A scale per token, because the norms of tokens differ by orders of magnitude, and per layer, because those of layers
    do. Scales are powers of two: they then lose nothing in bfloat16 either, and rounding happens once, to 4 bits.
    """
    states_SLD = features_SLD.detach().float()
    mantissa_SL, exponent_SL = torch.frexp(states_SLD.abs().amax(-1) / _FP8_MAX)
    # The least power of two that brings the largest value into range: e4m3 has no infinity, what overflows is NaN.
    exponent_SL = torch.where(mantissa_SL == 0.5, exponent_SL - 1, exponent_SL).clamp(-126, 127)
    scales_SL = ((exponent_SL.int() + 127) << 23).view(torch.float32)  # 2 ** exponent, to the bit on every device
    return (states_SLD / scales_SL[..., None]).to(torch.float8_e4m3fn), scales_SL


def dequantize(values_TC: Tensor, scales_TL: Tensor, dtype: torch.dtype) -> Tensor:
    """float8 values and their scales to states [..., T, C] in `dtype`, on the device where both are."""
    # float8 fits into every wider type; a product with a power of two is exact.
    states_TLD = values_TC.to(dtype).unflatten(-1, (scales_TL.shape[-1], -1)) * scales_TL.to(dtype)[..., None]
    return states_TLD.flatten(-2)


def table(meta: FeatureMeta, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows {sample_id, input_ids, loss_mask, features: Tensor [S, L, D]} as a checked Arrow table."""
    for row in rows:
        check_row(meta, row)
    if not rows:
        return schema(meta).empty_table()
    packed = [pack(row["features"], meta.dtype) for row in rows]
    scales = [scales_SL for _, scales_SL in packed if scales_SL is not None]
    # torch cannot join float8, but it can join bytes.
    values_TC = torch.cat([values_SLD.cpu().view(torch.uint8).flatten(1) for values_SLD, _ in packed])
    return packed_table(meta, rows, values_TC, torch.cat(scales) if scales else None)


def packed_table(
    meta: FeatureMeta, rows: Sequence[Mapping[str, Any]], values_TX: Tensor, scales_TL: Tensor | None = None
) -> pa.Table:
    """Rows {sample_id, input_ids, loss_mask} whose packed states lie one after the other in one piece of memory.

    values_TX: on the CPU, T tokens of all rows, whatever the shape of a token. Arrow gets this memory, not a copy.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    token_bytes = meta.feature_width * getattr(torch, meta.dtype).itemsize
    assert values_TX.is_contiguous()
    assert values_TX.nbytes == sum(lengths) * token_bytes, values_TX.shape
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    bits = pa.py_buffer(values_TX.view(torch.uint8).flatten().numpy())
    states = pa.Array.from_buffers(pa.large_binary(), len(rows), [None, pa.py_buffer(ends * token_bytes), bits])
    columns: dict[str, Any] = {
        "sample_id": [row["sample_id"] for row in rows],
        "input_ids": [row["input_ids"] for row in rows],
        "loss_mask": [row["loss_mask"] for row in rows],
        "features": states,
        "num_tokens": lengths,
        "dtype": [meta.dtype] * len(rows),
    }
    if meta.dtype == FP8:
        assert scales_TL is not None
        columns["scales"] = [scales_SL.flatten().numpy() for scales_SL in scales_TL.split(lengths)]
    return pa.table(columns, schema=schema(meta))


def check_row(meta: FeatureMeta, row: Mapping[str, Any]) -> None:
    """Our own invariants on a row about to be written: one mask value and one finite feature vector per token."""
    features_SLD = row["features"]
    assert isinstance(features_SLD, Tensor)
    num_tokens = len(row["input_ids"])
    expected = (num_tokens, len(meta.layer_ids), meta.hidden_size)
    assert tuple(features_SLD.shape) == expected, (
        f"{row['sample_id']}: features {tuple(features_SLD.shape)}, not {expected}"
    )
    assert len(row["loss_mask"]) == num_tokens, f"{row['sample_id']}: mask and tokens differ in length"
    assert bool(torch.isfinite(features_SLD).all()), f"{row['sample_id']}: features are not finite"


def fit_problems(meta: FeatureMeta, drafter: DrafterShape, target_hash: str) -> list[str]:
    """Why features with this metadata cannot train this drafter; empty if they can."""
    problems: list[str] = []
    if meta.target_hash != target_hash:
        problems.append(
            f"captured from another target: {meta.target} has hash {meta.target_hash[:12]}, expected {target_hash[:12]}"
        )
    if tuple(meta.layer_ids) != tuple(drafter.target_layer_ids):
        problems.append(
            f"layers {list(meta.layer_ids)} were captured, the drafter reads {list(drafter.target_layer_ids)}"
        )
    if meta.hidden_size != drafter.hidden_size:
        problems.append(f"hidden size {meta.hidden_size}, the drafter has {drafter.hidden_size}")
    if meta.layer_meaning != LAYER_MEANING:
        problems.append(f"layers mean {meta.layer_meaning!r}, the drafter reads {LAYER_MEANING!r}")
    return problems


def check_fits(meta: FeatureMeta, drafter: DrafterShape, target_hash: str) -> None:
    """ValueError naming every reason why these features do not belong to this drafter and target."""
    problems = fit_problems(meta, drafter, target_hash)
    if problems:
        raise ValueError(
            "features do not fit: " + "; ".join(problems) + ". Capture them again for this target and drafter."
        )
