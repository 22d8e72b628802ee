"""A warm start copies what it says, and refuses what it cannot copy."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.target import load_vocabulary, read_target_config
from domino_core.warm_start import RANDOM_SHARE, warm_start


def drafter_for(folder: Path, **changes) -> Drafter:
    target = read_target_config(folder)
    config = DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=(0, 2),
        mask_token_id=96,
        block_size=4,
        emb_dim=8,
        gru_hidden_dim=8,
    )
    torch.manual_seed(0)
    return Drafter(replace(config, **changes), *load_vocabulary(folder))


def test_layers_norms_and_identity(tiny_target_dir):
    drafter, random = drafter_for(tiny_target_dir), drafter_for(tiny_target_dir)
    warm_start(drafter, tiny_target_dir, (0, 3))
    weights = load_file(tiny_target_dir / "model.safetensors")
    for index, layer in enumerate((0, 3)):
        for name, parameter in drafter.backbone.layers[index].named_parameters():
            assert torch.equal(parameter, weights[f"model.layers.{layer}.{name}"]), name
    assert torch.equal(drafter.backbone.norm.weight, weights["model.norm.weight"])
    assert torch.equal(drafter.backbone.hidden_norm.weight, weights["model.layers.3.input_layernorm.weight"])
    size = drafter.config.hidden_size
    expected = random.backbone.fc.weight * RANDOM_SHARE
    assert torch.equal(drafter.backbone.fc.weight[:, :size], expected[:, :size])
    assert torch.allclose(drafter.backbone.fc.weight[:, size:], expected[:, size:] + torch.eye(size))
    assert drafter.head is not None
    assert random.head is not None
    for ours, theirs in zip(drafter.head.parameters(), random.head.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layers", [(0,), (0, 1, 2), (0, 4), (-1, 0)])
def test_refuses_other_layers(tiny_target_dir, layers):
    with pytest.raises(ValueError, match=r"warm_start_layers=.*0\.\.3.*2 layers"):
        warm_start(drafter_for(tiny_target_dir), tiny_target_dir, layers)


def test_refuses_other_sizes(tiny_target_dir):
    with pytest.raises(ValueError, match="intermediate_size 32, not 96"):
        warm_start(drafter_for(tiny_target_dir, intermediate_size=32), tiny_target_dir, (0, 3))


def test_a_target_without_query_and_key_norms_gives_their_size(tmp_path):
    """A Llama: random queries of unit inputs are as large as the norms then make them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    drafter = drafter_for(tmp_path)
    warm_start(drafter, tmp_path, (0, 2))
    for layer, source in zip(cast(list[Any], list(drafter.backbone.layers)), (0, 2), strict=True):
        theirs = cast(Any, model.model.layers[source].self_attn)
        for norm, ours, original in (
            (layer.self_attn.q_norm, layer.self_attn.q_proj, theirs.q_proj),
            (layer.self_attn.k_norm, layer.self_attn.k_proj, theirs.k_proj),
        ):
            assert torch.equal(ours.weight, original.weight)
            projected = original(torch.randn(2000, 64)).unflatten(-1, (-1, 16))
            torch.testing.assert_close(
                norm(projected).norm(dim=-1).mean(), projected.norm(dim=-1).mean(), rtol=0.1, atol=0
            )
