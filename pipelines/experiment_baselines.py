"""Two other ways to draft, simple and fair: an EAGLE-style autoregressive drafter, and Medusa heads.

Both are trained by the trainer of Domino (forward has Drafter's signature) and decode in its engine (DraftModel), so
that rounds, verification and τ are the same. Embedding table and output matrix are the target's, frozen, as ours are.

B rows · N blocks of a row, padded · X blocks of all rows · Q drafts · T tokens of all rows, end to end · S of a row ·
D hidden · C feature width · H heads · d head width · V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_core import blocks
from domino_core.backbone import DraftLayer
from domino_core.block_attention import BlockAttention
from domino_core.blocks import PackedRows
from domino_core.config import DrafterConfig
from domino_core.drafter import drafts_of
from domino_core.layers import KVCache, RMSNorm, attend, rotary_cos_sin
from domino_core.losses import BlockLosses, block_losses


class Baseline(nn.Module):
    """What both share: the target's tensors, the loss of given hidden states, and the initialisation."""

    embed_VD: Tensor
    lm_head_VD: Tensor

    def __init__(self, config: DrafterConfig, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embed_VD", embed_VD.detach(), persistent=False)
        self.register_buffer("lm_head_VD", lm_head_VD.detach(), persistent=False)

    def initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trainable weights."""
        return next(self.parameters()).dtype

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D], in the drafter's own type."""
        return F.embedding(ids, self.embed_VD).to(self.dtype)

    def word_logits(self, z: Tensor) -> Tensor:
        """[..., V] through the target's output matrix."""
        return F.linear(z.to(self.lm_head_VD.dtype), self.lm_head_VD)

    def losses(self, z_XQD: Tensor, rows: PackedRows, gamma: float, chunk_blocks: int, reach: float) -> BlockLosses:
        """Cross-entropy of every draft under the weights that Domino's have."""
        drafts = drafts_of(rows, self.config, gamma, z_XQD, self.lm_head_VD)
        return block_losses(drafts, 0.0, chunk_blocks * self.config.num_drafts, reach)


class Medusa(Baseline):
    """One head per draft on the target's last hidden state before the anchor (Medusa-1, Cai et al. 2024).

    A head is num_hidden_layers residual blocks, x + silu(W x), before the target's own output matrix. The last hidden
    state is that of the token before the anchor: the anchor's does not exist when drafting starts.
    """

    head = None

    def __init__(self, config: DrafterConfig, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        super().__init__(config, embed_VD, lm_head_VD)
        D = config.hidden_size
        # Of all heads at once, [Q, D, D]: zero, so that a head begins as the target's own prediction.
        self.layers = nn.ParameterList(
            [nn.Parameter(torch.zeros(config.num_drafts, D, D)) for _ in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(D, config.rms_norm_eps)

    def heads(self, features_XC: Tensor) -> Tensor:
        """[X, Q, D] from the last hidden state of every block."""
        x_QXD = self.norm(features_XC.to(self.dtype)).expand(self.config.num_drafts, -1, -1)
        for weight_QDD in self.layers:
            x_QXD = x_QXD + F.silu(torch.bmm(x_QXD, weight_QDD.to(x_QXD.dtype)))
        return x_QXD.transpose(0, 1)

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
        """As Drafter.forward, of which λ and attention do not apply. An answer never begins a row."""
        z_XQD = self.heads(rows.features_TC[(rows.anchors_X - 1).clamp(min=0)])
        return self.losses(z_XQD, rows, gamma, chunk_blocks, reach)

    def new_cache(self, rows: int, length: int) -> KVCache:
        """The features themselves, as one head of keys."""
        size = (1, rows, length + self.config.block_size + 1, 1, self.config.feature_width)
        return KVCache.allocate(*size, dtype=self.dtype, device=self.embed_VD.device)

    def extend_context(self, cache: KVCache, features_BTC: Tensor, positions_BT: Tensor) -> None:
        cache.write(0, features_BTC[:, :, None], features_BTC[:, :, None], positions_BT)

    def draft_hidden(self, cache: KVCache, anchor_B: Tensor, start_B: Tensor, num_context: int | None = None) -> Tensor:
        """[B, Q, D]; the anchor token is not read."""
        return self.heads(cache.k[0, cache.row_index_B1[:, 0], start_B - 1, 0])

    def base_logits(self, z_BQD: Tensor) -> Tensor:
        return self.word_logits(z_BQD)


class Eagle(Baseline):
    """One transformer layer that drafts token by token, trained on its own hidden states (EAGLE-3, Li et al. 2025).

    A step reads [hidden; embedding of the last token] and sees, in the layer's keys and values, the fused features of
    the text before the anchor and its own earlier steps. `hidden` is the fused feature of the token before the anchor
    at the first step, and its own last output then. Training unrolls all Q steps with the text's tokens, as
    training-time test does. Unlike there a key of the text is made from its feature alone, which knows the token that
    it is of.
    """

    def __init__(self, config: DrafterConfig, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        super().__init__(config, embed_VD, lm_head_VD)
        D = config.hidden_size
        # A cache entry of the layer's shape also holds a fused vector.
        assert config.num_key_value_heads * config.head_dim == D, "EAGLE's layer has as many key heads as query heads"
        assert config.pure_draft_prefix_len == 1
        self.fc = nn.Linear(config.feature_width, D, bias=False)
        self.hidden_norm = RMSNorm(D, config.rms_norm_eps)
        self.embed_norm = RMSNorm(D, config.rms_norm_eps)
        self.join = nn.Linear(2 * D, D, bias=False)
        self.layer = DraftLayer(config)
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.initialise()
        self._steps: Steps | None = None

    def fuse(self, features_TC: Tensor) -> Tensor:
        """[..., D]"""
        if not torch.is_autocast_enabled(features_TC.device.type):
            features_TC = features_TC.to(self.dtype)
        return self.hidden_norm(self.fc(features_TC))

    def joined(self, hidden_BTD: Tensor, embeds_BTD: Tensor) -> Tensor:
        return self.join(torch.cat((self.hidden_norm(hidden_BTD), self.embed_norm(embeds_BTD)), -1))

    def rotary(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_cos_sin(positions_BT, self.config.head_dim, self.config.rope_theta)

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
        """As Drafter.forward, of which λ and attention do not apply."""
        fused_TD = self.fuse(rows.features_TC)
        context_BNS, tokens_BS, blocks_BN, real_BN = _padding(rows)
        k_TBHd, v_TBHd = self.layer.self_attn.keys_values(
            fused_TD[None], self.rotary(blocks.context_positions(rows)[None])
        )
        keys, values = [k_TBHd[0][tokens_BS]], [v_TBHd[0][tokens_BS]]
        read_XQ = blocks.gru_inputs(rows, self.config)
        start_BN = (rows.anchors_X - rows.starts_X)[blocks_BN]
        hidden_BND = fused_TD[(rows.anchors_X - 1).clamp(min=0)][blocks_BN]
        own_NN = torch.eye(real_BN.shape[1], dtype=torch.bool, device=real_BN.device).expand(len(real_BN), -1, -1)
        visible = [context_BNS]
        steps: list[Tensor] = []
        for index in range(self.config.num_drafts):
            x_BND = self.joined(hidden_BND, self.embed(read_XQ[:, index][blocks_BN]))
            q_BNHd, k_BNHd, v_BNHd = self.layer.project(x_BND, self.rotary(start_BN + index))
            keys.append(k_BNHd)
            values.append(v_BNHd)
            visible.append(own_NN)
            attended = attend(q_BNHd, torch.cat(keys, 1), torch.cat(values, 1), torch.cat(visible, 2))
            hidden_BND = self.layer.finish(x_BND, attended)
            steps.append(self.norm(hidden_BND)[real_BN])
        return self.losses(torch.stack(steps, 1), rows, gamma, chunk_blocks, reach)

    # Drafting: domino_core.decode asks a head for one token after the other, and this drafter is its own.

    @property
    def head(self) -> Eagle:
        return self

    def new_cache(self, rows: int, length: int) -> KVCache:
        """Layer 0: the layer's keys and values; layer 1: the fused vectors, of which `v` is not used."""
        config, room = self.config, length + self.config.block_size + 1
        size = (2, rows, room, config.num_key_value_heads, config.head_dim)
        return KVCache.allocate(*size, dtype=self.dtype, device=self.embed_VD.device)

    def extend_context(self, cache: KVCache, features_BTC: Tensor, positions_BT: Tensor) -> None:
        fused_BTD = self.fuse(features_BTC)
        cache.write(0, *self.layer.self_attn.keys_values(fused_BTD, self.rotary(positions_BT)), positions_BT)
        fused_BTHd = fused_BTD.unflatten(-1, cache.k.shape[-2:])
        cache.write(1, fused_BTHd, fused_BTHd, positions_BT)

    def draft_hidden(self, cache: KVCache, anchor_B: Tensor, start_B: Tensor, num_context: int | None = None) -> Tensor:
        """[B, Q, D], of which only the first is computed yet: the others follow step by step in `advance`."""
        end = self.config.num_drafts + (int(start_B.max()) if num_context is None else num_context)
        fused_BD = cache.k[1][cache.row_index_B1[:, 0], start_B - 1].flatten(-2)
        self._steps = Steps(self, cache, start_B, end)
        z_BD = self._steps.take(self.embed(anchor_B), fused_BD)
        return F.pad(z_BD[:, None], (0, 0, 0, self.config.num_drafts - 1))

    def base_logits(self, z_BQD: Tensor) -> Tensor:
        """Zero but for the first draft: what `correction_from` gives is all there is of the others."""
        return F.pad(self.word_logits(z_BQD[:, :1]), (0, 0, 0, z_BQD.shape[1] - 1))

    def hidden_part(self, z_BQD: Tensor) -> Tensor:
        return z_BQD

    def initial_state(self, num_rows: int) -> None:
        """The anchor has been read by draft_hidden: the first `advance`, which is its, is left out."""
        return None

    def advance(self, token_embed_BD: Tensor, memory: Steps | None) -> Steps:
        assert self._steps is not None
        if memory is not None:
            memory.take(token_embed_BD, memory.hidden_BD)
        return self._steps

    def correction_from(self, hidden_part_BD: Tensor, memory: Steps) -> Tensor:
        return self.word_logits(memory.z_BD)


class Steps:
    """A block of an Eagle that is being drafted; its own keys lie behind the context until features overwrite them."""

    hidden_BD: Tensor
    z_BD: Tensor

    def __init__(self, model: Eagle, cache: KVCache, start_B: Tensor, end: int) -> None:
        self.model, self.cache, self.end = model, cache, end
        self.position_B = start_B

    def take(self, token_embed_BD: Tensor, hidden_BD: Tensor) -> Tensor:
        """One step behind another token: z [B, D]."""
        model, positions_B1 = self.model, self.position_B[:, None]
        x_B1D = model.joined(hidden_BD[:, None], token_embed_BD[:, None])
        q, k, v = model.layer.project(x_B1D, model.rotary(positions_B1))
        self.cache.write(0, k, v, positions_B1)
        mask_B1M = (torch.arange(self.end, device=positions_B1.device) <= positions_B1)[:, None]
        attended = attend(q, self.cache.k[0][:, : self.end], self.cache.v[0][:, : self.end], mask_B1M)
        out_B1D = model.layer.finish(x_B1D, attended)
        self.hidden_BD, self.z_BD = out_B1D[:, 0], model.norm(out_B1D)[:, 0]
        self.position_B = self.position_B + 1
        return self.z_BD


def _padding(rows: PackedRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What each block sees of its row, bool [B, N, S]; token [B, S] and block [B, N] numbers; which blocks are real.

    A padded block sees its own keys, as all do, so no query is without any.
    """
    device, counts_B = rows.anchors_X.device, torch.tensor(rows.counts)
    lengths_B = torch.tensor(rows.lengths)
    first_B, start_B = counts_B.cumsum(0) - counts_B, lengths_B.cumsum(0) - lengths_B
    slots_N, offset_S = torch.arange(max(1, int(counts_B.max()))), torch.arange(int(lengths_B.max()))
    real_BN = slots_N < counts_B[:, None]
    blocks_BN = torch.where(real_BN, first_B[:, None] + slots_N, 0).to(device)
    tokens_BS = torch.where(offset_S < lengths_B[:, None], start_B[:, None] + offset_S, 0).to(device)
    real_BN = real_BN.to(device)
    before_BN = (rows.anchors_X - rows.starts_X)[blocks_BN]
    context_BNS = (offset_S.to(device) < before_BN[..., None]) & real_BN[..., None]
    return context_BNS, tokens_BS, blocks_BN, real_BN
