"""Weights of other projects' folders: used to the last tensor, or refused with the tensor or the file named."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_core import blocks
from domino_core.block_attention import RowAttention
from domino_core.checkpoint import folder_digest, load_drafter, read_config, read_state, save_drafter
from domino_core.drafter import Drafter
from domino_core.foreign import to_speculators
from tests.packing import packed

CASES = ("draft_shift0_p1", "draft_shift1_p0", "draft_shift1_p2")


def without(mapping, *keys):
    return {key: value for key, value in mapping.items() if key not in keys}


@pytest.fixture(scope="module")
def vocabulary(reference_dir):
    target = load_file(reference_dir / "target" / "model.safetensors")
    return target["model.embed_tokens.weight"], target["lm_head.weight"]


@pytest.fixture(scope="module")
def inputs(reference_dir):
    return load_file(reference_dir / "inputs.safetensors")


@pytest.fixture(params=[*CASES, "dflash0", "dflash1"])
def drafter(request, reference_dir, vocabulary):
    """Domino in both conventions; DFlash in both."""
    if request.param in CASES:
        return load_drafter(reference_dir / request.param, *vocabulary)
    torch.manual_seed(3)
    config = replace(read_config(reference_dir / "draft_shift0_p1"), emb_dim=256, gru_hidden_dim=1024)  # the defaults
    return Drafter(replace(config, head=False, shift_label=request.param == "dflash1"), *vocabulary).eval()


def write_speculator(drafter, folder, verifier="a/target"):
    """What speculators would write, put together here from the public names alone."""
    folder.mkdir(exist_ok=True)
    heads = ("prefix_gru.", "embed_proj.")
    names = {name: name.split(".", 1)[1] for name in drafter.state_dict()}
    save_file(
        {
            ("logits_correction." if new.startswith(heads) else "") + new: drafter.state_dict()[old].clone()
            for old, new in names.items()
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(to_speculators(drafter.config, verifier, [])))
    return folder


def rewrite(folder, config=None, **tensors):
    """Change tensors of a folder (None: take away) and keys of its config.json."""
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(raw))


@torch.inference_mode()
def logits(drafter, inputs):
    """Of whole blocks, teacher-forced."""
    names = ("input_ids", "loss_mask", "features", "anchors", "anchor_keep")
    ids, mask, features, anchors, keep = (inputs[name] for name in names)
    rows = packed(ids, mask, features, anchors, keep.bool())
    z = drafter.predicting(drafter.block_hidden(rows, RowAttention(rows, drafter.config.block_size)))
    return drafter.logits(z, blocks.gru_inputs(rows, drafter.config))[1]


def test_a_speculator_drafts_as_the_published_folder_does(drafter, inputs, vocabulary, tmp_path):
    folder = write_speculator(drafter, tmp_path / "speculator")
    got = load_drafter(folder, *vocabulary)
    assert got.config == drafter.config
    assert torch.equal(logits(got, inputs), logits(drafter, inputs))


@pytest.mark.parametrize("head", [True, False])
def test_every_tensor_is_used(reference_dir, vocabulary, inputs, tmp_path, head):
    torch.manual_seed(3)
    config = replace(read_config(reference_dir / "draft_shift1_p1"), head=head)
    folder = write_speculator(Drafter(config, *vocabulary), tmp_path / "speculator")
    before = logits(load_drafter(folder, *vocabulary), inputs)
    stored = load_file(folder / "model.safetensors")
    assert len(stored) == (29 if head else 25)
    for name, tensor in stored.items():
        changed = tensor.clone()
        changed.flatten()[-1] += 0.5
        rewrite(folder, **{name: changed})
        assert not torch.equal(logits(load_drafter(folder, *vocabulary), inputs), before), name
        rewrite(folder, **{name: tensor})
    assert torch.equal(logits(load_drafter(folder, *vocabulary), inputs), before)


def test_missing_misshapen_and_unknown_tensors_are_called_by_the_file_s_names(drafter, vocabulary, tmp_path):
    folder = write_speculator(drafter, tmp_path / "speculator")
    gone = "logits_correction.prefix_gru.weight_hh_l0" if drafter.head else "hidden_norm.weight"
    extra = {"prefix_gru.weight_hh_l0": torch.zeros(1), "verifier_norm.weight": torch.zeros(64)}
    extra |= {"d2t": torch.zeros(257, dtype=torch.int64), "confidence_head.weight": torch.zeros(1)}
    rewrite(folder, **{gone: None, "fc.weight": torch.zeros(64, 64)}, **extra)
    with pytest.raises(ValueError, match=r"config\.json describes") as caught:
        load_drafter(folder, *vocabulary)
    for said in (
        f"{gone} is missing",
        "prefix_gru.weight_hh_l0 is unknown",
        "d2t is unknown (drafts in a vocabulary of its own are not supported)",
        "verifier_norm.weight is unknown (the target's, used in training alone",
        "confidence_head.weight is unknown",
        "fc.weight is [64, 64], not [64, 128]",
    ):
        assert said in str(caught.value)


def test_tensors_of_the_target_are_left_to_it_if_they_are_the_same(drafter, vocabulary, inputs, tmp_path):
    folder = write_speculator(drafter, tmp_path / "speculator")
    embed, lm_head = vocabulary
    rewrite(folder, **{"embed_tokens.weight": embed.bfloat16(), "lm_head.weight": lm_head})
    assert torch.equal(logits(load_drafter(folder, *vocabulary), inputs), logits(drafter, inputs))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight repeats .* name the target"):
        read_state(folder)
    for name, tensor in (("embed_tokens.weight", embed), ("lm_head.weight", lm_head)):
        other = tensor.clone()
        other[-1, -1] += 1
        rewrite(folder, **{name: other})
        with pytest.raises(ValueError, match=rf"{name} is not the target's"):
            load_drafter(folder, *vocabulary)
        rewrite(folder, **{name: other[:-1].clone()})
        with pytest.raises(ValueError, match=rf"{name} is not the target's"):
            load_drafter(folder, *vocabulary)
        rewrite(folder, **{name: tensor})


@pytest.fixture
def sharded(drafter, tmp_path):
    """A published folder in two shards: (folder, name of a tensor in the second)."""
    folder = save_drafter(drafter, tmp_path / "drafter", {})
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, names[9]


def test_shards_are_one_checkpoint(sharded, drafter, vocabulary, inputs):
    folder, _ = sharded
    assert torch.equal(logits(load_drafter(folder, *vocabulary), inputs), logits(drafter, inputs))
    digest = folder_digest(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(shard).items()}, shard)
    assert folder_digest(folder) != digest


@pytest.mark.parametrize("drafter", ["draft_shift1_p0"], indirect=True)
def test_damage_to_shards_is_named(sharded, vocabulary):
    folder, name = sharded
    index, shard = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    whole, held = json.loads(index.read_text()), load_file(shard)

    def refused(match):
        with pytest.raises(ValueError, match=match):
            load_drafter(folder, *vocabulary)

    save_file(without(held, name), shard)
    refused(rf"model-00002-of-00002\.safetensors lacks {name}")
    save_file(held | {"stray": torch.zeros(1)}, shard)
    refused("holds stray, which .* does not say")
    shard.write_bytes(shard.read_bytes()[:-9])
    refused(r"model-00002-of-00002\.safetensors is damaged")
    shard.unlink()
    refused(r"model-00002-of-00002\.safetensors does not exist")
    for bad in ("../model.safetensors", "/model.safetensors", "model.bin", 3):
        index.write_text(json.dumps({"weight_map": whole["weight_map"] | {name: bad}}))
        refused("no safetensors file beside the index")
    for bad in ("{", "[]", "{}", '{"weight_map": []}', "[" * 5000):
        index.write_text(bad)
        refused("is damaged")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "drafter.ckpt"])
def test_pickles_are_never_opened(reference_dir, vocabulary, tmp_path, name):
    shutil.copy(reference_dir / "draft_shift1_p1" / "config.json", tmp_path)
    (tmp_path / name).write_bytes(b"not even a pickle")
    with pytest.raises(ValueError, match=rf"{name} and no model\.safetensors: pickles .* convert them to safetensors"):
        load_drafter(tmp_path, *vocabulary)


def test_an_embedding_of_the_mask_slots_is_refused(reference_dir, vocabulary, tmp_path):
    folder = shutil.copytree(reference_dir / "draft_shift1_p1", tmp_path / "drafter")
    load_drafter(folder, *vocabulary)
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt is not supported"):
        load_drafter(folder, *vocabulary)
