"""How many rows an engine has room for, worked out from shapes before anything is allocated.

    an engine's bytes = SPARE + a prompt's pass + caches of one row + rows · (caches of one row + a round's tensors)

The row without a round is the slot where prompts are taken in. Of a round's tensors the logits count most: blocks of 16
drafts over Qwen3's vocabulary are 2.6 million of them per row. What is reserved is more than most rounds need, since
running out in the middle of one loses every request of the engine.

T tokens that a round verifies · D hidden · V vocabulary
"""

import os
from dataclasses import dataclass

import torch

from domino_core.config import DrafterConfig
from domino_core.decode_state import PREFILL_CHUNK, overrun
from domino_core.drafter import Drafter
from domino_core.fused import CHUNK_KEYS, LONG_PASS
from domino_core.target_model import TargetConfig

# More rows than this are not planned, however much memory there is. 64 blocks of 16 drafts are 1,088 tokens a pass,
# for which a card computes longer than it reads weights: further rows lengthen everyone's rounds by what they gain.
MOST_ROWS = 64

# On a CPU, whose free memory is everyone's and not asked for. A few cores gain little from more rows.
CPU_ROWS = 8

# Of each logit of a round. The model's own type twice, for drafter and target, and a place that graphs share (6); a
# sampled row's scaled logits and noise in float32 (8); sorted for top-p with the indices and the sort's second copy
# (24); masks, probabilities and sums (12): 50. Nearly twice that, since graphs keep memory of their own, and rounds
# with penalties and log-probabilities run beside them.
LOGIT_BYTES = 96

# Graphs (some hundred, a few MB each), workspace of the matrix products, and what fragments.
SPARE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """What an engine of one shape takes. fixed: with no row at all."""

    row_bytes: int
    fixed_bytes: int

    @classmethod
    def of(cls, target: TargetConfig, drafter: DrafterConfig | None, max_length: int, itemsize: int) -> "EngineMemory":
        """itemsize: bytes of a number in the type that both models compute in."""
        cache = cache_bytes(target, drafter, max_length, itemsize)
        block = drafter.num_drafts + 1 if drafter is not None else 1
        token = _token_bytes(target, drafter, itemsize)
        splits = -(-(max_length + overrun(drafter)) // CHUNK_KEYS)
        partial = splits * target.num_attention_heads * (target.head_dim + 2) * 4
        counts = 5 * target.vocab_size  # what penalties count
        # Partial results twice: rounds that are no graphs have theirs beside the graphs'.
        row = cache + counts + block * (token + 2 * partial + LOGIT_BYTES * target.vocab_size)
        prompt = PREFILL_CHUNK * token + (LONG_PASS - 1) * partial
        return cls(row_bytes=row, fixed_bytes=SPARE + cache + counts + prompt)

    def needed(self, rows: int) -> int:
        return self.fixed_bytes + rows * self.row_bytes

    def fitting(self, free: int) -> int:
        """The rows that fit into `free` bytes; 0 if none does."""
        return max(0, (free - self.fixed_bytes) // self.row_bytes)

    def plan(self, max_rows: int | None, free: int | None) -> int:
        """max_rows, or as many as fit; free None: a CPU, whose memory is asked for as a whole. ValueError where it is
        too little.
        """
        if free is None:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            max_rows = CPU_ROWS if max_rows is None else max_rows
        fitting = self.fitting(free)
        if fitting < (max_rows or 1):
            remedy = "a shorter max_length" if fitting == 0 else f"fewer rows ({fitting} fit) or a shorter max_length"
            asked = "one row needs" if max_rows is None else f"max_rows={max_rows} needs"
            raise ValueError(
                f"{asked} {self.needed(max_rows or 1) / 1e9:.1f} GB of the device's memory and "
                f"{max(0, free) / 1e9:.1f} GB are free: give {remedy}, or leave the device to this engine"
            )
        return min(fitting, MOST_ROWS) if max_rows is None else max_rows


def cache_bytes(target: TargetConfig, drafter: DrafterConfig | None, max_length: int, itemsize: int) -> int:
    """Keys and values of one row, as DecodeState.allocate has them."""
    length = max_length + overrun(drafter)
    numbers = length * target.num_hidden_layers * target.num_key_value_heads * target.head_dim
    if drafter is not None:
        room = length + drafter.block_size + 1  # for the block that is being drafted
        numbers += room * drafter.num_hidden_layers * drafter.num_key_value_heads * drafter.head_dim
    return 2 * numbers * itemsize


def drafter_bytes(drafter: Drafter) -> int:
    """At most what decoding with a drafter takes beside its engine: the weights, a copy of them, the head's table."""
    weights = 2 * sum(weight.numel() * weight.element_size() for weight in drafter.parameters())
    table = 3 * drafter.config.gru_hidden_dim * drafter.config.vocab_size if drafter.head is not None else 0
    return weights + table * drafter.dtype.itemsize


def free_bytes(device: torch.device, share: float = 1.0) -> int | None:
    """What can still be allocated on a card, torch's own unused reserve included; None on a CPU.

    share: of the whole card, that this process may use.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    return min(free + torch.cuda.memory_reserved(device) - allocated, int(share * total) - allocated)


def _token_bytes(target: TargetConfig, drafter: DrafterConfig | None, itemsize: int) -> int:
    """Activations of a token that live at once: the MLP's, the residual stream and copies, attention's, the taps."""
    heads = (target.num_attention_heads + 2 * target.num_key_value_heads) * target.head_dim
    taps = len(drafter.target_layer_ids) if drafter is not None else 0
    return itemsize * (3 * target.intermediate_size + (8 + 2 * taps) * target.hidden_size + 3 * heads)
