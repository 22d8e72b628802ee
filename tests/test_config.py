"""The published config.json is read strictly and written back unchanged."""

import json
from dataclasses import dataclass, replace

import pytest

from domino_core.config import default_target_layer_ids
from domino_core.published_config import from_published, to_published

PUBLISHED_8B = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 36,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
    "emb_dim": 256,
    "dflash_config": {
        "projector_type": "domino",
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
    },
}


@dataclass(frozen=True)
class Target:
    vocab_size: int = 151936
    hidden_size: int = 4096
    num_hidden_layers: int = 36


def published(**changes):
    return {**PUBLISHED_8B, **changes}


def dflash(**changes):
    section = {**PUBLISHED_8B["dflash_config"], **changes}
    return published(dflash_config={key: value for key, value in section.items() if value is not ...})


def test_published_8b_config_is_read():
    config = from_published(PUBLISHED_8B)
    assert config.target_layer_ids == default_target_layer_ids(36, 5)
    assert (config.num_drafts, config.feature_width, config.first_corrected_slot) == (16, 5 * 4096, 1)
    assert config.head
    assert config.rope_theta == 1e6


def test_written_config_reads_as_the_same(reference_dir):
    for folder in sorted(reference_dir.glob("draft_*")):
        config = from_published(json.loads((folder / "config.json").read_text()))
        assert from_published(json.loads(json.dumps(to_published(config)))) == config


def test_written_config_has_every_published_key_with_its_value(reference_dir):
    written = json.loads((reference_dir / "draft_shift1_p1" / "config.json").read_text())
    ours = to_published(from_published(written))
    differing = {key: value for key, value in written.items() if ours.get(key) != value}
    assert set(differing) <= {"max_window_layers"}  # says nothing without sliding windows
    assert ours["emb_dim"] == ours["dflash_config"]["emb_dim"]


@pytest.mark.parametrize("shift_label", [True, False])
def test_plain_dflash_round_trip(shift_label):
    config = replace(from_published(PUBLISHED_8B), head=False, shift_label=shift_label)
    written = to_published(config)
    assert "projector_type" not in written["dflash_config"]
    assert "emb_dim" not in written
    assert written["architectures"] == ["DFlashDraftModel"]
    again = from_published(written)
    assert not again.head
    assert again.shift_label == shift_label


def test_label_conventions():
    shifted = from_published(dflash(pure_draft_prefix_len=2))
    unshifted = replace(shifted, shift_label=False)
    assert (shifted.num_drafts, shifted.label_offset, shifted.first_predicting_slot) == (16, 1, 0)
    assert (unshifted.num_drafts, unshifted.label_offset, unshifted.first_predicting_slot) == (15, 0, 1)
    assert (shifted.first_corrected_slot, unshifted.first_corrected_slot) == (2, 3)
    assert not from_published(dflash(shift_label=...)).shift_label  # from before the option existed


def test_legacy_projector_name():
    assert from_published(dflash(projector_type="causal_v5")).head


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (dflash(markov_rank=4), "markov_rank"),
        (dflash(projector_type="dspark"), "dspark"),
        (dflash(gru_hidden_dim=...), "gru_hidden_dim"),
        (dflash(pure_draft_prefix_len=...), "pure_draft_prefix_len"),
        (dflash(mask_token_id=...), "mask_token_id"),
        (dflash(mask_token_id=151936), "embedding row"),
        (dflash(target_layer_ids=[9, 1]), "ascend"),
        (dflash(target_layer_ids=[1, 36]), "0..35"),
        (dflash(pure_draft_prefix_len=16), "pure_draft_prefix_len=16"),
        (published(rope_scaling={"type": "yarn"}), "rope_scaling"),
        (published(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}), "yarn"),
        (published(sliding_window=1024), "sliding_window"),
        (published(layer_types=["sliding_attention"] * 5), "layer_types"),
        (published(attention_bias=True), "attention_bias"),
        (published(num_key_value_heads=5), "num_key_value_heads=5"),
        (published(block_size=0), "block_size=0"),
        (published(dtype="int8"), "int8"),
        (published(model_type="llama"), "llama"),
        ({key: value for key, value in PUBLISHED_8B.items() if key != "num_target_layers"}, "num_target_layers"),
        ({key: value for key, value in PUBLISHED_8B.items() if key != "dflash_config"}, "dflash_config"),
    ],
)
def test_what_we_cannot_honour_is_refused_by_name(config, named):
    with pytest.raises(ValueError, match=named):
        from_published(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (published(vocab_size="151936"), "vocab_size='151936' must be a whole number"),
        (published(block_size=4.5), "block_size=4.5 must be a whole number"),
        (published(head_dim=True), "head_dim=True must be a whole number"),
        (published(rope_theta=float("nan")), "rope_theta=nan must be a finite number"),
        (published(rope_parameters="x"), "rope_parameters"),
        (published(dflash_config=[1]), "dflash_config="),
        (dflash(target_layer_ids=5), "list of target_layer_ids"),
        (dflash(target_layer_ids=["a"]), "must be whole numbers"),
        (dflash(shift_label="false"), "shift_label='false' must be true or false"),
    ],
)
def test_wrong_types_are_named(config, named):
    with pytest.raises(ValueError, match=named):
        from_published(config)


def test_newer_rope_key():
    config = published(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    del config["rope_theta"]
    assert from_published(config).rope_theta == 5e5


def test_fit_to_target_names_every_difference():
    config = from_published(PUBLISHED_8B)
    config.check_fits(Target())
    problems = " ".join(config.fit_problems(Target(vocab_size=100, hidden_size=8, num_hidden_layers=4)))
    for named in ("vocab_size", "hidden_size", "num_target_layers", "mask_token_id"):
        assert named in problems
    with pytest.raises(ValueError, match="hidden_size is 4096 in the drafter, 2560 in the target"):
        config.check_fits(Target(hidden_size=2560))


def test_default_layers_are_the_published_ones():
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_target_layer_ids(28, 5) == (1, 7, 13, 19, 25)
    assert default_target_layer_ids(30, 4) == (1, 10, 18, 27)
    assert default_target_layer_ids(36, 1) == (18,)
    with pytest.raises(ValueError, match="target_layer_ids"):
        default_target_layer_ids(6, 5)
