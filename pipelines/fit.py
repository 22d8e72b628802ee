"""One training run from prompts or cached features to an exported drafter."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """The drafter's own choices; the rest of its shape is the target's. The defaults are the published ones."""

    block_size: int = 16
    num_hidden_layers: int = 5
    num_taps: int | None = None  # tapped target layers; None: as many as the drafter has layers
    target_layer_ids: tuple[int, ...] | None = None  # None: the published formula for num_taps
    intermediate_size: int | None = None  # None: the target's
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    mask_token_id: int | None = None  # None: the tokenizer's <|mask|>, else the first id after its vocabulary
    head: bool = True  # False: a plain DFlash drafter
    emb_dim: int = 256  # low rank of the head
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 1
    shift_label: bool = True
    dtype: str = "bfloat16"  # of the exported checkpoint
