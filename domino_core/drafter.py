"""Drafter = backbone + head, between the target's frozen embedding table and output matrix.

B rows · S tokens of a row · N blocks per row · K slots · Q drafts per block · X blocks of all rows ·
T tokens of this pass · D hidden · C feature width · V vocabulary
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_core import blocks
from domino_core.backbone import Backbone
from domino_core.config import DrafterConfig
from domino_core.head import DominoHead
from domino_core.layers import KVCache
from domino_core.losses import BlockLosses, block_losses


class Drafter(nn.Module):
    """Trainable: backbone and head. Frozen, shared with the target and not saved: embed and lm_head."""

    embed_VD: Tensor
    lm_head_VD: Tensor

    def __init__(self, config: DrafterConfig, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        super().__init__()
        for name, tensor in (("embedding table", embed_VD), ("output matrix", lm_head_VD)):
            if tensor.shape != (config.vocab_size, config.hidden_size):
                raise ValueError(
                    f"The target's {name} is {list(tensor.shape)}; the drafter's configuration says "
                    f"[vocab_size={config.vocab_size}, hidden_size={config.hidden_size}]"
                )
        self.config = config
        self.backbone = Backbone(config)
        self.head = DominoHead(config) if config.head else None
        # Detached: an embedding that came as a Parameter must not become trainable through us.
        self.register_buffer("embed_VD", embed_VD.detach(), persistent=False)
        self.register_buffer("lm_head_VD", lm_head_VD.detach(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Linear layers normal(0, initializer_range), the head's last too; norms one; the GRU as PyTorch does it."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trainable weights; the shared tensors may have another one."""
        return self.backbone.dtype

    # Training

    def forward(
        self,
        input_ids_BS: Tensor,
        loss_mask_BS: Tensor,
        features_BSC: Tensor,
        anchors_BN: Tensor,
        keep_BN: Tensor,
        gamma: float,
        chunk_blocks: int = 128,
    ) -> BlockLosses:
        """Teacher-forced losses of all blocks. features: the target's, at the same positions as input_ids.

        Every trainable parameter gets a gradient from losses.mix at any λ, also where all blocks are dropped.
        """
        z_BNQD = self.predicting(self.block_hidden(input_ids_BS, features_BSC, anchors_BN, keep_BN))
        inputs_BNQ = blocks.gru_inputs(input_ids_BS, anchors_BN, self.config)
        labels_BNQ, weights_BNQ = blocks.labels_and_weights(
            input_ids_BS, loss_mask_BS, anchors_BN, keep_BN, self.config, gamma
        )
        flat = (t.flatten(0, 1) for t in (z_BNQD, inputs_BNQ, labels_BNQ, weights_BNQ))
        return block_losses(self.logits, *flat, chunk_blocks=chunk_blocks)

    def block_hidden(self, input_ids_BS: Tensor, features_BSC: Tensor, anchors_BN: Tensor, keep_BN: Tensor) -> Tensor:
        """z of every slot of every block, [B, N, K, D]."""
        num_slots = self.config.block_size
        ids_BNK = blocks.block_inputs(input_ids_BS, anchors_BN, keep_BN, self.config)
        z_BTD = self.backbone(
            self.embed(ids_BNK).flatten(1, 2),
            self.backbone.project_context(features_BSC),
            blocks.block_positions(anchors_BN, num_slots),
            blocks.attention_mask(anchors_BN, keep_BN, input_ids_BS.shape[1], num_slots),
        )
        return z_BTD.unflatten(1, (-1, num_slots))

    def predicting(self, z_XKD: Tensor) -> Tensor:
        """The slots that predict something, [..., Q, D]; behind this line the label convention no longer matters."""
        return z_XKD[..., self.config.first_predicting_slot :, :]

    def logits(self, z_XQD: Tensor, inputs_XQ: Tensor) -> tuple[Tensor, Tensor]:
        """Base and final logits of whole blocks, [X, Q, V] each, the head reading the given tokens (teacher forcing).

        The first p drafts come from the base logits alone, so there both are the same; without a head, everywhere.
        """
        base_XQV = self.base_logits(z_XQD)
        if self.head is None:
            return base_XQV, base_XQV
        first = self.config.pure_draft_prefix_len
        delta_XQV = self.head.block(z_XQD, self.embed(inputs_XQ))
        return base_XQV, torch.cat((base_XQV[:, :first], base_XQV[:, first:] + delta_XQV), dim=1)

    # Drafting

    def new_cache(self, rows: int, length: int) -> KVCache:
        """For `length` context tokens per row, with room behind them for a block or for padding of fresh features."""
        config = self.config
        return KVCache.allocate(
            config.num_hidden_layers,
            rows,
            length + config.block_size + 1,
            config.num_key_value_heads,
            config.head_dim,
            dtype=self.dtype,
            device=self.backbone.fc.weight.device,
        )

    def extend_context(self, cache: KVCache, features_BTC: Tensor, positions_BT: Tensor) -> None:
        """Add the features of T more tokens per row to the draft context.

        In rows with fewer than T, the rest is padding, positioned at or behind their new anchor: not counted as
        context, overwritten when the real features of those positions come.
        """
        self.backbone.extend_context(cache, self.backbone.project_context(features_BTC), positions_BT)

    def draft_hidden(self, cache: KVCache, anchor_B: Tensor, start_B: Tensor, num_context: int | None = None) -> Tensor:
        """z of the predicting slots, [B, Q, D], for a block per row that starts at its anchor token.

        start: the anchor's position; the cache must hold the context of positions 0..start-1 of that row.
        num_context = max(start), if the caller knows it.
        """
        ids_BK = anchor_B.new_full((len(anchor_B), self.config.block_size), self.config.mask_token_id)
        ids_BK[:, 0] = anchor_B
        return self.predicting(self.backbone.draft(cache, self.embed(ids_BK), start_B, num_context))

    def base_logits(self, z_XD: Tensor) -> Tensor:
        """[..., V] through the target's own output matrix."""
        if not torch.is_autocast_enabled(z_XD.device.type):
            z_XD = z_XD.to(self.lm_head_VD.dtype)
        return F.linear(z_XD, self.lm_head_VD)

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D], in the drafter's own type."""
        return F.embedding(ids, self.embed_VD).to(self.dtype)
