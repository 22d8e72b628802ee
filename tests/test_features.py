"""The feature row: bits survive, metadata describes, and rows of another target are refused."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from domino_core import features

META = features.FeatureMeta(target="tiny", target_hash="a" * 64, layer_ids=(1, 3), hidden_size=8, tokenizer_hash="t")


@dataclass(frozen=True)
class Shape:
    target_layer_ids: tuple[int, ...] = (1, 3)
    hidden_size: int = 8


def row(sample_id: str, tokens: int) -> dict:
    values = torch.randn(tokens, 2, 8, generator=torch.Generator().manual_seed(tokens))
    return {
        "sample_id": sample_id,
        "input_ids": list(range(tokens)),
        "loss_mask": [0] + [1] * (tokens - 1),
        "features": values,
    }


def test_bits_and_order_survive_parquet(tmp_path):
    rows = [row("a", 5), row("b", 1)]
    pq.write_table(features.table(META, rows), tmp_path / "x.parquet")
    found = pq.read_table(tmp_path / "x.parquet")
    assert features.read_meta(found.schema) == META
    for index, original in enumerate(rows):
        read = features.decode(found["features"][index], found["num_tokens"][index].as_py(), dtype=torch.bfloat16)
        # Row-major [token, layer, hidden]: the first hidden_size numbers of a token are its shallowest layer.
        assert torch.equal(read, original["features"].to(torch.bfloat16).flatten(1))
        assert found["input_ids"][index].as_py() == original["input_ids"]


def test_bytes_per_token_is_what_encode_writes():
    assert len(features.encode(torch.zeros(7, 2, 8))) == 7 * META.bytes_per_token


def test_other_target_layers_and_width_are_refused_by_name():
    features.check_fits(META, Shape(), "a" * 64)
    with pytest.raises(ValueError, match="another target"):
        features.check_fits(META, Shape(), "b" * 64)
    with pytest.raises(ValueError, match=r"layers \[1, 3\].*reads \[1, 2\]"):
        features.check_fits(META, Shape(target_layer_ids=(1, 2)), "a" * 64)
    with pytest.raises(ValueError, match="hidden size 8, the drafter has 16"):
        features.check_fits(META, Shape(hidden_size=16), "a" * 64)


@pytest.mark.parametrize("layer_ids", [(3, 1), (1, 1), ()])
def test_layers_out_of_order_are_refused(layer_ids):
    with pytest.raises(ValueError, match="ascending"):
        features.FeatureMeta(target="t", target_hash="h", layer_ids=layer_ids, hidden_size=8, tokenizer_hash="t")


def test_unknown_format_version_and_foreign_files_are_refused():
    with pytest.raises(ValueError, match="format version 99"):
        features.FeatureMeta.from_dict({**META.to_dict(), "format_version": 99})
    with pytest.raises(ValueError, match="no feature metadata"):
        features.read_meta(pa.schema([("a", pa.int32())]))


def test_misshapen_and_non_finite_rows_are_never_written():
    wrong = row("a", 4)
    wrong["features"] = wrong["features"][:3]
    with pytest.raises(AssertionError, match="a: features"):
        features.table(META, [wrong])
    bad = row("b", 4)
    bad["features"][2, 1, 3] = float("nan")
    with pytest.raises(AssertionError, match="b: features are not finite"):
        features.table(META, [bad])


def test_damaged_bytes_are_refused():
    with pytest.raises(ValueError, match="damaged"):
        features.decode(b"123", 2)
