"""The published config.json of a drafter as one frozen dataclass: read strictly, written back in the same layout."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from domino_core.json_files import is_kind

HEAD_PROJECTOR_TYPES = ("domino", "causal_v5")  # causal_v5: the name from before the release
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", *HEADS)
HEAD_SIZES = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
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
DTYPES = ("bfloat16", "float16", "float32")
LARGEST_SIZE = 2**24  # far above every model; the product of two is still a size that torch can speak of


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
    num_target_layers: int | None  # None: the checkpoint does not say
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
            if field.type in wanted and not is_kind(field.type, value := getattr(self, field.name))
        ]
        if self.num_target_layers is not None and not is_kind(int, self.num_target_layers):
            problems.append(f"num_target_layers={self.num_target_layers!r} must be {wanted[int]}")
        if not all(is_kind(int, layer) for layer in self.target_layer_ids):
            problems.append(f"target_layer_ids={list(self.target_layer_ids)} must be whole numbers")
        return problems

    def _problems(self) -> list[str]:
        sizes = (
            *SIZES,
            "emb_dim",
            "gru_hidden_dim",
            *(("num_target_layers",) if self.num_target_layers is not None else ()),
        )
        problems = [
            f"{name}={getattr(self, name)} must be at least 1 and at most {LARGEST_SIZE}"
            for name in sizes
            if not 1 <= getattr(self, name) <= LARGEST_SIZE
        ]
        if self.num_key_value_heads > 0 and self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} must be even (rotary embedding)")
        layers = self.target_layer_ids
        last = max(layers, default=0) if self.num_target_layers is None else self.num_target_layers - 1
        if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= last:
            problems.append(
                f"target_layer_ids={list(layers)} must ascend and lie in 0..{last} "
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
        problems = [
            f"{name} is {own} in the drafter, {its} in the target"
            for name, own, its in pairs
            if own is not None and own != its
        ]
        if self.target_layer_ids[-1] >= target.num_hidden_layers:
            problems.append(
                f"target_layer_ids {list(self.target_layer_ids)} need more than the target's "
                f"{target.num_hidden_layers} layers"
            )
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
        return cls(
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
