"""Foreign feature folders, laid out as their projects write them: read, written, checked, refused."""

import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_core import features
from domino_core.features import FeatureMeta
from domino_core.target import load_target, target_hash
from jobs.compare_features import relative_errors
from jobs.convert_features import main
from pipelines.batches import CachedFeatures
from pipelines.feature_check import check_states, target_states
from pipelines.feature_files import Source, blocks_of, complete_or_absent, open_source, write
from pipelines.feature_store import cached_rows, read_manifest, write_manifest, write_table

BLOCKS = (2, 6, 11)
D, VOCABULARY = 192, 4096
LENGTHS = (40, 23, 90, 9)


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target)


@pytest.fixture(scope="module")
def meta(embedded_target) -> FeatureMeta:
    return FeatureMeta(
        target=str(embedded_target), target_hash=target_hash(embedded_target), layer_ids=BLOCKS, hidden_size=D,
        tokenizer_hash="t",
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows(target) -> list[dict[str, Any]]:
    """Texts with the target's own states: all of them [S, K, D], those of BLOCKS in bfloat16."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(0, 900, (length,), generator=generator).tolist()
        known = target_states(target, ids)
        made.append({
            "sample_id": f"text/{number}", "input_ids": ids, "loss_mask": [0, 0, *[1] * (length - 3), 0],
            "known": known, "features": known[:, [block + 1 for block in BLOCKS]].bfloat16(),
        })  # fmt: skip
    return made


def make_speculators(folder: Path, rows: list[dict[str, Any]], layers: tuple[int, ...], fp8: bool = False) -> Path:
    """A prompt dataset and hs_{i}.safetensors with vLLM's layers: what enters them, the last one behind."""
    prompts = {
        "input_ids": [row["input_ids"] for row in rows],
        "loss_mask": [row["loss_mask"] for row in rows],
        "seq_len": [len(row["input_ids"]) for row in rows],
    }
    datasets.Dataset.from_dict(prompts).with_format("torch").save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    torch.save(torch.zeros(VOCABULARY), folder / "token_freq.pt")
    for number, row in enumerate(rows):
        states = row["known"][:, [*layers, -1]].bfloat16().contiguous()
        tensors = {"hidden_states": states, "token_ids": torch.tensor(row["input_ids"])}
        if fp8:
            scales = states.float().abs().amax(dim=(1, 2), keepdim=True) / 448
            tensors["hidden_states"] = (states.float() / scales).to(torch.float8_e4m3fn)
            tensors["hidden_states_scales"] = scales
        save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")
    return folder


def make_specforge(folder: Path, rows: list[dict[str, Any]], *, compress: bool = False, eagle: bool = False) -> Path:
    (folder / "rows_0-2000").mkdir(parents=True)
    for number, row in enumerate(rows):
        values = {"input_ids": torch.tensor(row["input_ids"]), "loss_mask": torch.tensor(row["loss_mask"])}
        states = row["features"].flatten(1)
        values |= (
            {"hidden_state": row["known"][None, :, -1], "aux_hidden_state": states[None]}
            if eagle
            else {"hidden_states": states}
        )
        buffer = io.BytesIO()
        torch.save(values, buffer)
        path = folder / "rows_0-2000" / f"data_{number}.ckpt"
        if compress:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(buffer.getvalue()))
        else:
            path.write_bytes(buffer.getvalue())
    return folder


def assert_same(source: Source, rows: list[dict[str, Any]], ids: bool = False) -> None:
    found = list(source)
    assert len(found) == len(source) == len(rows)
    for read, row in zip(found, rows, strict=True):
        assert read["input_ids"] == row["input_ids"]
        assert read["loss_mask"] == row["loss_mask"]
        assert torch.equal(read["features"].float(), row["features"].float())
        assert not ids or read["sample_id"] == row["sample_id"]


def test_layer_ids_of_others_become_blocks():
    assert blocks_of("speculators", [2, 10, 18, 26, 34], 36) == (1, 9, 17, 25, 33)
    assert blocks_of("speculators", [36], 36) == (35,)
    assert blocks_of("specforge", [1, 9, 17], 36) == (1, 9, 17)
    for kind, ids, message in [
        ("speculators", [0, 2], "embeddings"),
        ("speculators", [3, 37], "the target has 36 layers"),
        ("specforge", [36], "the target has 36 layers"),
        ("specforge", [9, 1], "ascending"),
        ("specforge", [], "ascending"),
    ]:
        with pytest.raises(ValueError, match=message):
            blocks_of(kind, ids, 36)


def test_speculators_rows_are_read_with_their_masks(tmp_path, rows, meta, target):
    folder = make_speculators(tmp_path / "theirs", rows, (3, 7, 12))
    source = open_source("speculators", folder, meta, VOCABULARY)
    assert_same(source, rows)
    assert check_states(source, meta, target, "speculators", 3) < 0.01
    # The states may lie elsewhere, and some rows may never have been captured.
    (folder / "hidden_states").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "hs_1.safetensors").unlink()
    source = open_source("speculators", tmp_path / "elsewhere", meta, VOCABULARY, prompts=folder)
    assert_same(source, [rows[0], *rows[2:]])
    assert [row["sample_id"] for row in source] == ["hs_0", "hs_2", "hs_3"]


def test_float8_of_speculators_is_widened_by_its_scales(tmp_path, rows, meta, target):
    source = open_source("speculators", make_speculators(tmp_path / "x", rows, (3, 7, 12), fp8=True), meta, VOCABULARY)
    for read, row in zip(source, rows, strict=True):
        error = (read["features"] - row["features"]).norm(dim=-1) / row["features"].float().norm(dim=-1)
        assert 0 < error.max() < 0.06
    assert 0.01 < check_states(source, meta, target, "speculators", 3) < 0.05


@pytest.mark.parametrize("layout", [{}, {"compress": True}, {"eagle": True}])
def test_specforge_rows_are_read(tmp_path, rows, meta, layout):
    source = open_source("specforge", make_specforge(tmp_path / "theirs", rows, **layout), meta, VOCABULARY)
    assert_same(source, rows)
    assert next(iter(source))["sample_id"] == "rows_0-2000/data_0"


def test_rows_come_in_the_order_of_their_numbers(tmp_path, rows, meta):
    many = [rows[3]] * 12
    source = open_source("specforge", make_specforge(tmp_path / "theirs", many), meta, VOCABULARY)
    assert [row["sample_id"] for row in source] == [f"rows_0-2000/data_{number}" for number in range(12)]


@pytest.mark.parametrize("shift", [-1, 1])
def test_ids_that_are_off_by_one_are_told(tmp_path, rows, meta, target, shift):
    folder = make_speculators(tmp_path / "theirs", rows, tuple(block + 1 + shift for block in BLOCKS))
    source = open_source("speculators", folder, meta, VOCABULARY)
    truth = [block + 1 + shift for block in BLOCKS]
    with pytest.raises(ValueError, match=rf"look shifted by one: .* ids \[{', '.join(map(str, truth))}\]"):
        check_states(source, meta, target, "speculators", 2)


def test_states_of_another_target_or_layer_are_refused(tmp_path, rows, meta, target):
    other = make_speculators(tmp_path / "a", rows, (3, 7, 10))
    with pytest.raises(ValueError, match=r"look wrong: .* ids \[3, 7, 10\] of speculators, not \[3, 7, 12\]"):
        check_states(open_source("speculators", other, meta, VOCABULARY), meta, target, "speculators", 2)
    random = [row | {"features": torch.randn(row["features"].shape)} for row in rows]
    source = open_source("specforge", make_specforge(tmp_path / "b", random), meta, VOCABULARY)
    with pytest.raises(ValueError, match=r"not those of .*another target"):
        check_states(source, meta, target, "specforge", 2)


def change(path: Path, **values) -> None:
    """Replace tensors of a file; None removes one."""
    read: dict[str, Any] = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    read = {name: value for name, value in (read | values).items() if value is not None}
    if path.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in read.items()}, path)
    else:
        torch.save(read, path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_states": None}, "no hidden_states, found"),
        ({"token_ids": None}, "no token_ids, found"),
        ({"token_ids": torch.arange(23)}, "token_ids are not input_ids of row 1"),
        ({"hidden_states": torch.zeros(23, 3, 96)}, r"is float32 \(23, 3, 96\), expected .*\(23, 3, 192\)"),
        ({"hidden_states": torch.zeros(23, 6, 192)}, r"\(23, 6, 192\)"),
        ({"hidden_states": torch.zeros(22, 4, 192)}, r"\(22, 3, 192\)"),
        ({"hidden_states": torch.zeros(23, 768)}, r"shape \(23, 768\)"),
        ({"hidden_states": torch.zeros(23, 4, 192, dtype=torch.int32)}, "is int32"),
        ({"hidden_states": torch.full((23, 4, 192), float("nan"))}, "hidden_states is not finite"),
        ({"hidden_states": torch.zeros(23, 4, 192).to(torch.float8_e4m3fn)}, "no hidden_states_scales"),
    ],
)  # fmt: skip
def test_a_speculators_file_that_does_not_fit_is_named(tmp_path, rows, meta, values, message):
    folder = make_speculators(tmp_path / "theirs", rows, (3, 7, 12))
    change(folder / "hidden_states" / "hs_1.safetensors", **values)
    with pytest.raises(ValueError, match=rf"hs_1\.safetensors.*{message}"):
        list(open_source("speculators", folder, meta, VOCABULARY))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_states": None}, "no aux_hidden_state, found"),
        ({"loss_mask": None}, "no loss_mask, found"),
        ({"loss_mask": torch.ones(22)}, "loss_mask must have a 0 or 1 for each of 23"),
        ({"loss_mask": torch.full((23,), 2)}, "loss_mask must have a 0 or 1"),
        ({"input_ids": torch.full((23,), VOCABULARY)}, "input_ids has a token outside"),
        ({"input_ids": [1, 2, 3]}, "list, not a tensor, as input_ids"),
        ({"hidden_states": torch.zeros(23, 500)}, r"has shape \(23, 500\), expected \[S, 3 layers x 192\]"),
        ({"hidden_states": torch.zeros(20, 576)}, r"\(20, 3, 192\), expected .*\(23, 3, 192\)"),
        ({"hidden_states": torch.full((23, 576), float("inf"))}, "hidden_states is not finite"),
    ],
)  # fmt: skip
def test_a_specforge_file_that_does_not_fit_is_named(tmp_path, rows, meta, values, message):
    folder = make_specforge(tmp_path / "theirs", rows)
    change(folder / "rows_0-2000" / "data_1.ckpt", **values)
    with pytest.raises(ValueError, match=rf"data_1\.ckpt.*{message}"):
        list(open_source("specforge", folder, meta, VOCABULARY))


class Harmful:
    """Unpickled without care, this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path, rows, meta, compress, plain):
    folder, mark = make_specforge(tmp_path / "theirs", rows), tmp_path / "executed"
    content = {"input_ids": torch.arange(3), "note": Harmful(mark)}
    buffer = io.BytesIO()
    if plain:
        pickle.dump(content, buffer, protocol=2)
    else:
        torch.save(content, buffer)
    path = folder / "rows_0-2000" / f"data_4.ckpt{'.gz' if compress else ''}"
    path.write_bytes(gzip.compress(buffer.getvalue()) if compress else buffer.getvalue())
    with pytest.raises(ValueError, match=r"data_4\.ckpt.* is not read: .*more than tensors"):
        list(open_source("specforge", folder, meta, VOCABULARY))
    assert not mark.exists()
    # The proof that it would have run.
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False) if not plain else pickle.loads(buffer.getvalue())
    assert mark.exists()


def test_damaged_files_and_folders_are_named(tmp_path, rows, meta):
    theirs = make_specforge(tmp_path / "a", rows, compress=True)
    damaged = theirs / "rows_0-2000" / "data_0.ckpt.gz"
    damaged.write_bytes(damaged.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"data_0\.ckpt\.gz is not read"):
        list(open_source("specforge", theirs, meta, VOCABULARY))
    torch.save([1, 2], theirs / "rows_0-2000" / "data_7.ckpt")
    damaged.unlink()
    with pytest.raises(ValueError, match=r"data_7\.ckpt holds a list"):
        list(open_source("specforge", theirs, meta, VOCABULARY))

    theirs = make_speculators(tmp_path / "b", rows, (3, 7, 12))
    hidden = theirs / "hidden_states"
    (hidden / "hs_2.safetensors.lock").touch()
    with pytest.raises(ValueError, match=r"hs_2\.safetensors is still being written"):
        list(open_source("speculators", theirs, meta, VOCABULARY))
    (hidden / "hs_2.safetensors").write_bytes(b"no such thing")
    (hidden / "hs_2.safetensors.lock").unlink()
    with pytest.raises(ValueError, match=r"hs_2\.safetensors cannot be read"):
        list(open_source("speculators", theirs, meta, VOCABULARY))
    (hidden / "hs_2.safetensors").rename(hidden / "hs_9.safetensors")
    with pytest.raises(ValueError, match=r"hs_9\.safetensors has no prompt: .* has 4 rows"):
        open_source("speculators", theirs, meta, VOCABULARY)
    with pytest.raises(ValueError, match=r"no prompt dataset.*--prompts"):
        open_source("speculators", hidden, meta, VOCABULARY)
    for kind in ("speculators", "specforge", "domino"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="holds no"):
            open_source(kind, tmp_path / "empty", meta, VOCABULARY)
        with pytest.raises(ValueError, match="no folder"):
            open_source(kind, tmp_path / "absent", meta, VOCABULARY)


def test_a_folder_is_complete_or_not_there(tmp_path, rows, meta):
    theirs = make_specforge(tmp_path / "theirs", rows)
    change(theirs / "rows_0-2000" / "data_3.ckpt", hidden_states=None)
    source = open_source("specforge", theirs, meta, VOCABULARY)
    with pytest.raises(ValueError, match=r"data_3\.ckpt"), complete_or_absent(tmp_path / "ours") as folder:
        write("domino", folder, meta, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "something").touch()
    with pytest.raises(ValueError, match="ours is there already"), complete_or_absent(tmp_path / "ours"):
        pass


def test_a_folder_has_one_writer_at_a_time(tmp_path, rows, meta):
    with complete_or_absent(tmp_path / "ours") as folder:
        write("domino", folder, meta, rows[:3])
        with (
            pytest.raises(ValueError, match=r"\.ours\.partial is there: another run"),
            complete_or_absent(tmp_path / "ours"),
        ):
            pass
        write("domino", folder, meta, rows[3:])
    assert set(cached_rows(tmp_path / "ours")) == {row["sample_id"] for row in rows}
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.fixture
def ours(tmp_path, rows, meta) -> Path:
    folder = tmp_path / "ours"
    write_manifest(folder, meta)
    write_table(folder, features.table(meta, rows[:3]))
    write_table(folder, features.table(meta, rows[3:]))
    return folder


def stored(folder: Path) -> dict[str, tuple]:
    found = {}
    for batch in CachedFeatures(folder, batch_size=1, seed=0, epoch=0):
        bits = batch.features_TC.view(torch.int16).tolist()
        found[batch.sample_ids[0]] = (batch.input_ids_T.tolist(), batch.loss_mask_T.tolist(), bits)
    return found


@pytest.mark.parametrize(("kind", "ids"), [("speculators", "3,7,12"), ("specforge", "2,6,11")])
def test_there_and_back_changes_no_bit(tmp_path, ours, rows, embedded_target, kind, ids, target, capsys):
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    main([str(ours), str(theirs), "--from", "domino", "--to", kind])
    assert f"{kind} layer ids [{ids.replace(',', ', ')}]" in capsys.readouterr().out
    if kind == "speculators":
        prompts: Any = datasets.load_from_disk(str(theirs))
        assert set(prompts.column_names) == {"input_ids", "loss_mask", "seq_len", "sample_id"}
        for number, prompt in enumerate(prompts):
            file = load_file(theirs / "hidden_states" / f"hs_{number}.safetensors")
            # Their reader compares both as tensors, and takes the last layer for the verifier's.
            assert torch.equal(file["token_ids"], prompt["input_ids"])
            final = target_states(target, prompt["input_ids"].tolist())[:, -1]
            assert torch.equal(file["hidden_states"][:, -1], final.bfloat16())
    else:
        file = torch.load(theirs / "rows_0-2000" / "data_0.ckpt", weights_only=True)
        length = len(file["input_ids"])
        assert {name: tuple(file[name].shape) for name in ("input_ids", "loss_mask", "hidden_states")} == {
            "input_ids": (length,), "loss_mask": (length,), "hidden_states": (1, length, 3 * D),
        }  # fmt: skip
    main([str(theirs), str(back), "--from", kind, "--to", "domino", "--layer-ids", ids, f"target={embedded_target}"])
    assert "relative error at most 0.00" in capsys.readouterr().out
    assert stored(back) == stored(ours)
    assert read_manifest(back).target_hash == read_manifest(ours).target_hash


def test_the_last_block_is_not_appended_twice(tmp_path, rows, meta, embedded_target):
    """Features that hold it already end with it, and are read back as they were."""
    ours, last = tmp_path / "ours", FeatureMeta.from_dict(meta.to_dict() | {"layer_ids": [2, 13]})
    write_manifest(ours, last)
    kept = [row | {"features": row["known"][:, [3, 14]].bfloat16()} for row in rows]
    write_table(ours, features.table(last, kept))
    main([str(ours), str(tmp_path / "theirs"), "--from", "domino", "--to", "speculators"])
    assert load_file(tmp_path / "theirs" / "hidden_states" / "hs_0.safetensors")["hidden_states"].shape[1] == 2
    reading = ["--from", "speculators", "--to", "domino", "--layer-ids", "3,14", f"target={embedded_target}"]
    main([str(tmp_path / "theirs"), str(tmp_path / "back"), *reading])
    assert stored(tmp_path / "back") == stored(ours)


def test_the_command_refuses_before_it_writes(tmp_path, rows, ours, embedded_target, capsys):
    theirs = make_specforge(tmp_path / "theirs", rows)
    named = [f"target={embedded_target}", "--layer-ids", "2,6,11"]
    for arguments, message in [
        ([*named[:1]], "give target= and --layer-ids"),
        ([*named[1:]], "give target= and --layer-ids"),
        ([named[0], "--layer-ids", "3,7,12"], r"shifted by one: .* ids \[2, 6, 11\] of specforge"),
        ([named[0], "--layer-ids", "2,6"], "expected .*2 layers x 192"),
    ]:
        with pytest.raises(ValueError, match=message):
            main([str(theirs), str(tmp_path / "out"), "--from", "specforge", "--to", "domino", *arguments])
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="--layer-ids is for files of others"):
        main([str(ours), str(tmp_path / "out"), "--from", "domino", "--to", "specforge", "--layer-ids", "1"])


def test_rows_without_an_anchor_are_counted_not_hidden(tmp_path, rows, embedded_target, capsys):
    short = [*rows[:2], rows[2] | {"loss_mask": [0, 1] * 45}]
    theirs = make_specforge(tmp_path / "theirs", short)
    reading = ["--from", "specforge", "--to", "domino", "--layer-ids", "2,6,11", f"target={embedded_target}"]
    main([str(theirs), str(tmp_path / "back"), *reading])
    assert "2 captured, 1 skipped" in capsys.readouterr().out
    assert set(cached_rows(tmp_path / "back")) == {"rows_0-2000/data_0", "rows_0-2000/data_1"}


def test_a_cache_of_ours_becomes_float8_and_is_trained_from(tmp_path, ours, rows):
    half = tmp_path / "half"
    main([str(ours), str(half), "--from", "domino", "--to", "domino", "capture.features_dtype=float8_e4m3fn"])
    assert read_manifest(half).dtype == "float8_e4m3fn"
    expected = {row["sample_id"]: row["features"] for row in rows}
    for batch in CachedFeatures(half, batch_size=1, seed=0, epoch=0):
        values, scales = features.quantize(expected[batch.sample_ids[0]])
        widened = (values.float() * scales[..., None]).flatten(1)
        assert torch.equal(batch.features_on(torch.device("cpu"), torch.float32), widened)


def test_a_scale_per_layer_keeps_shallow_layers_beside_massive_deep_ones(ours):
    found = relative_errors(ours)
    assert found["tokens"] == sum(LENGTHS)
    assert max(found["scale_per_token_and_layer"]["largest"]) < 0.06
    massive = found["deepest_layer_times_100000"]
    assert max(massive["scale_per_token_and_layer"]["largest"]) < 0.06
    assert massive["scale_per_token"]["mean"][0] > 0.5
