"""Drafters of the embedded target that are worth something, in seconds: trained on a few of its own texts."""

from dataclasses import replace
from pathlib import Path

import torch

from domino_core.blocks import pack
from domino_core.checkpoint import save_drafter
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.engine import Engine, Request
from domino_core.target import load_target
from domino_core.target_model import Target
from domino_core.warm_start import warm_start

WARM_LAYERS = (0, 1, 13)


def drafter_config(target: Target, **changes) -> DrafterConfig:
    shape = target.config
    config = DrafterConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=len(WARM_LAYERS),
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        num_target_layers=shape.num_hidden_layers,
        target_layer_ids=(4, 8, 12),
        mask_token_id=shape.vocab_size - 1,
        block_size=5,
        rope_theta=shape.rope_theta,
        max_position_embeddings=shape.max_position_embeddings,
        emb_dim=32,
        gru_hidden_dim=48,
        dtype="float32",
    )
    return replace(config, **changes)


def written_texts(target: Target, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Each prompt with what the target says after it."""
    engine = Engine(target, None, max_rows=8, max_length=max(map(len, prompts)) + length)
    requests = [Request(prompt_ids=tuple(prompt), max_tokens=length) for prompt in prompts]
    return [[*prompt, *done.tokens] for prompt, done in zip(prompts, engine.generate(requests), strict=True)]


def features_of(target: Target, text: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[S, C]"""
    cache = target.new_cache(1, len(text))
    _, features_BTC = target.forward(torch.tensor([text]), torch.zeros(1, dtype=torch.long), cache, layers)
    assert features_BTC is not None
    return features_BTC[0]


def train_drafter(folder: Path, model: Path, texts: list[list[int]], steps: int, **changes) -> Path:
    """Overfit a drafter to these texts, half of the steps under the base loss; saved in the published layout."""
    torch.manual_seed(0)
    target = load_target(model, dtype=torch.float32)
    config = drafter_config(target, **changes)
    drafter = Drafter(config, target.embed_VD, target.lm_head_VD)
    warm_start(drafter, model, WARM_LAYERS)
    with torch.inference_mode():
        features = [features_of(target, text, config.target_layer_ids) for text in texts]
    features_TC = torch.cat([taps_SC.clone() for taps_SC in features])
    ids_T = torch.tensor([token for text in texts for token in text])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        anchors = [torch.randperm(len(text) - 2)[:24].sort().values for text in texts]
        rows = pack(ids_T, torch.ones_like(ids_T), features_TC, [len(text) for text in texts], anchors)
        losses = drafter(rows, 4.0, 1.0 - step / steps if config.head else 1.0)
        losses.objective(losses.weight_sum).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return save_drafter(drafter, folder, {})
