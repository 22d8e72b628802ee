"""The feature row: bits survive, metadata describes, and rows of another target are refused."""

from dataclasses import dataclass, replace

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


def test_bytes_per_token_is_what_pack_gives():
    values_SLD, scales_SL = features.pack(torch.zeros(7, 2, 8), META.dtype)
    assert scales_SL is None
    assert values_SLD.nbytes == 7 * META.bytes_per_token


def test_a_packed_table_is_the_memory_that_it_was_given():
    rows = [row("a", 5), row("b", 1), row("c", 3)]
    values_TLD = torch.cat([features.pack(each["features"], META.dtype)[0] for each in rows])
    table = features.packed_table(META, rows, values_TLD)
    assert table.equals(features.table(META, rows))
    assert table["features"].chunk(0).buffers()[2].address == values_TLD.data_ptr()
    with pytest.raises(AssertionError):
        features.packed_table(META, rows[:2], values_TLD)
    with pytest.raises(AssertionError):
        features.packed_table(META, rows, values_TLD.transpose(1, 2))


def test_packed_float8_is_what_a_table_of_rows_holds():
    rows = [row("a", 5), row("b", 2)]
    packed = [features.pack(each["features"], "float8_e4m3fn") for each in rows]
    values_TLD = torch.cat([values_SLD.view(torch.uint8) for values_SLD, _ in packed]).view(torch.float8_e4m3fn)
    scales_TL = torch.cat([scales_SL for _, scales_SL in packed if scales_SL is not None])
    table = features.packed_table(FP8_META, rows, values_TLD, scales_TL)
    assert table.equals(features.table(FP8_META, rows))
    assert features.table(FP8_META, []).num_rows == 0
    for index, each in enumerate(rows):
        kept = features.decode(table["features"][index], len(each["input_ids"]), scales=table["scales"][index].as_py())
        assert (kept - each["features"].flatten(1)).norm() < 0.05 * each["features"].norm()


def test_scales_are_exact_powers_of_two():
    exponents = torch.arange(-117, 119, dtype=torch.float64)
    states_SLD = (448.0 * 2**exponents).float()[:, None, None].expand(-1, 1, 4)
    values_SLD, scales_SL = features.quantize(states_SLD)
    assert torch.equal(scales_SL[:, 0].double(), 2**exponents)
    assert torch.equal(values_SLD.float(), torch.full_like(states_SLD, 448.0))


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


FP8_META = replace(META, dtype="float8_e4m3fn")


def states_with_outliers(tokens: int = 64) -> torch.Tensor:
    """[S, 2, 8] whose tokens and layers differ in norm by orders of magnitude; one token is zero, one is massive."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(tokens, 2, 8, generator=generator) * 10 ** torch.rand(tokens, 2, 1, generator=generator)
    states[:, 1] *= 300
    states[5] = 0
    states[7] *= 1e4
    states[9, 0] = 1e-30
    states[11, 1, 2] = 3e38
    return states


def test_float8_keeps_every_token_of_every_layer_to_its_rounding():
    states = states_with_outliers()
    values, scales = features.quantize(states)
    assert (values.dtype, scales.dtype, tuple(scales.shape)) == (torch.float8_e4m3fn, torch.float32, (64, 2))
    restored = features.dequantize(values.flatten(1)[None], scales[None], torch.float32)[0].view_as(states)
    assert torch.isfinite(restored).all()
    # Three stored bits of mantissa: at most 1/16 of the value, or half a step at the small end of the token's range.
    smallest_step = scales[..., None] * 2.0**-9
    assert ((restored - states).abs() <= torch.maximum(states.abs() / 16, smallest_step / 2)).all()
    # No scale wastes more than the one bit that rounding it to a power of two takes, nor lets a value overflow.
    largest = values.float().abs().amax(-1)
    used = states.abs().amax(-1) > 0
    assert (largest[used] >= 208).all()
    assert (largest <= 448).all()
    assert (restored[5] == 0).all()


def test_scales_are_powers_of_two_so_bfloat16_restores_what_float32_does():
    values, scales = features.quantize(states_with_outliers())
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()
    wide, narrow = (
        features.dequantize(values.flatten(1)[None], scales[None], dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(wide, narrow.float())
    # Encoding what was decoded changes nothing any more.
    again, same = features.quantize(wide[0].view(64, 2, 8))
    assert torch.equal(features.dequantize(again.flatten(1)[None], same[None], torch.float32), wide)


def test_float8_rows_survive_parquet_and_take_half(tmp_path):
    rows = [row("a", 50), row("b", 1)]
    pq.write_table(features.table(FP8_META, rows), tmp_path / "x.parquet")
    found = pq.read_table(tmp_path / "x.parquet")
    assert features.read_meta(found.schema) == FP8_META
    assert set(found["dtype"].to_pylist()) == {"float8_e4m3fn"}
    for index, original in enumerate(rows):
        tokens = found["num_tokens"][index].as_py()
        read = features.decode(found["features"][index], tokens, scales=found["scales"][index].as_py())
        values, scales = features.quantize(original["features"])
        assert torch.equal(read, (values.float() * scales[..., None]).flatten(1))
        written = len(found["features"][index].as_py()) + 4 * len(found["scales"][index].as_py())
        assert written == tokens * FP8_META.bytes_per_token == tokens * (2 * 8 + 4 * 2)
    assert replace(FP8_META, hidden_size=4096).bytes_per_token < 0.501 * replace(META, hidden_size=4096).bytes_per_token


def test_files_of_before_stay_as_they_are():
    """bfloat16 features are format version 1 with the columns and metadata that version 1 always had."""
    assert META.to_dict() == {
        "format_version": 1, "target": "tiny", "target_hash": "a" * 64, "layer_ids": [1, 3], "hidden_size": 8,
        "tokenizer_hash": "t", "layer_meaning": features.LAYER_MEANING, "dtype": "bfloat16",
    }  # fmt: skip
    assert features.schema(META).names == ["sample_id", "input_ids", "loss_mask", "features", "num_tokens", "dtype"]
    assert FP8_META.to_dict()["format_version"] == 2
    assert features.FeatureMeta.from_dict(FP8_META.to_dict()) == FP8_META
    with pytest.raises(ValueError, match="version 1 does not hold float8_e4m3fn"):
        features.FeatureMeta.from_dict({**FP8_META.to_dict(), "format_version": 1})
    with pytest.raises(ValueError, match="bfloat16 or float8_e4m3fn, not 'float16'"):
        features.FeatureMeta.from_dict({**META.to_dict(), "dtype": "float16"})


def test_damaged_scales_are_refused():
    with pytest.raises(ValueError, match=r"3 scales for 2 tokens.*damaged"):
        features.stored_scales([1.0, 1.0, 1.0], 2)
    with pytest.raises(ValueError, match="damaged"):
        features.stored_scales([1.0, float("nan")], 2)
