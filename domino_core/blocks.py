"""Anchors, blocks, labels, weights and positions of packed rows: index arithmetic and nothing else.

T tokens of all rows, end to end · S tokens of one row · X blocks of all rows, row by row · K slots of a block ·
Q drafts of a block · C feature width · J likely tokens

A block has an anchor a. Draft i = 0..Q-1 of the block predicts text token a+1+i, and the head's GRU has read text
tokens a..a+i by then, in both label conventions; what differs is the slot that predicts it, which is
config.first_predicting_slot + i. Blocks may run past the end of their row: what lies there has weight zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_core.config import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows laid end to end without padding, and the blocks drawn from them: what one training pass reads.

    lengths: tokens of each row; counts: blocks of each row. Both sit on the host, as tuples. anchors: the anchor's
    index among the T tokens.
    """

    input_ids_T: Tensor
    loss_mask_T: Tensor
    features_TC: Tensor  # the target's, at the same positions as input_ids
    anchors_X: Tensor
    starts_X: Tensor  # index of the first token of the block's row
    ends_X: Tensor  # index behind its last one
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    likely_TJ: Tensor | None = None  # what the target finds most likely in a token's place, to be trained on instead
    shares_TJ: Tensor | None = None  # and how likely, float32, summing to one

    def to(self, device: torch.device) -> "PackedRows":
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return PackedRows(**moved, lengths=self.lengths, counts=self.counts)


def pack(
    input_ids_T: Tensor, loss_mask_T: Tensor, features_TC: Tensor, lengths: list[int], anchors: list[Tensor]
) -> PackedRows:
    """Describe packed rows. anchors: of each row [N], counted from the row's own first token, N different per row."""
    ends = torch.tensor(lengths).cumsum(0)
    assert len(lengths) == len(anchors)
    assert int(ends[-1]) == len(input_ids_T) == len(loss_mask_T) == len(features_TC), "rows do not fill the tokens"
    counts = torch.tensor([len(each) for each in anchors])
    starts_X = (ends - torch.tensor(lengths)).repeat_interleave(counts)
    return PackedRows(
        input_ids_T=input_ids_T,
        loss_mask_T=loss_mask_T,
        features_TC=features_TC,
        anchors_X=(torch.cat(anchors) + starts_X).to(input_ids_T.device),
        starts_X=starts_X.to(input_ids_T.device),
        ends_X=ends.repeat_interleave(counts).to(input_ids_T.device),
        lengths=tuple(lengths),
        counts=tuple(counts.tolist()),
    )


def anchor_candidates(loss_mask_S: Tensor) -> Tensor:
    """Bool [S]: positions that are supervised and whose next token is, too (else the first draft has no label)."""
    supervised_S = loss_mask_S.bool()
    candidates_S = torch.zeros_like(supervised_S)
    candidates_S[:-1] = supervised_S[:-1] & supervised_S[1:]
    return candidates_S


def sample_anchors(loss_mask_S: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Anchor positions of one row, uniform among its candidates, without replacement, ascending: [N], N <= num_anchors.

    A row with fewer candidates gives them all, maybe none. Drawn on the generator's device, so that one seed gives the
    same anchors wherever the row lies.
    """
    candidates_N = anchor_candidates(loss_mask_S).nonzero()[:, 0].to(generator.device)
    order_N = torch.rand(len(candidates_N), generator=generator, device=generator.device).argsort()
    return candidates_N[order_N[:num_anchors]].sort().values.to(loss_mask_S.device)


def block_inputs(rows: PackedRows, config: DrafterConfig) -> Tensor:
    """Ids that the backbone reads, [X, K]: the anchor token, then mask tokens."""
    ids_XK = rows.input_ids_T.new_full((len(rows.anchors_X), config.block_size), config.mask_token_id)
    ids_XK[:, 0] = rows.input_ids_T[rows.anchors_X]
    return ids_XK


def context_positions(rows: PackedRows) -> Tensor:
    """Position of every token in its own row, [T]."""
    return torch.cat([torch.arange(length) for length in rows.lengths]).to(rows.input_ids_T.device)


def block_positions(rows: PackedRows, block_size: int) -> Tensor:
    """Positions of all slots, [X, K]: slot j of a block stands at a + j of its row, in both conventions."""
    slots_K = torch.arange(block_size, device=rows.anchors_X.device)
    return (rows.anchors_X - rows.starts_X)[:, None] + slots_K


def gru_inputs(rows: PackedRows, config: DrafterConfig) -> Tensor:
    """Ids that the head's GRU has read last when draft i is due, [X, Q]: text tokens a..a+Q-1, anchor first."""
    index_XQ, _ = _tokens_from(rows, 0, config.num_drafts)
    return rows.input_ids_T[index_XQ]


def labels_and_weights(rows: PackedRows, config: DrafterConfig, gamma: float) -> tuple[Tensor, Tensor]:
    """Labels [X, Q] int64 and loss weights [X, Q] float32 of the drafts.

    weight of draft i = inside the row · supervised · exp(-i / gamma): the paper's decay, its exponent 0 at the first
    draft. gamma = infinity gives equal weights. As published, a block is not cut at its first unsupervised label.
    """
    index_XQ, inside_XQ = _tokens_from(rows, 1, config.num_drafts)
    steps_Q = torch.arange(config.num_drafts, dtype=torch.float32, device=index_XQ.device)
    decay_Q = torch.ones_like(steps_Q) if math.isinf(gamma) else torch.exp(-steps_Q / gamma)
    return rows.input_ids_T[index_XQ], (inside_XQ & rows.loss_mask_T.bool()[index_XQ]) * decay_Q


def soft_labels(rows: PackedRows, config: DrafterConfig) -> tuple[Tensor, Tensor] | None:
    """The target's likely tokens in the place of each draft and their shares, [X, Q, J] each; None if not known."""
    if rows.likely_TJ is None or rows.shares_TJ is None:
        return None
    index_XQ, _ = _tokens_from(rows, 1, config.num_drafts)
    return rows.likely_TJ[index_XQ], rows.shares_TJ[index_XQ]


def _tokens_from(rows: PackedRows, offset: int, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the tokens at anchor + offset.., [X, count], and whether they are in its row (else clamped)."""
    index_XQ = (rows.anchors_X + offset)[:, None] + torch.arange(count, device=rows.anchors_X.device)
    inside_XQ = index_XQ < rows.ends_X[:, None]
    return torch.where(inside_XQ, index_XQ, rows.ends_X[:, None] - 1), inside_XQ
