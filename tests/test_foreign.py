"""Configurations of other projects: read as what they mean, or refused with the key named."""

import importlib.util
import json
import runpy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from domino_core.foreign import format_of, read_foreign, to_speculators
from domino_core.published_config import from_published, to_published

# The keys that z-lab's DFlash files have (written by transformers 4.57), with the sizes for Qwen3-8B.
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
# The same drafter with the keys that speculators writes for whole vocabulary and full attention (transformers 5).
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


def without(mapping, *keys):
    return {key: value for key, value in mapping.items() if key not in keys}


def speculator(**changes):
    return {**SPECULATOR, **changes}


def layer(**changes):
    return speculator(transformer_layer_config={**SPECULATOR["transformer_layer_config"], **changes})


def test_the_public_dflash_file_is_read_and_written_back():
    config = read_foreign(Z_LAB)
    assert (config.head, config.shift_label, config.num_drafts) == (False, False, 15)
    assert (config.target_layer_ids, config.mask_token_id) == ((1, 9, 17, 25, 33), 151669)
    differing = {key for key, value in to_published(config).items() if Z_LAB.get(key, value) != value}
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
    assert from_published(to_published(config)) == config
