"""What a drafter is, as one frozen dataclass (domino_core/published_config.py reads and writes its config.json)."""

from dataclasses import dataclass, fields
from typing import Protocol

from domino_core.json_files import is_kind

HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", *HEADS)
HEAD_SIZES = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
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
