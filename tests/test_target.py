"""Our own forward pass against transformers, and the errors of loading."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_core.target import (
    Target,
    load_target,
    load_tokenizer,
    load_vocabulary,
    read_target_config,
    render_chat,
    resolve_model,
    target_hash,
    tokenizer_hash,
)
from domino_core.target_model import random_target

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def reference_model(kind: str, **changes):
    """A random transformers model; norms are random too, so that a wrong or missing one shows."""
    import transformers

    torch.manual_seed(1)
    config_class = getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**SHAPE | changes)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


CASES = {
    "qwen3-tied": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-untied": (
        "Qwen3",
        {"head_dim": 8, "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama3-rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(our target, transformers' model) of each architecture."""
    kind, changes = CASES[request.param]
    model = reference_model(kind, **changes)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return load_target(folder), model


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@torch.inference_mode()
@pytest.mark.parametrize("length", [1, 2, 33])
def test_logits_and_taps_equal_transformers(pair, length):
    target, model = pair
    ids = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(length))
    theirs = model(ids, output_hidden_states=True)
    cache = target.new_cache(2, 40)
    hidden, features = target.forward(ids, torch.zeros(2, dtype=torch.int64), cache, (0, 1))
    assert_same(target.logits(hidden), theirs.logits)
    assert_same(features, torch.cat([theirs.hidden_states[1], theirs.hidden_states[2]], -1))


@torch.inference_mode()
def test_rows_of_different_lengths_go_on_where_they_are_and_overwrite_what_was_rejected(pair):
    target, model = pair
    ids = torch.randint(0, 61, (3, 50), generator=torch.Generator().manual_seed(0))
    wanted = model(ids, output_hidden_states=True)
    cache = target.new_cache(4, 64).view(3)
    lengths = [0, 0, 0]
    # Chunks of one width whose rows keep different numbers of tokens: what is behind a row's length is stale.
    for width, kept in ((7, [7, 2, 5]), (1, [1, 1, 0]), (9, [3, 9, 1]), (12, [12, 12, 12])):
        start = torch.tensor(lengths)
        chunk = torch.stack([row[n : n + width] for row, n in zip(ids, lengths, strict=True)])
        wrong = (torch.arange(width) >= torch.tensor(kept)[:, None]) & (chunk >= 0)
        hidden, features = target.forward(chunk.masked_fill(wrong, 60), start, cache, (0, 2), max(lengths) + width)
        logits = target.logits(hidden)
        for row, (begin, count) in enumerate(zip(lengths, kept, strict=True)):
            assert_same(logits[row, :count], wanted.logits[row, begin : begin + count])
            assert_same(features[row, :count, :32], wanted.hidden_states[1][row, begin : begin + count])
        lengths = [begin + count for begin, count in zip(lengths, kept, strict=True)]


@torch.inference_mode()
def test_bfloat16_stays_close_to_float32(tmp_path):
    reference_model("Qwen3", head_dim=8).save_pretrained(tmp_path)
    ids, start = torch.arange(20)[None], torch.zeros(1, dtype=torch.int64)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        target = load_target(tmp_path, dtype=dtype)
        hidden, _ = target.forward(ids, start, target.new_cache(1, 20))
        assert hidden.dtype == dtype
        results.append(target.logits(hidden).float().log_softmax(-1))
    assert (results[0].exp() * (results[0] - results[1])).sum(-1).abs().mean() < 0.05


def test_sharded_weights_load_alike_and_hash_alike(tmp_path):
    model = reference_model("Qwen3", head_dim=8, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    single, sharded = load_target(tmp_path / "single"), load_target(tmp_path / "sharded")
    assert torch.equal(single.stack.blocks[2].gate_up, sharded.stack.blocks[2].gate_up)
    assert torch.equal(single.lm_head_VD, sharded.lm_head_VD)
    embed_VD, lm_head_VD = load_vocabulary(tmp_path / "sharded")
    assert torch.equal(embed_VD, single.embed_VD)
    assert torch.equal(lm_head_VD, single.lm_head_VD)
    assert target_hash(tmp_path / "single") == target_hash(tmp_path / "sharded")


def test_tied_vocabulary_is_one_tensor(tiny_target_dir):
    embed_VD, lm_head_VD = load_vocabulary(tiny_target_dir)
    assert embed_VD is lm_head_VD
    target = load_target(tiny_target_dir)
    assert target.lm_head_VD is target.embed_VD


def test_hash_changes_with_any_tensor_and_with_what_computes_but_not_with_eos(tiny_target_dir, tmp_path):
    before = target_hash(tiny_target_dir)
    shutil.copytree(tiny_target_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 3, "transformers_version": "0"}))
    assert target_hash(tmp_path) == before
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert target_hash(tmp_path) != before
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.2.mlp.down_proj.weight"):
        save_file(weights | {name: weights[name] * 1.001}, tmp_path / "model.safetensors", {"format": "pt"})
        assert target_hash(tmp_path) != before


def test_config_reads_both_spellings_of_rope_and_every_end_token(tiny_target_dir, tmp_path):
    raw = json.loads((tiny_target_dir / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    old = raw | {
        "rope_theta": rope["rope_theta"] + 1,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "eos_token_id": 4,
    }
    old.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(old))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    config = read_target_config(tmp_path)
    assert config.rope_theta == rope["rope_theta"] + 1
    assert config.eos_token_ids == (9, 4)
    assert config.dtype == "float16"
    assert read_target_config(tiny_target_dir).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(tiny_target_dir, tmp_path, change, named):
    raw = json.loads((tiny_target_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=named):
        read_target_config(tmp_path)


def test_missing_models_and_files_are_named_with_a_remedy(tiny_target_dir, tmp_path):
    with pytest.raises(ValueError, match=r"/no/such/folder does not exist"):
        resolve_model("/no/such/folder")
    with pytest.raises(ValueError, match=r"Nobody/Nothing-1B is neither.*hf download Nobody/Nothing-1B"):
        resolve_model("Nobody/Nothing-1B")  # conftest.py keeps the Hub offline
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_model(tmp_path)
    shutil.copy(tiny_target_dir / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_target(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"lacks the tensor model\.layers\.1\.mlp\.up_proj"),
        (lambda w: w.update({"model.norm.weight": torch.ones(7)}), r"model\.norm\.weight has shape \(7,\)"),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}), r"does not use.*q_proj\.bias"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_named(tiny_target_dir, tmp_path, change, message):
    shutil.copy(tiny_target_dir / "config.json", tmp_path)
    weights = load_file(tiny_target_dir / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path)


def test_random_target_has_the_asked_shape(tiny_target_dir):
    config = read_target_config(tiny_target_dir)
    target = random_target(config, dtype=torch.bfloat16)
    assert isinstance(target, Target)
    assert target.stack.blocks[0].qkv.shape == (48, (4 + 2 * 2) * 12)
    assert target.embed_VD.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A real fast tokenizer of single bytes, its template like Qwen3's (an empty think block if thinking is off)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<|im_start|>", "<|im_end|>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return load_tokenizer(folder)


def test_chat_is_rendered_as_ids_up_to_the_answer(tokenizer):
    ids = render_chat(tokenizer, [{"role": "user", "content": "hé"}])
    assert all(isinstance(token, int) for token in ids)
    opening = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == opening + "<think>\n\n</think>\n\n"
    thinking = render_chat(tokenizer, [{"role": "user", "content": "hé"}], enable_thinking=True)
    assert tokenizer.decode(thinking) == opening


def test_tokenizer_hash_follows_template_and_vocabulary(tokenizer):
    before = tokenizer_hash(tokenizer)
    template = tokenizer.chat_template
    tokenizer.chat_template = template + " "
    assert tokenizer_hash(tokenizer) != before
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        render_chat(tokenizer, [])
    tokenizer.chat_template = template
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["word"])
    assert tokenizer_hash(tokenizer) != before


def test_a_cache_keeps_the_rotary_table_that_it_was_made_with(tiny_target_dir):
    """A CUDA graph holds its address; a longer cache of another engine brings a longer table."""
    target = load_target(tiny_target_dir)
    short = target.new_cache(1, 8)
    table = short.rotary
    longer = target.new_cache(2, 40)
    assert short.rotary is table is short.row(0).rotary is short.view(1).rotary
    assert table is not None
    assert table.shape[1] == 8
    assert longer.rotary is not None
    assert longer.rotary.shape[1] == 40
    assert torch.equal(longer.rotary[:, :8], table)
