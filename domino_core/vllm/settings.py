"""Whether a drafter can draft for the engine that vLLM was asked to be, from vLLM's public configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_core.checkpoint import PROVENANCE, read_config, read_format, read_provenance
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.foreign import PUBLISHED, tensor_name
from domino_core.published_config import HEAD_PROJECTOR_TYPES
from domino_core.target import resolve_model, target_hash

GREEDY_BELOW = 1e-5  # the temperature below which vLLM's samplers are greedy


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """config.TargetShape, from vLLM's configuration."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int


def is_ours(vllm_config: Any) -> bool:
    """Whether a drafter that calls itself DFlash is one that vLLM's own class would misread, or was made here."""
    draft_model = vllm_config.speculative_config.draft_model_config
    dflash: dict[str, Any] = getattr(draft_model.hf_config, "dflash_config", None) or {}
    misread = dflash.get("projector_type") in HEAD_PROJECTOR_TYPES or bool(dflash.get("shift_label"))
    return misread or (Path(draft_model.model) / PROVENANCE).is_file()


def read_drafter(vllm_config: Any) -> DrafterConfig:
    """The configuration of the drafter that vLLM was asked to load.

    ValueError, which says what to change, if it is no drafter, was made for another target, or if the engine is set up
    so that we would compute something else than what was trained, or something that was never tried.
    """
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    folder = resolve_model(speculative.draft_model_config.model)
    config = read_config(folder)
    if read_format(folder) != PUBLISHED:
        raise ValueError(f"{folder} is in the format of speculators; python -m jobs.convert makes it the published one")
    text = model.hf_text_config
    config.check_fits(
        TargetSizes(vocab_size=text.vocab_size, hidden_size=text.hidden_size, num_hidden_layers=text.num_hidden_layers)
    )
    quantized = getattr(model.hf_config, "quantization_config", None) is not None
    made_for = read_provenance(folder).get("target_hash")
    if made_for and not quantized and made_for != (own := target_hash(resolve_model(model.model))):
        raise ValueError(f"drafter {folder} was made for a target with hash {made_for}; {model.model} has {own}")
    problems = setting_problems(config, vllm_config)
    if problems:
        raise ValueError(f"vLLM cannot run the Domino drafter {folder} as it is set up: " + "; ".join(problems))
    return config


def setting_problems(config: DrafterConfig, vllm_config: Any) -> list[str]:
    """What has to be set differently."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    problems: list[str] = []
    if speculative.method != "dflash":
        problems.append(f'"method" is {speculative.method!r}, and "dflash" is how vLLM feeds the tapped layers')
    if not 1 <= speculative.num_speculative_tokens <= config.num_drafts:
        problems.append(
            f'"num_speculative_tokens" is {speculative.num_speculative_tokens}, and blocks of {config.block_size} hold '
            f"1 to {config.num_drafts} drafts (shift_label={config.shift_label})"
        )
    if parallel.pipeline_parallel_size > 1:
        problems.append(f"pipeline_parallel_size={parallel.pipeline_parallel_size} must be 1")
    if speculative.draft_tensor_parallel_size not in (None, parallel.tensor_parallel_size):
        problems.append(
            f'"draft_tensor_parallel_size" is {speculative.draft_tensor_parallel_size}, the target is split over '
            f"{parallel.tensor_parallel_size}: leave it out"
        )
    for name in ("use_local_argmax_reduction", "use_heterogeneous_vocab", "disable_padded_drafter_batch"):
        if getattr(speculative, name, False):
            problems.append(f'"{name}" is not supported: leave it out')
    return problems


def changed_settings(loaded: DrafterConfig, other: DrafterConfig) -> list[str]:
    """What keeps the weights of `other` from an engine that was made for `loaded`."""
    names = [field.name for field in fields(loaded) if field.name not in ("dtype", "initializer_range")]
    return [name for name in names if getattr(loaded, name) != getattr(other, name)]


def tensor_problems(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """What is missing, unknown or misshapen among the tensors of a checkpoint, by their published names."""
    with torch.device("meta"):
        vocabulary = torch.empty(config.vocab_size, config.hidden_size)
        state = Drafter(config, vocabulary, vocabulary).state_dict()
    shapes = {tensor_name(name, PUBLISHED): list(tensor.shape) for name, tensor in state.items()}
    return [
        *(f"{name} is missing" for name in shapes if name not in tensors),
        *(f"{name} is unknown" for name in tensors if name not in shapes),
        *(
            f"{name} is {list(tensor.shape)}, not {shapes[name]}"
            for name, tensor in tensors.items()
            if name in shapes and list(tensor.shape) != shapes[name]
        ),
    ]
