"""Drafter = backbone + head, between the target's frozen embedding table and output matrix.

B rows · K slots · Q drafts per block · X blocks of all rows · T tokens of this pass (training: of all rows) ·
D hidden · R low rank · C feature width · V vocabulary
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_core import blocks
from domino_core.backbone import Backbone
from domino_core.block_attention import BlockAttention, RowAttention
from domino_core.blocks import PackedRows
from domino_core.config import DrafterConfig
from domino_core.head import DominoHead
from domino_core.layers import KVCache
from domino_core.losses import BlockLosses, Drafts, block_losses, logits_of


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
        rows: PackedRows,
        gamma: float,
        base_weight: float,
        *,
        chunk_blocks: int = 128,
        attention: BlockAttention | None = None,
        reach: float = 0.0,
    ) -> BlockLosses:
        """Teacher-forced losses of all blocks, mixed by λ = base_weight.

        chunk_blocks: how many have their logits at once. attention: None for the twin that runs anywhere. reach: see
        losses.acceptance_weights. Every trainable parameter gets a gradient from the objective at any λ, also where
        there is no block at all.
        """
        attention = RowAttention(rows, self.config.block_size) if attention is None else attention
        z_XQD = self.predicting(self.block_hidden(rows, attention))
        low_XQR = self.low_rank(z_XQD, blocks.gru_inputs(rows, self.config))
        last_VR = None if self.head is None else self.head.last_weight
        drafts = drafts_of(rows, self.config, gamma, z_XQD, self.lm_head_VD, low_XQR, last_VR)
        return block_losses(drafts, base_weight, chunk_blocks * self.config.num_drafts, reach)

    def block_hidden(self, rows: PackedRows, attention: BlockAttention) -> Tensor:
        """z of every slot of every block, [X, K, D]."""
        return self.backbone(
            self.embed(blocks.block_inputs(rows, self.config)),
            self.backbone.project_context(rows.features_TC),
            blocks.block_positions(rows, self.config.block_size),
            blocks.context_positions(rows),
            attention,
        )

    def predicting(self, z_XKD: Tensor) -> Tensor:
        """The slots that predict something, [..., Q, D]; behind this line the label convention no longer matters."""
        return z_XKD[..., self.config.first_predicting_slot :, :]

    def low_rank(self, z_XQD: Tensor, inputs_XQ: Tensor) -> Tensor | None:
        """The head's side of the final logits, [X, Q, R], the head reading the given tokens (teacher forcing)."""
        return None if self.head is None else self.head.block(z_XQD, self.embed(inputs_XQ))

    def logits(self, z_XQD: Tensor, inputs_XQ: Tensor) -> tuple[Tensor, Tensor]:
        """Base and final logits of whole blocks, [X, Q, V] each; equal without a head, and for the first p drafts."""
        low_XQR = self.low_rank(z_XQD, inputs_XQ)
        return logits_of(z_XQD, low_XQR, self.lm_head_VD, None if self.head is None else self.head.last_weight)

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


def drafts_of(
    rows: PackedRows,
    config: DrafterConfig,
    gamma: float,
    z_XQD: Tensor,
    lm_head_VD: Tensor,
    low_XQR: Tensor | None = None,
    last_VR: Tensor | None = None,
) -> Drafts:
    """All drafts of packed rows, with what they should be. low and last: the head's side, as Drafts has it."""
    labels_XQ, weights_XQ = blocks.labels_and_weights(rows, config, gamma)
    likely_XQJ, shares_XQJ = blocks.soft_labels(rows, config) or (None, None)
    return Drafts(
        z_XQD=z_XQD,
        low_XQR=low_XQR,
        lm_head_VD=lm_head_VD,
        last_VR=last_VR,
        labels_XQ=labels_XQ,
        weights_XQ=weights_XQ,
        likely_XQJ=likely_XQJ,
        shares_XQJ=shares_XQJ,
    )
