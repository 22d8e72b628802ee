"""Attention of all blocks of packed rows: each slot sees its row's tokens before its anchor, and its own block.

Two twins: row by row through SDPA, anywhere; and flex attention over all rows at once, which skips what no slot of a
tile sees and is meant for a compiled layer on a GPU.

T tokens of all rows, end to end · X blocks · K slots of a block · Y = X·K slots · M keys · H, J query and key/value
heads · d head width · U tiles of queries · W tiles of keys
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from domino_core.blocks import PackedRows
from domino_core.layers import attend

BlockAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q [Y, H, d], k and v of the slots [Y, J, d], k and v of the context [T, J, d]) -> [Y, H, d]."""

TILE = 128  # queries and keys of a tile of flex attention


@dataclass(frozen=True)
class _Row:
    """Where a row's context and slots lie, and what they see: [N·K, context + N·K]."""

    context: slice
    slots: slice
    mask: Tensor


class RowAttention:
    """The slow twin: a row at a time, under a dense mask."""

    def __init__(self, rows: PackedRows, block_size: int) -> None:
        self.rows: list[_Row] = []
        start = first_slot = block = 0
        for length, count in zip(rows.lengths, rows.counts, strict=True):
            if count:
                before_N = rows.anchors_X[block : block + count] - start
                context_NS = torch.arange(length, device=before_N.device) < before_N[:, None]
                own_NN = torch.eye(count, dtype=torch.bool, device=before_N.device)
                own_NY = own_NN.repeat_interleave(block_size, dim=1)
                mask = torch.cat((context_NS, own_NY), dim=1).repeat_interleave(block_size, dim=0)
                slots = slice(first_slot, first_slot + count * block_size)
                self.rows.append(_Row(slice(start, start + length), slots, mask))
                first_slot, block = slots.stop, block + count
            start += length

    def __call__(self, q_YHd: Tensor, k_YJd: Tensor, v_YJd: Tensor, ck_TJd: Tensor, cv_TJd: Tensor) -> Tensor:
        out_YHd = [
            attend(
                q_YHd[None, row.slots],
                torch.cat((ck_TJd[row.context], k_YJd[row.slots]))[None],
                torch.cat((cv_TJd[row.context], v_YJd[row.slots]))[None],
                row.mask[None],
            )[0]
            for row in self.rows
        ]
        # Without any block nothing is added to nothing, which keeps all projections in the graph: DDP waits for them.
        return torch.cat(out_YHd) if out_YHd else q_YHd + sum(each.sum() for each in (k_YJd, v_YJd, ck_TJd, cv_TJd))


class FlexAttention:
    """All rows at once. Call it from compiled code: uncompiled, flex attention computes every score."""

    def __init__(self, rows: PackedRows, block_size: int) -> None:
        num_tokens, num_slots = len(rows.input_ids_T), len(rows.anchors_X) * block_size
        self.context_pad, self.slot_pad = -num_tokens % TILE, -num_slots % TILE
        # Blocks that fill up the last tile see themselves alone. (A query that sees nothing is NaN, and so is, as
        # 0 · NaN, every gradient behind it.)
        more = (0, -(-(num_slots + self.slot_pad) // block_size) - len(rows.anchors_X))
        starts_X, anchors_X = F.pad(rows.starts_X, more), F.pad(rows.anchors_X, more)
        first_slot = num_tokens + self.context_pad

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = query // block_size
            own = (key >= first_slot) & ((key - first_slot) // block_size == block)
            return own | ((key >= starts_X[block]) & (key < anchors_X[block]))

        length = num_slots + self.slot_pad
        some_UW, all_UW = _tiles(starts_X, anchors_X, length, first_slot, block_size)
        self.mask = BlockMask.from_kv_blocks(
            *_listed(some_UW & ~all_UW),
            *_listed(all_UW),
            BLOCK_SIZE=TILE,
            mask_mod=visible,
            seq_lengths=(length, first_slot + length),
        )

    def __call__(self, q_YHd: Tensor, k_YJd: Tensor, v_YJd: Tensor, ck_TJd: Tensor, cv_TJd: Tensor) -> Tensor:
        q = F.pad(q_YHd, (0, 0, 0, 0, 0, self.slot_pad))
        k, v = (
            torch.cat((F.pad(context, (0, 0, 0, 0, 0, self.context_pad)), F.pad(own, (0, 0, 0, 0, 0, self.slot_pad))))
            for context, own in ((ck_TJd, k_YJd), (cv_TJd, v_YJd))
        )
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        out_1HYd = flex_attention(q, k, v, block_mask=self.mask, enable_gqa=True)
        assert isinstance(out_1HYd, Tensor)
        return out_1HYd[0].transpose(0, 1)[: len(q_YHd)]


def _tiles(
    starts_X: Tensor, anchors_X: Tensor, num_queries: int, first_slot: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Which tiles of keys some, and all, queries of a tile of queries see wholly or in part: bool [U, W], twice."""
    device = starts_X.device
    tile_W = torch.arange((first_slot + num_queries) // TILE, device=device) * TILE
    is_context_W = tile_W < first_slot
    seen_XW = (starts_X[:, None] < tile_W + TILE) & (anchors_X[:, None] > tile_W) & is_context_W
    full_XW = (starts_X[:, None] <= tile_W) & (anchors_X[:, None] >= tile_W + TILE) & is_context_W
    # A tile of queries holds the blocks first..last; where the block size does not divide it, blocks are in two tiles.
    first_U = torch.arange(0, num_queries, TILE, device=device)
    last_U = (first_U + TILE - 1) // block_size
    first_U = first_U // block_size
    some_UW = _count(seen_XW, first_U, last_U) > 0
    all_UW = _count(full_XW, first_U, last_U) == (last_U - first_U + 1)[:, None]
    own_UU = (first_U[:, None] <= last_U) & (first_U <= last_U[:, None])
    some_UW[:, first_slot // TILE :] |= own_UU
    return some_UW, all_UW


def _count(flags_XW: Tensor, first_U: Tensor, last_U: Tensor) -> Tensor:
    """How many of flags first..last are true, [U, W]."""
    sums_XW = F.pad(flags_XW.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
    return sums_XW[last_U + 1] - sums_XW[first_U]


def _listed(flags_UW: Tensor) -> tuple[Tensor, Tensor]:
    """(number of true ones [1, 1, U], their indices first in ascending order [1, 1, U, W]), as BlockMask has them."""
    order_UW = flags_UW.int().argsort(dim=1, descending=True, stable=True)
    return flags_UW.sum(1, dtype=torch.int32)[None, None], order_UW.int()[None, None]
