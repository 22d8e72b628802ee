"""Folders of other projects: read as what they mean, or refused with the key or the tensor named."""

import importlib.util
import json
import runpy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_core import blocks
from domino_core.checkpoint import folder_digest, load_drafter, read_config, read_state, save_drafter
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.foreign import format_of, read_foreign, to_speculators

# z-lab/Qwen3-8B-DFlash-b16, as its config.json was written by transformers 4.57.
Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# A full-vocabulary, full-attention DFlash speculator, as speculators writes it with transformers 5.
OUTSIDE_LAYER = ("architectures", "auto_map", "block_size", "dflash_config", "dtype", "num_target_layers")
MOVED = (*OUTSIDE_LAYER, "rope_theta", "rope_scaling")
SPECULATOR = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 16,
    "draft_vocab_size": 151936,
    "dtype": "bfloat16",
    "mask_token_id": 151669,
    "max_anchors": 3072,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 15, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **{key: value for key, value in Z_LAB.items() if key not in MOVED},
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "pad_token_id": None,
    },
    "transformers_version": "5.5.4",
}
DOMINO_SPECULATOR = {
    **SPECULATOR,
    "architectures": ["DominoDraftModel"],
    "speculators_model_type": "domino",
    "sample_from_anchor": True,
    "gru_hidden_dim": 1024,
    "logits_correction_emb_dim": 256,
    "pure_draft_prefix_len": 1,
    "lambda_base_start": 1.0,
    "lambda_base_decay_ratio": 0.5,
}
CASES = ("draft_shift0_p1", "draft_shift1_p0", "draft_shift1_p2")


def without(mapping, *keys):
    return {key: value for key, value in mapping.items() if key not in keys}


def speculator(**changes):
    return {**SPECULATOR, **changes}


def layer(**changes):
    return speculator(transformer_layer_config={**SPECULATOR["transformer_layer_config"], **changes})


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
    anchors, keep = inputs["anchors"], inputs["anchor_keep"].bool()
    z = drafter.predicting(drafter.block_hidden(inputs["input_ids"], inputs["features"], anchors, keep)).flatten(0, 1)
    return drafter.logits(z, blocks.gru_inputs(inputs["input_ids"], anchors, drafter.config).flatten(0, 1))[1]


def test_the_public_dflash_file_is_read_and_written_back():
    config = read_foreign(Z_LAB)
    assert (config.head, config.shift_label, config.num_drafts) == (False, False, 15)
    assert (config.target_layer_ids, config.mask_token_id) == ((1, 9, 17, 25, 33), 151669)
    differing = {key for key, value in config.to_dict().items() if Z_LAB.get(key, value) != value}
    assert differing == {"bos_token_id", "eos_token_id"}  # the target's, and nobody drafts by them


def test_the_public_speculator_means_the_same_drafter():
    """Same drafter, two projects: the layer that a value enters is one more than the block that it leaves."""
    config = read_foreign(SPECULATOR)
    assert config.num_target_layers is None
    assert replace(config, num_target_layers=36) == read_foreign(Z_LAB)
    assert read_foreign(speculator(num_target_layers=36)) == read_foreign(Z_LAB)


def test_a_domino_speculator_means_the_published_domino():
    config = read_foreign(DOMINO_SPECULATOR)
    assert (config.head, config.shift_label, config.num_drafts) == (True, True, 16)
    assert (config.emb_dim, config.gru_hidden_dim, config.pure_draft_prefix_len) == (256, 1024, 1)
    published = {
        **{**Z_LAB, "emb_dim": 256},  # where engines look for it; some files have it only there
        "dflash_config": {
            **Z_LAB["dflash_config"],
            "projector_type": "domino",
            "shift_label": True,
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": 1024,
        },
    }
    assert published["architectures"] == ["DFlashDraftModel"]  # the released Domino files say so
    assert replace(config, num_target_layers=36) == read_foreign(published)


@pytest.mark.parametrize("shift_label", [True, False])
def test_what_is_written_is_read_as_the_same(shift_label):
    plain = replace(read_foreign(Z_LAB), shift_label=shift_label)
    for config in (plain, replace(plain, head=True, pure_draft_prefix_len=2), replace(plain, num_target_layers=None)):
        written = json.loads(json.dumps(to_speculators(config, "Qwen/Qwen3-8B", ["Qwen3ForCausalLM"])))
        assert format_of(written) == "speculators"
        assert read_foreign(written) == config
        tokens = written["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        assert tokens == (16 if shift_label else 15)


def test_written_keys_are_those_of_the_public_file():
    ours = to_speculators(read_foreign(speculator(num_target_layers=36)), "Qwen/Qwen3-8B", ["Qwen3ForCausalLM"])
    assert set(ours) - set(SPECULATOR) == {"num_target_layers"}
    differing = {key for key in ours if key in SPECULATOR and ours[key] != SPECULATOR[key]}
    assert differing == {"speculators_config", "sliding_window_non_causal", "transformer_layer_config"}
    assert ours["speculators_config"]["verifier"] == SPECULATOR["speculators_config"]["verifier"]
    layers = ours["transformer_layer_config"], SPECULATOR["transformer_layer_config"]
    differing = {key for key in layers[0] if key in layers[1] and layers[0][key] != layers[1][key]}
    assert differing == {"bos_token_id", "eos_token_id"}


def test_vllm_reads_what_is_written():
    """The installed vLLM's own translation: its taps, its vocabulary, and no layer that it would make causal."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.submodule_search_locations is None:
        pytest.skip("vLLM is not installed")
    folder = Path(vllm.submodule_search_locations[0])
    # That file alone: importing the package takes ten seconds.
    algos = runpy.run_path(str(folder / "transformers_utils" / "configs" / "speculators" / "algos.py"))
    written = to_speculators(read_foreign(Z_LAB), "Qwen/Qwen3-8B", ["Qwen3ForCausalLM"])
    seen = dict(written["transformer_layer_config"])
    algos["SUPPORTED_SPECULATORS_TYPES"]["dflash"](config_dict=written, pre_trained_config=seen)
    assert seen["architectures"] == ["DFlashDraftModel"]
    assert seen["eagle_aux_hidden_state_layer_ids"] == [2, 10, 18, 26, 34]
    assert seen["dflash_config"] == {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "sample_from_anchor": False,
        "causal": False,
    }
    assert (seen["draft_vocab_size"], seen["rope_theta"]) == (151936, 1e6)


def test_transformers_reads_the_decoder_that_is_written():
    from transformers import Qwen3Config

    written = to_speculators(replace(read_foreign(Z_LAB), rope_theta=5e5), None, [])["transformer_layer_config"]
    seen = Qwen3Config(**written)
    assert seen.rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}
    own = speculator(transformer_layer_config=seen.to_diff_dict(), num_target_layers=36)
    assert read_foreign(own) == replace(read_foreign(Z_LAB), rope_theta=5e5)


def test_the_last_block_s_output_cannot_be_said():
    with pytest.raises(ValueError, match="last block, 35"):
        to_speculators(replace(read_foreign(Z_LAB), target_layer_ids=(1, 35)), None, [])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (speculator(draft_vocab_size=32000), r"draft_vocab_size=32000 of vocab_size=151936.*d2t, t2d"),
        (without(SPECULATOR, "draft_vocab_size"), "draft_vocab_size=None"),
        (speculator(speculators_model_type="eagle3"), "speculators_model_type 'eagle3'"),
        (speculator(speculators_model_type=["dflash"]), "speculators_model_type"),
        (speculator(aux_hidden_state_layer_ids=[0, 9]), "0 is the output of the target's embedding"),
        (speculator(aux_hidden_state_layer_ids=[2, 37], num_target_layers=36), r"target_layer_ids=\[1, 36\]"),
        (speculator(aux_hidden_state_layer_ids=[10, 2]), "ascend"),
        (speculator(aux_hidden_state_layer_ids=[2.0]), "no list of whole numbers"),
        (speculator(aux_hidden_state_layer_ids=None), "lacks aux_hidden_state_layer_ids"),
        (speculator(mask_token_id=None), "lacks mask_token_id"),
        (speculator(sample_from_anchor="no"), "shift_label='no' must be true or false"),
        (speculator(target_hidden_size=2048), "target_hidden_size=2048"),
        (speculator(projector_type="domino"), "unknown keys in config.json: projector_type"),
        (speculator(markov_rank=256, embedding_scale=2.0), "embedding_scale, markov_rank"),
        (speculator(gru_hidden_dim=1024), "gru_hidden_dim"),
        (speculator(quantization_config={"bits": 8}), "quantization_config"),
        (speculator(transformer_layer_config=None), "transformer_layer_config=None is no object"),
        (layer(dflash_config={}), "stand outside it"),
        (layer(model_type="llama"), "llama"),
        (layer(layer_types=["sliding_attention"] * 5, sliding_window=2048, use_sliding_window=True), "sliding"),
        (layer(attention_bias=True), "attention_bias=True"),
        (layer(is_causal=True), "is_causal=True"),
        (layer(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (layer(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}), "yarn"),
        (layer(rope_parameters={"rope_theta": 1e6, "mrope_section": [1, 2]}), "mrope_section"),
        (layer(rope_theta=10000), r"rope_theta=10000 and rope_theta=1000000\.0"),
        (layer(rope_parameters=None), "lacks rope_theta"),
        (without(DOMINO_SPECULATOR, "sample_from_anchor"), "lacks sample_from_anchor"),
        (without(DOMINO_SPECULATOR, "logits_correction_emb_dim"), "lacks logits_correction_emb_dim"),
        ({"open_spec_config_version": "0.0.0", "speculative_config": {}}, "open_spec_config_version='0.0.0'"),
        ({**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "causal": True}}, "causal"),
        ({**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "use_swa": True}}, "use_swa"),
        ({**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "block_size": 8}}, "block_size is 16.* it is 8"),
        ({**Z_LAB, "partial_rotary_factor": 0.5, "v_head_dim": 128}, "partial_rotary_factor, v_head_dim"),
        ({**Z_LAB, "draft_vocab_size": 32000}, "draft_vocab_size=32000"),
    ],
)
def test_what_we_cannot_honour_is_refused_by_name(config, named):
    with pytest.raises(ValueError, match=named):
        read_foreign(config)


def test_block_size_may_stand_in_either_place():
    inside = {**Z_LAB["dflash_config"], "block_size": 16, "causal": False, "num_anchors": 512, "loss_decay_gamma": 7.0}
    assert read_foreign({**without(Z_LAB, "block_size"), "dflash_config": inside}) == read_foreign(Z_LAB)


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
    for bad in ("{", "[]", "{}", '{"weight_map": []}'):
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


@dataclass(frozen=True)
class Shape:
    """Of a target."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    num_hidden_layers: int = 36


def test_an_unknown_number_of_target_layers_still_has_to_fit():
    config = read_foreign(SPECULATOR)
    config.check_fits(Shape())
    with pytest.raises(ValueError, match=r"target_layer_ids \[1, 9, 17, 25, 33\] need more than the target's 33"):
        config.check_fits(Shape(num_hidden_layers=33))
    assert DrafterConfig.from_dict(config.to_dict()) == config
