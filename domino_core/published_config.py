"""The published config.json of a drafter: read strictly, written back in the same layout."""

from collections.abc import Collection, Mapping
from typing import Any

from domino_core.config import HEAD_SIZES, SIZES, DrafterConfig
from domino_core.json_files import is_kind

HEAD_PROJECTOR_TYPES = ("domino", "causal_v5")  # causal_v5: the name from before the release
DFLASH_KEYS = (
    {"projector_type", "mask_token_id", "target_layer_ids", "shift_label", "block_size", *HEAD_SIZES}
    | {"causal", "num_anchors", "loss_decay_gamma"}  # the last two: how it was trained
)
# The keys of config.json that are read, or refused by their value; and those that change nothing that is computed.
READ_KEYS = (
    {*SIZES, "num_target_layers", "block_size", "emb_dim", "dflash_config", "rms_norm_eps", "model_type"}
    | {"rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "initializer_range"}
    | {"layer_types", "use_sliding_window", "sliding_window", "is_causal", "hidden_act", "attention_bias"}
    | {"attention_dropout", "draft_vocab_size", "target_hidden_size", "dtype", "torch_dtype"}
)
NEUTRAL_KEYS = (
    {"architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "max_window_layers"}
    | {"_attn_implementation", "return_dict", "num_anchors"}
)


def from_published(published: Mapping[str, Any]) -> DrafterConfig:
    """Read a published config.json. What we do not know, or would compute differently, is an error naming it.

    num_target_layers: null, which no published file says, means that it is unknown.
    """
    where, section = "config.json", "config.json: dflash_config"
    dflash = _required(published, "dflash_config", where)
    layers = dflash.get("target_layer_ids") if isinstance(dflash, dict) else None
    if not isinstance(dflash, dict) or not isinstance(layers, list | None):
        raise ValueError(f"{section}={dflash!r:.80} is no object with a list of target_layer_ids")
    refuse_unknown(published, READ_KEYS | NEUTRAL_KEYS, where)
    refuse_unknown(dflash, DFLASH_KEYS, section)
    projector = dflash.get("projector_type") or "dflash"
    if projector not in (*HEAD_PROJECTOR_TYPES, "dflash"):
        raise ValueError(f"{where}: projector_type {projector!r} is not one of domino, causal_v5, dflash")
    if published.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"{where}: model_type {published['model_type']!r}; only qwen3 drafters are known")
    _refuse_variants(published)
    head = projector in HEAD_PROJECTOR_TYPES
    # Files differ in where they put these two.
    block_size, emb_dim = (_agreed(key, published, dflash) for key in ("block_size", "emb_dim"))
    head_fields: dict[str, Any] = {}
    if head:
        head_fields = {name: _required({**dflash, "emb_dim": emb_dim}, name, section) for name in HEAD_SIZES}
    if "num_target_layers" not in published:
        raise ValueError(f"{where} lacks num_target_layers")
    names = (*SIZES, "block_size", "rms_norm_eps", "max_position_embeddings")
    return DrafterConfig(
        **{name: _required({**published, "block_size": block_size}, name, where) for name in names},
        **head_fields,
        head=head,
        num_target_layers=published["num_target_layers"],
        rope_theta=_rope_theta(published),
        target_layer_ids=tuple(_required(dflash, "target_layer_ids", section)),
        mask_token_id=_required(dflash, "mask_token_id", section),
        # Configurations from before the option existed are unshifted.
        shift_label=dflash.get("shift_label", False),
        initializer_range=published.get("initializer_range", 0.02),
        dtype=published.get("dtype") or published.get("torch_dtype") or "bfloat16",
    )


def to_published(config: DrafterConfig) -> dict[str, Any]:
    """The published config.json."""
    dflash: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if config.head:
        dflash |= {
            "projector_type": "domino",
            "shift_label": config.shift_label,
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
            "emb_dim": config.emb_dim,
            "gru_hidden_dim": config.gru_hidden_dim,
        }
    elif config.shift_label:
        dflash["shift_label"] = True  # public DFlash drafters are unshifted and do not have the key
    module, name = ("domino", "DominoDraftModel") if config.head else ("dflash", "DFlashDraftModel")
    return {
        "architectures": [name],
        "auto_map": {"AutoModel": f"{module}.{name}"},
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "tie_word_embeddings": False,
        "initializer_range": config.initializer_range,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": config.dtype,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        **({"emb_dim": config.emb_dim} if config.head else {}),  # some engines read this copy
        "dflash_config": dflash,
    }


def _required(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    if mapping.get(key) is None:
        raise ValueError(f"{where} lacks {key}")
    return mapping[key]


def refuse_unknown(mapping: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """ValueError naming the keys that may mean something which we would not compute. null means: not used."""
    unknown = sorted(key for key, value in mapping.items() if key not in known and value is not None)
    if unknown:
        raise ValueError(f"unknown keys in {where}: {', '.join(unknown)}; remove those that change nothing in a draft")


def _agreed(key: str, published: Mapping[str, Any], dflash: Mapping[str, Any]) -> Any:
    """The value of a key that stands at the top, in dflash_config, or in both; ValueError if those differ."""
    values = [place[key] for place in (published, dflash) if place.get(key) is not None]
    if values and values[0] != values[-1]:
        raise ValueError(f"config.json: {key} is {values[0]!r}, in dflash_config it is {values[-1]!r}")
    return values[0] if values else None


def _refuse_variants(published: Mapping[str, Any]) -> None:
    """ValueError for what a config.json may ask of a drafter and ours does not compute."""
    refused = {
        "use_sliding_window": bool(published.get("use_sliding_window")),
        "sliding_window": published.get("sliding_window") is not None,
        "layer_types": not only_full_attention(published.get("layer_types")),
        "is_causal": bool(published.get("is_causal")),
        "attention_bias": bool(published.get("attention_bias")),
        "attention_dropout": bool(published.get("attention_dropout")),
        "hidden_act": published.get("hidden_act", "silu") != "silu",
        "target_hidden_size": published.get("target_hidden_size") not in (None, published.get("hidden_size")),
        # Drafts in a vocabulary of their own, which d2t and t2d map to the target's.
        "draft_vocab_size": published.get("draft_vocab_size") not in (None, published.get("vocab_size")),
        "dflash_config": bool(published["dflash_config"].get("causal")),
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"config.json: {key}={published[key]!r} is not supported")


def only_full_attention(layer_types: Any) -> bool:
    """Whether a config.json's layer_types, if it has any, ask for nothing else."""
    return not layer_types or (isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types))


def _rope_theta(published: Mapping[str, Any]) -> float:
    """Theta of plain rotary embedding: rope_theta, or where newer transformers versions put it, rope_parameters."""
    found = [published.get("rope_theta")]
    for key in ("rope_scaling", "rope_parameters"):
        rope = published.get(key) or {}
        plain = isinstance(rope, dict) and not set(rope) - {"rope_type", "type", "rope_theta"}
        if not plain or any(rope.get(name, "default") != "default" for name in ("rope_type", "type")):
            raise ValueError(f"config.json: {key}={rope!r} is not supported")
        found.append(rope.get("rope_theta"))
    thetas = [theta for theta in found if theta is not None]
    if not thetas:
        raise ValueError("config.json lacks rope_theta")
    for theta in thetas:
        if not is_kind(float, theta):
            raise ValueError(f"config.json: rope_theta={theta!r} must be a finite number")
        if theta != thetas[0]:
            raise ValueError(f"config.json says rope_theta={thetas[0]} and rope_theta={theta}")
    return float(thetas[0])
