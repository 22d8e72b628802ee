"""Checkpoints: published layout, strict reading, atomic writing, provenance."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_core import checkpoint
from domino_core.checkpoint import (
    folder_digest,
    load_drafter,
    provenance,
    read_config,
    read_provenance,
    save_drafter,
)
from domino_core.drafter import Drafter


@pytest.fixture(scope="module")
def vocabulary():
    torch.manual_seed(1)
    return torch.randn(257, 64), torch.randn(257, 64)


@pytest.fixture
def published(reference_dir):
    return reference_dir / "draft_shift1_p1"


@pytest.fixture
def copy(published, tmp_path):
    """A writable copy of a published checkpoint: (folder, tensors)."""
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    tensors = load_file(published / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def test_a_published_checkpoint_comes_back_bit_for_bit(published, vocabulary, tmp_path):
    drafter = load_drafter(published, *vocabulary)
    assert not drafter.training
    folder = save_drafter(drafter, tmp_path / "out", {"steps": 3})
    expected, got = load_file(published / "model.safetensors"), load_file(folder / "model.safetensors")
    assert got.keys() == expected.keys()
    assert {"prefix_gru.weight_hh_l0", "embed_proj.2.weight"} <= got.keys()  # the head really is in the file
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    assert read_config(folder) == read_config(published)
    assert read_provenance(folder) == {"steps": 3}
    assert read_provenance(published) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("head", [True, False])
def test_float32_masters_are_stored_as_bfloat16_once(published, vocabulary, tmp_path, head):
    config = replace(read_config(published), dtype="bfloat16", head=head)
    trained = Drafter(config, *vocabulary)
    save_drafter(trained, tmp_path / "a", {})
    again = load_drafter(tmp_path / "a", *vocabulary)
    assert again.dtype == torch.bfloat16
    for (name, tensor), stored in zip(trained.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor.bfloat16(), stored), name
    save_drafter(load_drafter(tmp_path / "a", *vocabulary, dtype=torch.float32), tmp_path / "b", {"other": 1})
    assert folder_digest(tmp_path / "a") == folder_digest(tmp_path / "b")
    trained.backbone.norm.weight.data += 1
    save_drafter(trained, tmp_path / "b", {})
    assert folder_digest(tmp_path / "a") != folder_digest(tmp_path / "b")


def test_loading_shares_the_target_s_tensors_and_casts_only_its_own(published, vocabulary):
    drafter = load_drafter(published, *vocabulary, dtype=torch.bfloat16)
    assert drafter.embed_VD.data_ptr() == vocabulary[0].data_ptr()
    assert drafter.lm_head_VD.dtype == torch.float32
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    assert all(parameter.requires_grad for parameter in drafter.parameters())


def test_missing_unknown_and_misshapen_tensors_are_named(copy, vocabulary):
    folder, tensors = copy
    del tensors["prefix_gru.weight_hh_l0"]
    tensors["embed_tokens.weight"] = torch.zeros(2)
    tensors["fc.weight"] = torch.zeros(64, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json describes") as caught:
        load_drafter(folder, *vocabulary)
    message = str(caught.value)
    assert "prefix_gru.weight_hh_l0 is missing" in message
    assert "embed_tokens.weight is unknown" in message
    assert "fc.weight is [64, 64], not [64, 128]" in message


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tensor: tensor * float("nan"), "fc.weight holds values that are not finite"),
        (lambda tensor: tensor.to(torch.int8), "fc.weight is torch.int8"),
    ],
)
def test_weights_that_are_no_numbers_are_named(copy, vocabulary, spoil, said):
    folder, tensors = copy
    save_file(tensors | {"fc.weight": spoil(tensors["fc.weight"])}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        load_drafter(folder, *vocabulary)


@pytest.mark.parametrize("content", ["{", "[]", "null", "", pytest.param("[" * 5000, id="nested")])
@pytest.mark.parametrize("name", ["config.json", "provenance.json"])
def test_damaged_json_names_its_file(copy, name, content):
    folder, _ = copy
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged"):
        (read_config if name == "config.json" else read_provenance)(folder)


def test_a_head_that_the_configuration_does_not_have_is_refused(copy, vocabulary):
    """Otherwise the backbone would be evaluated alone, silently."""
    folder, _ = copy
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["projector_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"prefix_gru\.weight_ih_l0 is unknown"):
        load_drafter(folder, *vocabulary)


def test_legacy_names(copy, vocabulary, published):
    folder, tensors = copy
    head = ("prefix_gru.", "embed_proj.")
    legacy = {f"logit_head.{name}" if name.startswith(head) else name: tensor for name, tensor in tensors.items()}
    save_file(legacy, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["projector_type"] = "causal_v5"
    (folder / "config.json").write_text(json.dumps(config))
    got, expected = load_drafter(folder, *vocabulary), load_drafter(published, *vocabulary)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor)


def test_damaged_and_absent_files_are_named(copy, vocabulary):
    folder, _ = copy
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_drafter(folder, *vocabulary)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors does not exist"):
        load_drafter(folder, *vocabulary)
    with pytest.raises(ValueError, match="no drafter"):
        read_config(folder / "elsewhere")


def test_where_no_drafter_is_those_of_other_runs_are_named(published, tmp_path):
    other = tmp_path / "other" / "drafter"
    other.mkdir(parents=True)
    (other / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(ValueError, match=r"mine/drafter is no drafter: .*other/drafter\)"):
        read_config(tmp_path / "mine" / "drafter")


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("at", ["save_file", "_sync", "put_in_place"])
def test_an_interrupted_write_leaves_the_old_checkpoint(published, vocabulary, tmp_path, monkeypatch, at):
    drafter = load_drafter(published, *vocabulary)
    folder = save_drafter(drafter, tmp_path / "out", {"version": 1})
    digest = folder_digest(folder)

    def interrupted(*args, **kwargs):
        raise Interrupted

    monkeypatch.setattr(checkpoint, at, interrupted)
    drafter.backbone.norm.weight.data += 1
    with pytest.raises(Interrupted):
        save_drafter(drafter, folder, {"version": 2})
    monkeypatch.undo()
    assert folder_digest(folder) == digest
    assert read_provenance(folder) == {"version": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    save_drafter(drafter, folder, {"version": 2})
    assert folder_digest(folder) != digest
    assert read_provenance(folder) == {"version": 2}


def test_killed_between_the_two_renames_the_old_one_is_found_and_then_replaced(published, vocabulary, tmp_path):
    drafter = load_drafter(published, *vocabulary)
    folder = save_drafter(drafter, tmp_path / "out", {"version": 1})
    digest = folder_digest(folder)
    folder.rename(tmp_path / ".out.previous")  # the state on the disk at that moment
    assert folder_digest(folder) == digest
    assert load_drafter(folder, *vocabulary).config == drafter.config
    assert read_provenance(folder) == {"version": 1}
    save_drafter(drafter, folder, {"version": 2})
    assert read_provenance(folder) == {"version": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["mine.txt", "config.json", ""])
def test_what_is_no_drafter_is_not_replaced(published, vocabulary, tmp_path, name):
    """A folder of something else, a target's, and a file."""
    drafter, place = load_drafter(published, *vocabulary), tmp_path / "place"
    kept = place / name if name else place
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("precious")
    with pytest.raises(ValueError, match="only replaces one that was written here"):
        save_drafter(drafter, place, {})
    assert kept.read_text() == "precious"
    kept.unlink()
    save_drafter(drafter, place, {"number": 1})
    save_drafter(drafter, place, {"number": 2})
    assert read_provenance(place)["number"] == 2


def test_provenance_says_what_made_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/jobs/train.py", "--preset", "tiny"])
    made = provenance(data_hash="abc", config={"steps": 3})
    assert made["command"] == ["train.py", "--preset", "tiny"]
    assert (
        made["packages"]["torch"] == torch.__version__.split("+")[0] or made["packages"]["torch"] == torch.__version__
    )
    assert made["data_hash"] == "abc"
    assert made["created"].endswith("+00:00")
    assert len(made["commit"].removesuffix("+changes")) == 40 or made["commit"] == "unknown"
    json.dumps(made)


def test_commit_comes_from_the_environment_where_there_is_no_repository(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("DOMINO_COMMIT", "feed")
    assert provenance()["commit"] == "feed"
    monkeypatch.delenv("DOMINO_COMMIT")
    assert provenance()["commit"] == "unknown"
