"""Padding keeps every value; the cache reader is deterministic, sharded, complete, and does not care who wrote what."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch

from domino_core import features
from pipelines.batches import CachedFeatures, join_rows, stream_collate
from pipelines.feature_store import cached_rows, write_manifest, write_table

META = features.FeatureMeta(target="t", target_hash="h", layer_ids=(0, 2), hidden_size=4, tokenizer_hash="k")


def make_rows(count: int, seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(2, 12, (1,), generator=generator))
        rows.append(
            {
                "sample_id": f"id-{index}",
                "input_ids": torch.randint(1, 90, (length,), generator=generator).tolist(),
                "loss_mask": torch.randint(0, 2, (length,), generator=generator).tolist(),
                "features": torch.randn(length, 2, 4, generator=generator).bfloat16(),
            }
        )
    return rows


@pytest.fixture
def cache(tmp_path):
    rows = make_rows(23)
    write_manifest(tmp_path, META)
    for start in range(0, 23, 5):
        write_table(tmp_path, features.table(META, rows[start : start + 5]))
    return tmp_path


@pytest.mark.parametrize("max_length", [None, 20, 5, 1])
def test_rows_are_joined_with_every_value_and_cut_in_all_columns_alike(max_length):
    rows = make_rows(7)
    # Two chunks, one of them a slice: offsets of list columns then do not start at zero.
    whole = features.table(META, rows)
    table = pa.concat_tables([features.table(META, rows[:3]), whole.slice(3)])
    batch = join_rows(table, max_length=max_length)
    assert batch.sample_ids == [row["sample_id"] for row in rows]
    assert batch.lengths == [min(len(row["input_ids"]), max_length or 99) for row in rows]
    assert (batch.input_ids_T.dtype, batch.loss_mask_T.dtype) == (torch.int64, torch.bool)
    columns = (batch.input_ids_T, batch.loss_mask_T, batch.features_TC)
    for row, ids, mask, states in zip(rows, *(column.split(batch.lengths) for column in columns), strict=True):
        cut = len(ids)
        assert ids.tolist() == row["input_ids"][:cut]
        assert mask.int().tolist() == row["loss_mask"][:cut]
        assert torch.equal(states, row["features"][:cut].flatten(1))


def test_float8_travels_as_bytes_and_is_widened_where_it_is_used():
    rows = make_rows(7)
    meta = replace(META, dtype=features.FP8)
    whole = features.table(meta, rows)
    table = pa.concat_tables([features.table(meta, rows[:3]), whole.slice(3)])
    batch = join_rows(table, max_length=6)
    assert batch.features_TC.dtype == torch.float8_e4m3fn
    assert batch.scales_TL is not None
    assert (batch.scales_TL.dtype, tuple(batch.scales_TL.shape)) == (torch.float32, (sum(batch.lengths), 2))
    states_TC = batch.features_on(torch.device("cpu"), torch.float32)
    for row, states_SC in zip(rows, states_TC.split(batch.lengths), strict=True):
        cut = len(states_SC)
        values, scales = features.quantize(row["features"])
        assert torch.equal(states_SC, (values.float() * scales[..., None]).flatten(1)[:cut])
        error = (states_SC - row["features"][:cut].flatten(1)).norm() / row["features"][:cut].norm()
        assert 0 < error < 0.04


@pytest.mark.gpu
def test_float8_is_widened_on_the_card_as_on_the_cpu():
    batch = join_rows(features.table(replace(META, dtype=features.FP8), make_rows(7)))
    card = torch.device("cuda", 0)
    for dtype in (torch.float32, torch.bfloat16):
        widened = batch.features_on(card, dtype)
        assert widened.device == card
        assert torch.equal(widened.cpu(), batch.features_on(torch.device("cpu"), dtype))


def test_the_stream_collate_is_the_same_function():
    table = features.table(META, make_rows(3))
    batch = stream_collate(dtype=torch.float32)(table)
    assert batch.features_TC.dtype == torch.float32
    assert torch.equal(batch.features_TC, join_rows(table, dtype=torch.float32).features_TC)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 30])
def test_every_id_comes_once_over_all_ranks(cache, world_size):
    skip = {"id-3", "id-11", "not-there"}
    seen = []
    sizes = []
    for rank in range(world_size):
        reader = CachedFeatures(cache, batch_size=2, seed=1, epoch=4, rank=rank, world_size=world_size, skip=skip)
        batches = list(reader)
        assert len(batches) == len(reader)
        seen += [sample_id for batch in batches for sample_id in batch.sample_ids]
        sizes.append(sum(len(batch.sample_ids) for batch in batches))
    assert sorted(seen) == sorted({f"id-{index}" for index in range(23)} - skip)
    assert max(sizes) - min(sizes) <= 1


def test_the_order_depends_on_seed_and_epoch_alone(cache, tmp_path_factory):
    def order(folder, **changes) -> list[str]:
        settings: dict[str, Any] = {"batch_size": 4, "seed": 1, "epoch": 0} | changes
        return [sample_id for batch in CachedFeatures(folder, **settings) for sample_id in batch.sample_ids]

    assert order(cache) == order(cache, batch_size=3)
    assert order(cache) != order(cache, epoch=1)
    assert order(cache) != order(cache, seed=2)
    # Written in other company (a resumed run), with some rows twice: the same epoch.
    other = tmp_path_factory.mktemp("other")
    rows = make_rows(23)
    write_manifest(other, META)
    for start in range(0, 23, 4):
        write_table(other, features.table(META, rows[start : start + 6]))
    assert order(other) == order(cache)


def test_rows_come_back_with_their_own_values(cache):
    by_id = {row["sample_id"]: row for row in make_rows(23)}
    for batch in CachedFeatures(cache, batch_size=5, seed=0, epoch=0):
        columns = (batch.input_ids_T.split(batch.lengths), batch.features_TC.split(batch.lengths))
        for sample_id, ids, states in zip(batch.sample_ids, *columns, strict=True):
            assert ids.tolist() == by_id[sample_id]["input_ids"]
            assert torch.equal(states, by_id[sample_id]["features"].flatten(1))


def test_writing_the_same_rows_again_overwrites(cache):
    files = sorted(cache.iterdir())
    write_table(cache, features.table(META, make_rows(23)[:5]))
    assert sorted(cache.iterdir()) == files
    assert len(cached_rows(cache)) == 23


def test_new_files_are_seen(cache):
    assert len(CachedFeatures(cache, batch_size=4, seed=0, epoch=0).sample_ids) == 23
    (row,) = make_rows(1)
    write_table(cache, features.table(META, [{**row, "sample_id": "late"}]))
    assert len(CachedFeatures(cache, batch_size=4, seed=0, epoch=0).sample_ids) == 24


def test_folders_that_are_no_cache_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no manifest\.json.*jobs\.features"):
        CachedFeatures(tmp_path, batch_size=1, seed=0, epoch=0)
    (tmp_path / "manifest.json").write_text(json.dumps(META.to_dict()))
    with pytest.raises(ValueError, match="holds no feature rows"):
        CachedFeatures(tmp_path, batch_size=1, seed=0, epoch=0)
