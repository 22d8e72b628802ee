"""Checkpoints of other projects: what their config.json and tensor names mean in ours, and ours in theirs.

published     dflash_config in config.json (Domino's release, z-lab's DFlash, SpecForge; read by SGLang)
speculators   speculators_model_type in config.json, the decoder's part under transformer_layer_config

docs/formats.md has the mapping and where each format was read. What cannot be honoured exactly is a ValueError that
names the key or the tensor; weights that are pickles are never opened.

D hidden · V vocabulary
"""

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from domino_core.config import DrafterConfig
from domino_core.json_files import read_object
from domino_core.published_config import from_published, refuse_unknown, to_published

PUBLISHED, SPECULATORS = "published", "speculators"
FORMATS = (PUBLISHED, SPECULATORS)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# What each tensor of the head is called: published name with this before it.
HEAD_TENSORS = ("prefix_gru.", "embed_proj.")
HEAD_PREFIX = {PUBLISHED: "", SPECULATORS: "logits_correction."}
LEGACY_HEAD_PREFIX = "logit_head."
# Tensors that repeat the target's, as speculators writes them for full-vocabulary drafters.
SHARED = ("embed_tokens.weight", "lm_head.weight")
WHY_REFUSED = {
    "d2t": "drafts in a vocabulary of its own are not supported",
    "t2d": "drafts in a vocabulary of its own are not supported",
    "verifier_norm.weight": "the target's, used in training alone; save the checkpoint without it",
    "verifier_lm_head.weight": "the target's, used in training alone; save the checkpoint without it",
    "mask_embedding": "mask slots are embedded with the target's own row of mask_token_id",
}

SPECULATORS_KEYS = (
    {"speculators_model_type", "transformer_layer_config", "draft_vocab_size", "block_size"}
    | {"aux_hidden_state_layer_ids", "mask_token_id", "sample_from_anchor", "target_hidden_size"}
    | {"dtype", "torch_dtype", "num_target_layers"}
)
DOMINO_KEYS = {"gru_hidden_dim", "logits_correction_emb_dim", "pure_draft_prefix_len"}
# Bookkeeping, training settings, and the mask inside a block of sliding-window layers, of which we accept none.
SPECULATORS_NEUTRAL = (
    {"architectures", "auto_map", "speculators_version", "speculators_config", "transformers_version"}
    | {"tie_word_embeddings", "max_anchors", "embed_requires_grad", "has_no_defaults_at_init"}
    | {"return_dict", "sliding_window_non_causal", "lambda_base_start", "lambda_base_decay_ratio"}
)


def format_of(raw: Mapping[str, Any]) -> str:
    """Which of FORMATS a config.json is; ValueError, naming the key that says so, for the formats that are not read."""
    if "speculators_model_type" in raw:
        return SPECULATORS
    if "open_spec_config_version" in raw:
        raise ValueError(
            f"config.json: open_spec_config_version={raw['open_spec_config_version']!r} is not read; "
            "save the drafter with a version of speculators that writes speculators_model_type"
        )
    return PUBLISHED


def read_foreign(raw: Mapping[str, Any]) -> DrafterConfig:
    """The configuration that a config.json of any of FORMATS means. ValueError as from_published."""
    return from_published(_from_speculators(raw) if format_of(raw) == SPECULATORS else raw)


def tensor_name(own_name: str, layout: str) -> str:
    """What a tensor of our state dict is called in a file: backbone.fc.weight is fc.weight, in every format."""
    name = own_name.split(".", 1)[1]
    return (HEAD_PREFIX[layout] if name.startswith(HEAD_TENSORS) else "") + name


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: model.safetensors, or the index and the shards that it names.

    ValueError for a folder that holds pickles alone, for files that are missing, and for an embedding of the mask slots
    beside the weights, which engines that know it would use.
    """
    for file in sorted(folder.glob("mask_embedding.*")):
        raise ValueError(f"{file} is not supported: {WHY_REFUSED['mask_embedding']}")
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        shards = sorted(set(read_index(folder / INDEX).values()))
        for shard in shards:
            if not (folder / shard).is_file():
                raise ValueError(f"{folder / shard} does not exist, and {INDEX} names it: the download is incomplete")
        return [folder / INDEX, *(folder / shard for shard in shards)]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} holds {', '.join(pickles[:3])} and no {WEIGHTS}: pickles can run code and are not read; "
            "convert them to safetensors where you trust them"
        )
    raise ValueError(f"{folder / WEIGHTS} does not exist; a drafter is a folder with config.json and {WEIGHTS}")


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name, as model.safetensors.index.json says. The files are beside it, by their bare names."""
    files: Any = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path} is damaged: its weight_map is no object with tensors in it")
    for name, file in files.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise ValueError(f"{path}: {name} lies in {file!r}, which is no safetensors file beside the index")
    return files


def repeats_target(folder: Path) -> bool:
    """Whether the weights hold tensors of the target; reads names alone."""
    names: set[str] = set()
    for path in weight_files(folder):
        if path.name != INDEX:
            with open_weights(path) as file:
                names |= set(file.keys())
    return bool(names & set(SHARED))


@contextlib.contextmanager
def open_weights(path: Path) -> Generator[Any]:
    """A safetensors file; ValueError, which names it, if it is damaged."""
    try:  # a truncated download is the user's to repair, and the library's message does not say which file it is
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def why_refused(name: str) -> str:
    """What to add to "is unknown" for tensors that other projects' files are known to hold."""
    return f" ({WHY_REFUSED[name]})" if name in WHY_REFUSED else ""


def shared_problems(tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor] | None) -> list[str]:
    """Why tensors that repeat the target's cannot be left to the target; empty if they are the same, value by value.

    shared: the target's, [V, D] each, by the names in SHARED; None if no target is at hand. Compared as stored.
    """
    problems: list[str] = []
    for name in SHARED:
        stored = tensors.get(name)
        if stored is None:
            continue
        if shared is None:
            problems.append(f"{name} repeats the target's, or is the drafter's own: name the target to compare it with")
        elif stored.shape != shared[name].shape or not torch.equal(stored, shared[name].to("cpu", stored.dtype)):
            problems.append(f"{name} is not the target's: drafters with one of their own are not supported")
    return problems


def _from_speculators(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators config.json as a published one."""
    kind, where = raw["speculators_model_type"], "config.json"
    if kind not in ("dflash", "domino"):
        raise ValueError(f"{where}: speculators_model_type {kind!r} is not one of dflash, domino")
    head = kind == "domino"
    refuse_unknown(raw, SPECULATORS_KEYS | SPECULATORS_NEUTRAL | (DOMINO_KEYS if head else set()), where)
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{where}: transformer_layer_config={layer!r:.80} is no object")
    if "dflash_config" in layer or "block_size" in layer:
        raise ValueError(f"{where}: transformer_layer_config holds dflash_config or block_size, which stand outside it")
    vocab_size, draft_vocab_size = layer.get("vocab_size"), raw.get("draft_vocab_size")
    if draft_vocab_size != vocab_size:
        raise ValueError(
            f"{where}: draft_vocab_size={draft_vocab_size!r} of vocab_size={vocab_size!r}: drafts in a vocabulary of "
            "its own (d2t, t2d) are not supported; train with the target's whole vocabulary"
        )
    needed = ["aux_hidden_state_layer_ids", "mask_token_id", "block_size", *(sorted(DOMINO_KEYS) if head else ())]
    # Left out, it is false for dflash and true for domino, where nobody's memory should decide it.
    needed += ["sample_from_anchor"] if head else []
    for key in needed:
        if raw.get(key) is None:
            raise ValueError(f"{where} lacks {key}")
    dflash = {
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": _block_outputs(raw["aux_hidden_state_layer_ids"]),
        "shift_label": raw.get("sample_from_anchor", False),
    }
    if head:
        dflash |= {
            "projector_type": "domino",
            "gru_hidden_dim": raw["gru_hidden_dim"],
            "emb_dim": raw["logits_correction_emb_dim"],
            "pure_draft_prefix_len": raw["pure_draft_prefix_len"],
        }
    return {
        **layer,
        "block_size": raw["block_size"],
        "target_hidden_size": raw.get("target_hidden_size"),
        "num_target_layers": raw.get("num_target_layers"),
        "dtype": raw.get("dtype") or raw.get("torch_dtype") or layer.get("dtype") or layer.get("torch_dtype"),
        "dflash_config": dflash,
    }


def _block_outputs(layer_ids: Any) -> list[int]:
    """aux_hidden_state_layer_ids to target_layer_ids: the value that enters layer i is the output of block i - 1."""
    if not isinstance(layer_ids, list) or not all(type(layer) is int for layer in layer_ids):
        raise ValueError(f"config.json: aux_hidden_state_layer_ids={layer_ids!r} is no list of whole numbers")
    if any(layer < 1 for layer in layer_ids):
        raise ValueError(
            f"config.json: aux_hidden_state_layer_ids={layer_ids}: 0 is the output of the target's embedding, and "
            "only outputs of its blocks, 1 and up, can be tapped"
        )
    return [layer - 1 for layer in layer_ids]


def to_speculators(config: DrafterConfig, verifier: str | None, architectures: list[str]) -> dict[str, Any]:
    """The config.json that speculators and vLLM read. ValueError for what it cannot say.

    verifier: the target's name, by which `vllm serve` finds it; architectures: the target's.
    """
    last = (config.num_target_layers or 0) - 1
    if last in config.target_layer_ids:
        raise ValueError(
            f"target_layer_ids={list(config.target_layer_ids)}: the output of the target's last block, {last}, has no "
            "aux_hidden_state_layer_ids in speculators, which keeps it for itself"
        )
    layer = to_published(config)
    for key in ("architectures", "auto_map", "block_size", "num_target_layers", "emb_dim", "dflash_config"):
        layer.pop(key, None)
    kind = "domino" if config.head else "dflash"
    head = {
        "gru_hidden_dim": config.gru_hidden_dim,
        "logits_correction_emb_dim": config.emb_dim,
        "pure_draft_prefix_len": config.pure_draft_prefix_len,
    }
    return {
        "architectures": ["DominoDraftModel" if config.head else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.shift_label,
        # About sliding-window layers, and we have none; but vLLM takes false for "every layer is causal".
        "sliding_window_non_causal": True,
        **(head if config.head else {}),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_drafts}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        "num_target_layers": config.num_target_layers,  # ours: without it the way back would lose it
    }
