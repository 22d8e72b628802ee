"""Feature folders of other trainers, read into ours and written from ours, one row in memory at a time.

speculators: a prompt dataset (`datasets` on disk: input_ids, loss_mask, seq_len) and `hidden_states/hs_{i}.safetensors`
for its row i, with token_ids [S] and hidden_states [S, layers, D], in float8 also hidden_states_scales [S, 1, 1]. Its
layer ids are vLLM's: what enters a layer, so that id i is the output of block i - 1, and the number of layers is the
output of the last block before the final norm. That one is appended where the ids do not name it.

specforge: `rows_{a}-{b}/data_{i}.ckpt` (or .ckpt.gz), a pickled dict of input_ids [S], loss_mask [S] and hidden_states
[S, C] or [1, S, C] for DFlash and Domino; EAGLE-3's taps are in aux_hidden_state. Its layer ids are ours: id i is the
output of block i.

What does not fit is a ValueError that names file and key, and a folder is in its place only when it is complete.

Letters: S tokens of a row · L tapped layers, in ascending depth · D hidden size · C = L * D.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from domino_core import features
from domino_core.features import FeatureMeta
from pipelines.build_features import slices
from pipelines.feature_store import Events, cached_rows, write_manifest, write_table
from pipelines.parquet_files import check_unpickled, open_parquet, refusing_damage
from pipelines.prompts import has_anchor

Kind = Literal["domino", "speculators", "specforge"]
ID_OFFSET: dict[Kind, int] = {"domino": 0, "speculators": 1, "specforge": 0}  # of the id of a block's output
FILES_PER_FOLDER = 2000  # of specforge
SLICE_BYTES = 256 << 20  # of features in one of our files


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows of a folder in a fixed order: {sample_id, input_ids, loss_mask, features [S, L, D]}, read on demand."""

    count: int
    read: Callable[[int], dict[str, Any]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        seen: set[str] = set()
        for index in range(self.count):
            row = self.read(index)
            if row["sample_id"] in seen:
                raise ValueError(f"sample id {row['sample_id']} comes twice: give every row an id of its own")
            seen.add(row["sample_id"])
            yield row


def blocks_of(kind: Kind, ids: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """The blocks, 0-based and ascending, whose outputs the ids of a foreign folder name."""
    found = tuple(layer_id - ID_OFFSET[kind] for layer_id in ids)
    if not found or list(found) != sorted(set(found)):
        raise ValueError(f"layer ids {list(ids)} must be distinct and ascending: the files hold them by depth")
    if found[0] < 0:
        raise ValueError(f"layer id {ids[0]} of {kind} is the output of no block: no drafter reads embeddings")
    if found[-1] >= num_hidden_layers:
        raise ValueError(f"layer id {ids[-1]} of {kind}: the target has {num_hidden_layers} layers")
    return found


def open_source(
    kind: Kind, folder: str | Path, meta: FeatureMeta, vocab_size: int | None, prompts: str | Path | None = None
) -> Source:
    """The rows of `folder`, whose layers are those of `meta`. vocab_size: the target's; None, where none is at hand.

    prompts: speculators' prompt dataset, if it is elsewhere.

    ValueError, here or while reading, names what does not fit.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder of features")
    if kind == "speculators":
        return _speculators(Path(folder), meta, vocab_size, Path(prompts or folder))
    return (_specforge if kind == "specforge" else _domino)(Path(folder), meta, vocab_size)


def _speculators(folder: Path, meta: FeatureMeta, vocab_size: int | None, prompts: Path) -> Source:
    import datasets

    hidden = folder / "hidden_states" if (folder / "hidden_states").is_dir() else folder
    numbered = [(re.fullmatch(r"hs_(\d+)\.safetensors", path.name), path) for path in hidden.iterdir()]
    files = sorted((int(match[1]), path) for match, path in numbered if match)
    if not files:
        raise ValueError(f"{hidden} holds no hs_{{i}}.safetensors")
    if not (prompts / "state.json").is_file():
        raise ValueError(
            f"{prompts} is no prompt dataset, which has the loss masks of {hidden}: name it with --prompts"
        )
    dataset: Any = datasets.load_from_disk(str(prompts)).with_format(None)
    check_unpickled(dataset.data.schema, prompts)
    missing = {"input_ids", "loss_mask"} - set(dataset.column_names)
    if missing:
        raise ValueError(f"{prompts} has no column {sorted(missing)}, found {dataset.column_names}")
    if files[-1][0] >= len(dataset):
        raise ValueError(f"{files[-1][1]} has no prompt: {prompts} has {len(dataset)} rows")

    def read(index: int) -> dict[str, Any]:
        number, path = files[index]
        if path.with_name(path.name + ".lock").exists():
            raise ValueError(f"{path} is still being written (.lock): wait for its writer, or remove both")
        try:  # a foreign file
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        states_SLD = _tensor(path, tensors, "hidden_states")
        if states_SLD.dim() != 3:
            raise ValueError(f"{path}: hidden_states has shape {tuple(states_SLD.shape)}, expected [S, layers, D]")
        if states_SLD.dtype == torch.float8_e4m3fn:
            scales = _tensor(path, tensors, "hidden_states_scales")
            if scales.shape != (states_SLD.shape[0], 1, 1):
                raise ValueError(f"{path}: hidden_states_scales {tuple(scales.shape)}, expected one a token, [S, 1, 1]")
            states_SLD = states_SLD.float() * scales
        if states_SLD.shape[1] == len(meta.layer_ids) + 1:
            states_SLD = states_SLD[:, :-1]  # the final layer, which is there for the verifier's logits
        prompt: dict[str, Any] = dataset[number]
        if _tensor(path, tensors, "token_ids").tolist() != list(prompt["input_ids"]):
            raise ValueError(f"{path}: token_ids are not input_ids of row {number} of {prompts}: another dataset?")
        sample_id = prompt.get("sample_id") or f"hs_{number}"
        return _row(path, "hidden_states", sample_id, prompt, states_SLD, meta, vocab_size)

    return Source(count=len(files), read=read)


def _specforge(folder: Path, meta: FeatureMeta, vocab_size: int | None) -> Source:
    files = sorted([*folder.rglob("*.ckpt"), *folder.rglob("*.ckpt.gz")], key=_by_number)
    if not files:
        raise ValueError(f"{folder} holds no .ckpt or .ckpt.gz")

    def read(index: int) -> dict[str, Any]:
        path = files[index]
        values = _load_checkpoint(path)
        key = "hidden_states" if "hidden_states" in values else "aux_hidden_state"
        states = _tensor(path, values, key)
        states_SC = states[0] if states.dim() == 3 and states.shape[0] == 1 else states
        if states_SC.dim() != 2 or states_SC.shape[1] != meta.feature_width:
            expected = f"[S, {len(meta.layer_ids)} layers x {meta.hidden_size}]"
            raise ValueError(f"{path}: {key} has shape {tuple(states.shape)}, expected {expected}")
        columns = {name: _tensor(path, values, name).flatten().tolist() for name in ("input_ids", "loss_mask")}
        own = values.get("sample_id")
        sample_id = own if isinstance(own, str) else path.relative_to(folder).as_posix().split(".ckpt")[0]
        states_SLD = states_SC.unflatten(1, (len(meta.layer_ids), meta.hidden_size))
        return _row(path, key, sample_id, columns, states_SLD, meta, vocab_size)

    return Source(count=len(files), read=read)


def _by_number(path: Path) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"\d+", path.name)], str(path)


def _load_checkpoint(path: Path) -> dict[str, Any]:
    """A pickled dict of tensors. Nothing that a pickle could run is: torch refuses all but plain values and tensors."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        values = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged or made to harm, it can raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} is not read: it is damaged, or holds more than tensors and plain values ({reason})"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, expected a dict of tensors")
    return values


def _domino(folder: Path, meta: FeatureMeta, vocab_size: int | None) -> Source:
    where = list(cached_rows(folder).items())
    if not where:
        raise ValueError(f"{folder} holds no feature rows")
    opened = lru_cache(maxsize=4)(open_parquet)  # rows come file by file

    def read(index: int) -> dict[str, Any]:
        sample_id, (path, group) = where[index]
        with refusing_damage(path):
            (row,) = opened(path).read_row_group(group).to_pylist()
        if missing := {"input_ids", "loss_mask", "num_tokens", "features"} - {
            key for key in row if row[key] is not None
        }:
            raise ValueError(f"{path} lacks {', '.join(sorted(missing))} in row {group}: captured by another version?")
        try:  # it does not say which file it is
            states_SC = features.decode(row["features"], row["num_tokens"], scales=row.get("scales"))
        except ValueError as error:
            raise ValueError(f"{path}: row {group}: {error}") from error
        if states_SC.shape[1] != meta.feature_width:
            raise ValueError(f"{path}: row {group} has {states_SC.shape[1]} values a token, not {meta.feature_width}")
        states_SLD = states_SC.unflatten(1, (len(meta.layer_ids), meta.hidden_size))
        return _row(path, "features", sample_id, row, states_SLD, meta, vocab_size)

    return Source(count=len(where), read=read)


def _tensor(path: Path, values: dict[str, Any], key: str) -> Tensor:
    found = values.get(key)
    if not isinstance(found, Tensor):
        kind = "no" if found is None else f"{type(found).__name__}, not a tensor, as"
        raise ValueError(f"{path}: {kind} {key}, found {sorted(map(str, values))}")
    return found


def _row(
    path: Path,
    key: str,
    sample_id: str,
    columns: dict[str, Any],
    states_SLD: Tensor,
    meta: FeatureMeta,
    vocab: int | None,
) -> dict[str, Any]:
    """A row of ours, checked. `columns` has input_ids and loss_mask."""
    input_ids, loss_mask = list(columns["input_ids"]), list(columns["loss_mask"])
    expected = (len(input_ids), len(meta.layer_ids), meta.hidden_size)
    if not states_SLD.is_floating_point() or tuple(states_SLD.shape) != expected or not input_ids:
        found = f"{str(states_SLD.dtype).removeprefix('torch.')} {tuple(states_SLD.shape)}"
        raise ValueError(f"{path}: {key} is {found}, expected [tokens, layers, hidden size] = {expected}")
    if len(loss_mask) != len(input_ids) or not {0, 1}.issuperset(loss_mask):
        raise ValueError(f"{path}: loss_mask must have a 0 or 1 for each of {len(input_ids)} tokens")
    if not all(isinstance(token, int) and 0 <= token < (vocab or 2**31) for token in input_ids):
        whose = "every vocabulary" if vocab is None else f"the target's vocabulary of {vocab}"
        raise ValueError(f"{path}: input_ids has a token outside {whose}")
    if not bool(torch.isfinite(states_SLD).all()):
        raise ValueError(f"{path}: {key} is not finite")
    mask = [int(value) for value in loss_mask]
    return {"sample_id": str(sample_id), "input_ids": input_ids, "loss_mask": mask, "features": states_SLD}


def usable(rows: Iterable[dict[str, Any]], events: Events) -> Iterator[dict[str, Any]]:
    """The rows that a block can be drawn from; the others are recorded as skipped, as capture does."""
    for row in rows:
        if has_anchor(row["loss_mask"]):
            events.captured.add(row["sample_id"])
            yield row
        else:
            events.skipped[row["sample_id"]] = "no two neighbouring supervised tokens"


@contextlib.contextmanager
def complete_or_absent(folder: str | Path) -> Iterator[Path]:
    """A folder to write into: it takes its place at the end, or goes away with an error. ValueError if one is there."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: give a folder of its own to what will be written")
    beside = folder.with_name(f".{folder.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:  # two that write into one folder would take each other's rows
        beside.mkdir()
    except FileExistsError as error:
        raise ValueError(
            f"{beside} is there: another run is writing {folder}, or was killed; wait for it, or remove that folder"
        ) from error
    try:  # whatever happens, no half of a folder stays
        yield beside
        beside.replace(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write(kind: Kind, folder: Path, meta: FeatureMeta, rows: Iterable[dict[str, Any]]) -> None:
    """All rows into a folder of `kind`. For speculators, the last layer of the rows is the output of the last block."""
    if kind == "domino":
        _write_domino(folder, meta, rows)
    elif kind == "speculators":
        _write_speculators(folder, rows)
    else:
        _write_specforge(folder, rows)


def _write_domino(folder: Path, meta: FeatureMeta, rows: Iterable[dict[str, Any]]) -> None:
    write_manifest(folder, meta)
    for part in slices(rows, SLICE_BYTES // meta.bytes_per_token):
        write_table(folder, features.table(meta, part))


def _write_speculators(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    import datasets

    (folder / "hidden_states").mkdir()
    ids = pa.list_(pa.int64())
    schema = pa.schema({"input_ids": ids, "loss_mask": ids, "seq_len": pa.int64(), "sample_id": pa.string()})
    streamed = folder / "hidden_states" / "prompts.arrow"  # not where the dataset goes: it refuses to lie on itself
    with pa.OSFile(str(streamed), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for number, row in enumerate(rows):
            tensors = {"hidden_states": row["features"].bfloat16().contiguous()}
            tensors["token_ids"] = torch.tensor(row["input_ids"])
            save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")
            prompt = {name: row[name] for name in ("input_ids", "loss_mask", "sample_id")}
            stream.write_batch(pa.RecordBatch.from_pylist([prompt | {"seq_len": len(row["input_ids"])}], schema))
    datasets.Dataset.from_file(str(streamed)).with_format("torch").save_to_disk(str(folder))
    streamed.unlink()


def _write_specforge(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    for number, row in enumerate(rows):
        first = number - number % FILES_PER_FOLDER
        path = folder / f"rows_{first}-{first + FILES_PER_FOLDER}" / f"data_{number}.ckpt"
        path.parent.mkdir(exist_ok=True)
        values = {name: torch.tensor(row[name]) for name in ("input_ids", "loss_mask")}
        values["hidden_states"] = row["features"].bfloat16().flatten(1)[None]
        torch.save(values | {"sample_id": row["sample_id"]}, path)
