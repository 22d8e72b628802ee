"""Padded test batches as the packed rows that training reads."""

import torch
from torch import Tensor

from domino_core.blocks import PackedRows, pack


def packed(
    input_ids_BS: Tensor, loss_mask_BS: Tensor, features_BSC: Tensor, anchors_BN: Tensor, keep_BN: Tensor
) -> PackedRows:
    """Every row in its full length, with the anchors that are kept."""
    rows, length = input_ids_BS.shape
    anchors = [anchors_N[keep_N] for anchors_N, keep_N in zip(anchors_BN.cpu(), keep_BN.cpu(), strict=True)]
    tensors = (input_ids_BS.flatten(), loss_mask_BS.flatten(), features_BSC.flatten(0, 1))
    return pack(*tensors, [length] * rows, anchors)


def one_block(input_ids_BS: Tensor, features_BSC: Tensor, starts: list[int]) -> PackedRows:
    """One block per row, at its start."""
    anchors = torch.tensor(starts)[:, None]
    return packed(
        input_ids_BS, torch.ones_like(input_ids_BS), features_BSC, anchors, torch.ones_like(anchors, dtype=torch.bool)
    )
