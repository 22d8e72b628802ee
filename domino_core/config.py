"""The published config.json of a drafter as one frozen dataclass: read strictly, written back in the same layout."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

HEAD_PROJECTOR_TYPES = ("domino", "causal_v5")  # causal_v5: the name from before the release
DFLASH_KEYS = {
    "projector_type",
    "mask_token_id",
    "target_layer_ids",
    "shift_label",
    "pure_draft_prefix_len",
    "emb_dim",
    "gru_hidden_dim",
}
DTYPES = ("bfloat16", "float16", "float32")


class TargetShape(Protocol):
    """What a drafter has to know of its target (domino_core/target.py's TargetConfig has it)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape and label convention of a drafter.

    The two conventions differ in what a slot j of a block with anchor position a predicts (x is the text):
    shift_label true: x[a+j+1], every slot is used; false: x[a+j], slot 0 (the anchor itself) predicts nothing.
    Counted over the predicting slots alone they coincide: draft i is x[a+1+i], i = 0..num_drafts-1. That is why nothing
    behind the backbone needs to know the convention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    head: bool = True  # False: a plain DFlash drafter
    emb_dim: int = 256  # R, rank of the correction
    gru_hidden_dim: int = 1024  # G
    pure_draft_prefix_len: int = 1  # p, drafts that come from the base logits alone
    shift_label: bool = True
    initializer_range: float = 0.02
    dtype: str = "bfloat16"  # of the stored weights

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        problems = self._type_problems() or self._problems()
        if problems:
            raise ValueError("Impossible drafter configuration: " + "; ".join(problems))

    def _type_problems(self) -> list[str]:
        """A config.json can hold anything; types first, or the comparisons in `_problems` would raise their own."""
        wanted = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
        problems = [
            f"{field.name}={value!r} must be {wanted[field.type]}"
            for field in fields(self)
            if field.type in wanted and not _is(field.type, value := getattr(self, field.name))
        ]
        if not all(_is(int, layer) for layer in self.target_layer_ids):
            problems.append(f"target_layer_ids={list(self.target_layer_ids)} must be whole numbers")
        return problems

    def _problems(self) -> list[str]:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes += ("num_key_value_heads", "head_dim", "num_target_layers", "emb_dim", "gru_hidden_dim")
        problems = [f"{name}={getattr(self, name)} must be at least 1" for name in sizes if getattr(self, name) < 1]
        if self.num_key_value_heads > 0 and self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} must be even (rotary embedding)")
        layers = self.target_layer_ids
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or not 0 <= layers[0] <= layers[-1] < self.num_target_layers
        ):
            problems.append(
                f"target_layer_ids={list(layers)} must ascend and lie in 0..{self.num_target_layers - 1} "
                f"(num_target_layers={self.num_target_layers})"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(
                f"mask_token_id={self.mask_token_id} has no embedding row (vocab_size={self.vocab_size}); "
                "choose an unused id below that"
            )
        if self.num_drafts < 1:
            problems.append(
                f"block_size={self.block_size} leaves no slot that predicts (shift_label={self.shift_label})"
            )
        elif self.head and not 0 <= self.pure_draft_prefix_len < self.num_drafts:
            problems.append(
                f"pure_draft_prefix_len={self.pure_draft_prefix_len} must lie in 0..{self.num_drafts - 1}, "
                f"or the head corrects nothing (block_size={self.block_size}, shift_label={self.shift_label})"
            )
        if self.dtype not in DTYPES:
            problems.append(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        return problems

    @property
    def num_drafts(self) -> int:
        """Q: tokens drafted per block."""
        return self.block_size - self.first_predicting_slot

    @property
    def label_offset(self) -> int:
        """Slot j of the block with anchor position a predicts position a + j + label_offset."""
        return 1 if self.shift_label else 0

    @property
    def first_predicting_slot(self) -> int:
        return 0 if self.shift_label else 1

    @property
    def first_corrected_slot(self) -> int:
        return self.first_predicting_slot + self.pure_draft_prefix_len

    @property
    def feature_width(self) -> int:
        """C: width of the concatenated features of the tapped layers."""
        return len(self.target_layer_ids) * self.hidden_size

    def fit_problems(self, target: TargetShape) -> list[str]:
        """Why this drafter cannot draft for the target; empty if it can."""
        pairs = (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_hidden_layers),
        )
        problems = [f"{name} is {own} in the drafter, {its} in the target" for name, own, its in pairs if own != its]
        if self.mask_token_id >= target.vocab_size:
            problems.append(
                f"mask_token_id {self.mask_token_id} has no row among the target's {target.vocab_size} embeddings"
            )
        return problems

    def check_fits(self, target: TargetShape) -> None:
        problems = self.fit_problems(target)
        if problems:
            raise ValueError("The drafter does not fit the target: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, published: Mapping[str, Any]) -> "DrafterConfig":
        """Read a published config.json. What we do not know, or would compute differently, is an error naming it."""
        dflash = _required(published, "dflash_config", "config.json")
        layers = dflash.get("target_layer_ids") if isinstance(dflash, dict) else None
        if not isinstance(dflash, dict) or not isinstance(layers, list | None):
            raise ValueError(f"config.json: dflash_config={dflash!r:.80} is no object with a list of target_layer_ids")
        unknown = sorted(set(dflash) - DFLASH_KEYS)
        if unknown:
            raise ValueError(f"config.json: unknown keys in dflash_config: {', '.join(unknown)}")
        projector = dflash.get("projector_type") or "dflash"
        if projector not in (*HEAD_PROJECTOR_TYPES, "dflash"):
            raise ValueError(f"config.json: projector_type {projector!r} is not one of domino, causal_v5, dflash")
        head = projector in HEAD_PROJECTOR_TYPES
        if published.get("model_type", "qwen3") != "qwen3":
            raise ValueError(f"config.json: model_type {published['model_type']!r}; only qwen3 drafters are known")
        head_fields: dict[str, Any] = {}
        if head:
            names = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
            head_fields = {name: _required(dflash, name, "config.json: dflash_config") for name in names}
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "head_dim", "num_target_layers", "block_size", "rms_norm_eps")
        names += ("max_position_embeddings",)
        return cls(
            **{name: _required(published, name, "config.json") for name in names},
            **head_fields,
            head=head,
            rope_theta=_rope_theta(published),
            target_layer_ids=tuple(_required(dflash, "target_layer_ids", "config.json: dflash_config")),
            mask_token_id=_required(dflash, "mask_token_id", "config.json: dflash_config"),
            # Configurations from before the option existed are unshifted.
            shift_label=dflash.get("shift_label", False),
            initializer_range=published.get("initializer_range", 0.02),
            dtype=published.get("dtype") or published.get("torch_dtype") or "bfloat16",
        )

    def to_dict(self) -> dict[str, Any]:
        """The published config.json."""
        dflash: dict[str, Any] = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        if self.head:
            dflash |= {
                "projector_type": "domino",
                "shift_label": self.shift_label,
                "pure_draft_prefix_len": self.pure_draft_prefix_len,
                "emb_dim": self.emb_dim,
                "gru_hidden_dim": self.gru_hidden_dim,
            }
        elif self.shift_label:
            dflash["shift_label"] = True  # public DFlash drafters are unshifted and do not have the key
        module, name = ("domino", "DominoDraftModel") if self.head else ("dflash", "DFlashDraftModel")
        return {
            "architectures": [name],
            "auto_map": {"AutoModel": f"{module}.{name}"},
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "tie_word_embeddings": False,
            "initializer_range": self.initializer_range,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            **({"emb_dim": self.emb_dim} if self.head else {}),  # some engines read this copy
            "dflash_config": dflash,
        }


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The published choice of tapped layers: evenly from the second to the fourth last; a single one in the middle."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    if num_taps < 1 or num_target_layers - 4 < num_taps - 1:
        raise ValueError(
            f"Cannot tap {num_taps} different layers of a target with {num_target_layers} by the published formula; "
            "give target_layer_ids"
        )
    step = (num_target_layers - 4) / (num_taps - 1)
    return tuple(round(1 + i * step) for i in range(num_taps))


def _is(kind: Any, value: Any) -> bool:
    """Whether a value from JSON is of a field's type. true is no number there, and 1 is as good as 1.0."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _required(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    if mapping.get(key) is None:
        raise ValueError(f"{where} lacks {key}")
    return mapping[key]


def _rope_theta(published: Mapping[str, Any]) -> float:
    """Theta of plain rotary embedding, after refusing every attention variant that we do not compute."""
    refused = {
        "rope_scaling": published.get("rope_scaling") is not None,
        "use_sliding_window": bool(published.get("use_sliding_window")),
        "sliding_window": published.get("sliding_window") is not None,
        "layer_types": any(kind != "full_attention" for kind in published.get("layer_types") or ()),
        "attention_bias": bool(published.get("attention_bias")),
        "attention_dropout": bool(published.get("attention_dropout")),
        "hidden_act": published.get("hidden_act", "silu") != "silu",
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"config.json: {key}={published[key]!r} is not supported")
    rope = published.get("rope_parameters")  # where newer transformers versions put it
    if not isinstance(rope, dict | None):
        raise ValueError(f"config.json: rope_parameters={rope!r} is not supported")
    if rope is None:
        return float(_required(published, "rope_theta", "config.json"))
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_parameters={rope!r} is not supported")
    return float(_required(rope, "rope_theta", "config.json: rope_parameters"))
