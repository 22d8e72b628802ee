"""The parallel draft backbone (DFlash): one non-causal pass gives the hidden states of all slots of a block.

A block is [anchor, MASK, …, MASK]. Its slots see each other and, in every layer, keys and values made from the target's
features of the tokens before the anchor (never the anchor's own: that feature does not exist yet when drafting starts).

Drafting: B rows · K slots · T context tokens of this pass · M keys
Training: T tokens of all rows, end to end · X blocks · Y = X·K slots
D hidden · C width of the concatenated features · H, J query and key/value heads · d head width
"""

from typing import cast

import torch
from torch import Tensor, nn

from domino_core.block_attention import BlockAttention
from domino_core.config import DrafterConfig
from domino_core.layers import KVCache, RMSNorm, Rotary, SwiGLU, apply_rotary, attend, rotary_cos_sin


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from context and block through the same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        return apply_rotary(self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim))), rotary)

    def keys_values(self, x_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[B, T, J, d] each."""
        k_BTJd = self.k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        return apply_rotary(k_BTJd, rotary), self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(self, hidden_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value of the block's own slots."""
        x_BTD = self.input_layernorm(hidden_BTD)
        return self.self_attn.queries(x_BTD, rotary), *self.self_attn.keys_values(x_BTD, rotary)

    def finish(self, hidden_BTD: Tensor, attended_BTHd: Tensor) -> Tensor:
        """What attention over context and block gave, then the MLP."""
        hidden_BTD = hidden_BTD + self.self_attn.o_proj(attended_BTHd.flatten(-2))
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))

    def forward(
        self,
        hidden_YD: Tensor,
        context_TD: Tensor,
        block_rotary: Rotary,
        context_rotary: Rotary,
        attention: BlockAttention,
    ) -> Tensor:
        """All blocks of all rows at once, for training."""
        context = self.self_attn.keys_values(context_TD, context_rotary)
        return self.finish(hidden_YD, attention(*self.project(hidden_YD, block_rotary), *context))


class Backbone(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def compile_layers(self) -> None:
        """Have the layers' training pass compiled at its first call: with block_attention.FlexAttention, on a GPU."""
        for layer in self._layers():
            layer.compile(dynamic=True)

    def project_context(self, features_BTC: Tensor) -> Tensor:
        """The target's features as the context vector that every layer turns into keys and values: [B, T, D]."""
        if not torch.is_autocast_enabled(features_BTC.device.type):
            features_BTC = features_BTC.to(self.dtype)
        return self.hidden_norm(self.fc(features_BTC))

    def forward(
        self,
        embeds_XKD: Tensor,
        context_TD: Tensor,
        block_positions_XK: Tensor,
        context_positions_T: Tensor,
        attention: BlockAttention,
    ) -> Tensor:
        """z of every slot of every block of all rows in one pass, for training: [X, K, D]."""
        rotaries = self._rotary(block_positions_XK.flatten()), self._rotary(context_positions_T)
        hidden_YD = embeds_XKD.flatten(0, 1)
        for layer in self._layers():
            hidden_YD = layer(hidden_YD, context_TD, *rotaries, attention)
        return self.norm(hidden_YD).view(embeds_XKD.shape)

    def extend_context(self, cache: KVCache, context_BTD: Tensor, positions_BT: Tensor) -> None:
        """Write every layer's keys and values of new context tokens to their positions in the cache."""
        rotary = self._rotary(positions_BT)
        for index, layer in enumerate(self._layers()):
            cache.write(index, *layer.self_attn.keys_values(context_BTD, rotary), positions_BT)

    def draft(self, cache: KVCache, embeds_BKD: Tensor, start_B: Tensor, num_context: int | None = None) -> Tensor:
        """One block per row, z [B, K, D]: the same numbers as forward, from the cached context.

        start: position of the anchor = context entries that count in this row. The block's own keys lie in the cache at
        start..start+K-1 during the pass only: they are not context, and the next extend_context overwrites them.
        num_context = max(start), for callers that know it: reading it from the device makes the host wait.
        """
        num_slots = embeds_BKD.shape[1]
        positions_BK = start_B[:, None] + torch.arange(num_slots, device=start_B.device)
        rotary = self._rotary(positions_BK)
        end = num_slots + (int(start_B.max()) if num_context is None else num_context)
        assert end <= cache.length, f"block ends at {end}, the cache holds {cache.length}"
        mask = None
        if len(start_B) > 1:  # a lone row needs no mask: everything up to `end` is its own
            mask = (torch.arange(end, device=start_B.device) < start_B[:, None] + num_slots)[:, None]
        hidden_BKD = embeds_BKD
        for index, layer in enumerate(self._layers()):
            q, k, v = layer.project(hidden_BKD, rotary)
            cache.write(index, k, v, positions_BK)
            attended = attend(q, cache.k[index][:, :end], cache.v[index][:, :end], mask)
            hidden_BKD = layer.finish(hidden_BKD, attended)
        return self.norm(hidden_BKD)

    def _rotary(self, positions_BT: Tensor) -> Rotary:
        return rotary_cos_sin(positions_BT, self.config.head_dim, self.config.rope_theta)

    def _layers(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], self.layers)  # ModuleList is typed by its base class
