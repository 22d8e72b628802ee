"""A drafter that begins as a few of the target's own layers, instead of at random.

Not part of the published recipe; for runs of few steps (docs/decisions/0006-warm-start.md).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import nn

from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.target import TensorFiles, read_target_config, resolve_model
from domino_core.target_model import TargetConfig

# Of the random share of fc that stays beside the identity, so that the other taps are not silent at the start.
RANDOM_SHARE = 0.25

_NORMED = {f"self_attn.{one}_norm.weight": f"self_attn.{one}_proj.weight" for one in "qk"}


def check_warm_start(config: DrafterConfig, target: TargetConfig, layers: Sequence[int]) -> None:
    """ValueError unless `layers` names one target layer per draft layer and the two have the same shapes."""
    if len(layers) != config.num_hidden_layers or not all(0 <= layer < target.num_hidden_layers for layer in layers):
        raise ValueError(
            f"train.warm_start_layers={tuple(layers)}: name one target layer (0..{target.num_hidden_layers - 1}) "
            f"for each of the drafter's {config.num_hidden_layers} layers, or none for a random start"
        )
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    differ = [
        f"{size} {getattr(config, size)}, not {getattr(target, size)}"
        for size in sizes
        if getattr(config, size) != getattr(target, size)
    ]
    if differ:
        raise ValueError(
            f"train.warm_start_layers={tuple(layers)} needs draft layers shaped as the target's: {'; '.join(differ)}"
        )


@torch.no_grad()
def warm_start(drafter: Drafter, model: str | Path, layers: Sequence[int]) -> None:
    """Copy target layers into the draft layers, one each and in order, and its final norm into the drafter's.

    fc starts as the identity on the deepest tap, hidden_norm as the last copied layer's input norm: context keys and
    values begin as what that layer would make of it. Where the target has no query and key norms, the draft layers'
    begin as the size that its queries and keys have by their weights. The head stays random. ValueError as
    check_warm_start.
    """
    config, backbone = drafter.config, drafter.backbone
    target = read_target_config(model)
    check_warm_start(config, target, layers)
    files = TensorFiles(resolve_model(model))

    def copy(into: nn.Parameter, name: str) -> None:
        into.copy_(files(name, *into.shape))

    for draft_layer, layer in zip(cast(list[nn.Module], backbone.layers), layers, strict=True):
        for name, parameter in draft_layer.named_parameters():
            if target.qk_norm or name not in _NORMED:
                copy(parameter, f"model.layers.{layer}.{name}")
        if not target.qk_norm:
            scale_D = draft_layer.get_parameter("input_layernorm.weight")
            for norm, projection in _NORMED.items():
                columns_ED = draft_layer.get_parameter(projection) * scale_D
                draft_layer.get_parameter(norm).fill_(columns_ED.square().sum(1).mean().sqrt())
    copy(backbone.norm.weight, "model.norm.weight")
    copy(backbone.hidden_norm.weight, f"model.layers.{layers[-1]}.input_layernorm.weight")
    backbone.fc.weight.mul_(RANDOM_SHARE)
    backbone.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size, device=backbone.fc.weight.device)
