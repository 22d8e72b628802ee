"""Anchors, blocks, labels, weights, positions and the training mask: index arithmetic and nothing else.

B rows · S tokens of a row · N blocks per row · K slots of a block · Q drafts of a block · V vocabulary

A block has an anchor position a. Draft i = 0..Q-1 of the block predicts text token a+1+i, and the head's GRU has read
text tokens a..a+i by then, in both label conventions; what differs is the slot that predicts it, which is
config.first_predicting_slot + i. Blocks may run past the end of the row: what lies there has weight zero. A row with
fewer anchors than N has dropped blocks (keep false, anchor 0), which have weight zero too.
"""

import math

import torch
from torch import Tensor

from domino_core.config import DrafterConfig


def anchor_candidates(loss_mask_BS: Tensor) -> Tensor:
    """Bool [B, S]: positions that are supervised and whose next token is, too (else the first draft has no label)."""
    supervised_BS = loss_mask_BS.bool()
    candidates_BS = torch.zeros_like(supervised_BS)
    candidates_BS[:, :-1] = supervised_BS[:, :-1] & supervised_BS[:, 1:]
    return candidates_BS


def sample_anchors(loss_mask_BS: Tensor, num_anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchor positions, uniform among the candidates of each row, without replacement, ascending.

    Returns (anchors [B, N] int64, keep [B, N] bool). N is num_anchors or, where no row has that many candidates, the
    most that one has, but at least 1: a batch without any candidate is one of dropped blocks, not an error.
    """
    candidates_BS = anchor_candidates(loss_mask_BS)
    num_blocks = max(1, min(num_anchors, int(candidates_BS.sum(1).max())))
    # Drawn on the generator's device, so that one seed gives the same anchors wherever the batch lies.
    scores_BS = torch.rand(candidates_BS.shape, generator=generator, device=generator.device).to(candidates_BS.device)
    scores_BS = scores_BS.masked_fill(~candidates_BS, -1.0)
    best_BN, positions_BN = scores_BS.topk(num_blocks, dim=1)
    behind_all = loss_mask_BS.shape[1]
    anchors_BN = positions_BN.masked_fill(best_BN < 0, behind_all).sort(dim=1).values
    keep_BN = anchors_BN < behind_all
    return anchors_BN.masked_fill(~keep_BN, 0), keep_BN


def block_inputs(input_ids_BS: Tensor, anchors_BN: Tensor, keep_BN: Tensor, config: DrafterConfig) -> Tensor:
    """Ids that the backbone reads, [B, N, K]: the anchor token, then mask tokens; all mask tokens in dropped blocks."""
    mask_token = config.mask_token_id
    ids_BNK = input_ids_BS.new_full((*anchors_BN.shape, config.block_size), mask_token)
    ids_BNK[..., 0] = input_ids_BS.gather(1, anchors_BN).masked_fill(~keep_BN, mask_token)
    return ids_BNK


def block_positions(anchors_BN: Tensor, block_size: int) -> Tensor:
    """Absolute positions of all slots, [B, N*K]: slot j of a block stands at a + j, in both conventions."""
    return (anchors_BN[..., None] + torch.arange(block_size, device=anchors_BN.device)).flatten(1)


def gru_inputs(input_ids_BS: Tensor, anchors_BN: Tensor, config: DrafterConfig) -> Tensor:
    """Ids that the head's GRU has read last when draft i is due, [B, N, Q]: text tokens a..a+Q-1, anchor first."""
    ids_BNQ, _ = _tokens_from(input_ids_BS, anchors_BN, config.num_drafts)
    return ids_BNQ


def labels_and_weights(
    input_ids_BS: Tensor, loss_mask_BS: Tensor, anchors_BN: Tensor, keep_BN: Tensor, config: DrafterConfig, gamma: float
) -> tuple[Tensor, Tensor]:
    """Labels [B, N, Q] int64 and loss weights [B, N, Q] float32 of the drafts.

    weight of draft i = keep · inside the row · supervised · exp(-i / gamma): the paper's decay, its exponent 0 at the
    first draft. gamma = infinity gives equal weights. As published, a block is not cut at its first unsupervised label.
    """
    labels_BNQ, inside_BNQ = _tokens_from(input_ids_BS, anchors_BN + 1, config.num_drafts)
    supervised_BNQ, _ = _tokens_from(loss_mask_BS.bool(), anchors_BN + 1, config.num_drafts)
    steps_Q = torch.arange(config.num_drafts, dtype=torch.float32, device=input_ids_BS.device)
    decay_Q = torch.ones_like(steps_Q) if math.isinf(gamma) else torch.exp(-steps_Q / gamma)
    return labels_BNQ, (keep_BN[..., None] & inside_BNQ & supervised_BNQ) * decay_Q


def attention_mask(anchors_BN: Tensor, keep_BN: Tensor, num_context: int, block_size: int) -> Tensor:
    """Bool [B, N*K, S+N*K], true = visible: context strictly before the own anchor, and the slots of the own block.

    Dropped blocks see themselves only. They must see something: a softmax over nothing is NaN, and the NaN reaches
    every gradient through 0 · NaN although the block weighs nothing.
    """
    device = anchors_BN.device
    num_blocks = anchors_BN.shape[1]
    before_BNS = torch.arange(num_context, device=device) < anchors_BN[..., None]
    context_BTS = (before_BNS & keep_BN[..., None]).repeat_interleave(block_size, dim=1)
    block_of_T = torch.arange(num_blocks, device=device).repeat_interleave(block_size)
    own_TT = block_of_T[:, None] == block_of_T[None, :]
    return torch.cat((context_BTS, own_TT.expand(anchors_BN.shape[0], -1, -1)), dim=2)


def _tokens_from(values_BS: Tensor, first_BN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """values at first.. first+count-1 per block, [B, N, count], and whether that is inside the row (else clamped)."""
    length = values_BS.shape[1]
    index_BNX = first_BN[..., None] + torch.arange(count, device=values_BS.device)
    inside_BNX = index_BNX < length
    gathered = values_BS.gather(1, index_BNX.clamp(max=length - 1).flatten(1))
    return gathered.view(index_BNX.shape), inside_BNX
