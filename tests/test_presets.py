"""Presets: they resolve, fit their targets, and carry the published recipe."""

from dataclasses import replace
from pathlib import Path

import pytest

from domino_core.published_config import to_published
from domino_core.target import load_tokenizer, read_target_config
from domino_core.target_model import TargetConfig
from jobs import presets
from jobs.overrides import PRESET_NAMES
from pipelines.prepare import drafter_config

ROOT = Path(__file__).resolve().parent.parent

QWEN3_8B = TargetConfig(
    architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6,
    max_position_embeddings=40960, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_name_is_a_preset(name):
    job = getattr(presets, name)()
    assert isinstance(job, presets.JobConfig)
    assert bool(job.target) is name.startswith("tiny")


def test_published_recipe():
    job = presets.qwen3_8b()
    train = job.train
    assert (train.learning_rate, train.warmup_ratio, train.clip_norm, train.weight_decay) == (6e-4, 0.04, 1.0, 0.0)
    assert (train.num_anchors, train.batch_size, train.epochs, job.capture.max_length) == (256, 2, 3, 3072)
    assert (train.lambda_base_start, train.lambda_base_decay_ratio) == (1.0, 1.0)
    assert train.slot_decay(16) == 7.0
    assert replace(train, gamma=None).slot_decay(8) == 4.0


def test_published_shape_follows_from_the_target():
    config = drafter_config(presets.qwen3_8b().drafter, QWEN3_8B, tokenizer=None)
    published = to_published(config)
    assert published["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert published["dflash_config"]["mask_token_id"] == 151669
    assert (published["hidden_size"], published["intermediate_size"], published["num_hidden_layers"]) == (
        4096,
        12288,
        5,
    )
    assert (config.block_size, config.emb_dim, config.gru_hidden_dim, config.num_drafts) == (16, 256, 1024, 16)
    smaller = replace(QWEN3_8B, hidden_size=2560, intermediate_size=9728)
    assert drafter_config(presets.qwen3_4b().drafter, smaller, tokenizer=None).feature_width == 5 * 2560


def test_tiny_fits_its_target(embedded_target):
    job = presets.tiny()
    assert ROOT / job.target == embedded_target
    assert (ROOT / job.data).is_file()
    assert (ROOT / job.eval_data).is_file()
    target, tokenizer = read_target_config(embedded_target), load_tokenizer(embedded_target)
    config = drafter_config(job.drafter, target, tokenizer)
    config.check_fits(target)
    assert tokenizer.convert_ids_to_tokens(config.mask_token_id) == "<|mask|>"


class Tokenizer(dict):
    get_vocab = dict.copy


def test_mask_token_is_the_first_free_row_or_an_error():
    shape = replace(presets.qwen3_8b().drafter, mask_token_id=None)
    words = Tokenizer({str(i): i for i in range(151669)})
    assert drafter_config(shape, QWEN3_8B, words).mask_token_id == 151669
    with pytest.raises(ValueError, match=r"uses all 151669 embedding rows.*drafter\.mask_token_id="):
        drafter_config(shape, replace(QWEN3_8B, vocab_size=151669), words)
    with pytest.raises(ValueError, match="mask_token_id=151669 has no embedding row"):
        drafter_config(presets.qwen3_8b().drafter, replace(QWEN3_8B, vocab_size=151669), words)


def test_run_names():
    job = replace(presets.qwen3_8b(), target="Qwen/Qwen3-8B")
    assert job.run_name == "qwen3-8b-domino-b16"
    assert replace(job, drafter=replace(job.drafter, head=False)).run_name == "qwen3-8b-dflash-b16"
    assert replace(job, name="mine").run_name == "mine"


@pytest.mark.parametrize("change", [{"name": "../x"}, {"name": "/abs"}, {"name": "a/b"}, {"name": "."}, {"root": ""}])
def test_a_run_cannot_leave_its_root(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}="):
        replace(presets.tiny(), **change)
