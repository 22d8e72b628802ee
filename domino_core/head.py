"""The Domino head: a GRU over the chosen drafts and a low-rank correction of the base logits (paper section 3.3).

It counts in drafts i = 0..Q-1 of a block, not in slots, so that it does not know the label convention: draft i is text
token a+1+i, and its GRU state has read the anchor a and the drafts before it, i.e. text tokens a..a+i.

B rows or blocks · Q drafts · D hidden · G GRU width · R rank · V vocabulary
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_core.config import DrafterConfig


class PrefixGRU(nn.GRU):
    """PyTorch's GRU (gate order r, z, n), with one step of it beside the fused pass over a sequence."""

    weight_ih_l0: nn.Parameter
    weight_hh_l0: nn.Parameter

    def step(self, x_BD: Tensor, state_BG: Tensor) -> Tensor:
        return torch.gru_cell(x_BD, state_BG, self.weight_ih_l0, self.weight_hh_l0)


class DominoHead(nn.Module):
    """Δ_i = W2 · silu(W1 · [z_i ; s_i]), s_i = GRU(E[anchor], E[draft 0], …, E[draft i-1]), no biases."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        # Names and order are those of the published tensors: prefix_gru.*_l0, embed_proj.0.weight, embed_proj.2.weight.
        self.prefix_gru = PrefixGRU(config.hidden_size, config.gru_hidden_dim, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.vocab_size, bias=False),
        )

    def initial_state(self, num_rows: int) -> Tensor:
        """[B, G] zeros: every block starts anew."""
        return self.prefix_gru.weight_hh_l0.new_zeros(num_rows, self.config.gru_hidden_dim)

    def advance(self, token_embed_BD: Tensor, state_BG: Tensor) -> Tensor:
        """The state after one more token: [B, G]."""
        return self.prefix_gru.step(token_embed_BD, state_BG)

    def hidden_part(self, z_BD: Tensor) -> Tensor:
        """W1's share of the backbone state, [..., R]: it needs no draft, so drafting computes all slots at once."""
        return F.linear(z_BD, self._layer(0).weight[:, : self.config.hidden_size])

    def low_rank(self, hidden_part_BR: Tensor, state_BG: Tensor) -> Tensor:
        """silu(W1 · [z ; s]), [..., R], from hidden_part(z) and the GRU state."""
        return F.silu(hidden_part_BR + F.linear(state_BG, self._layer(0).weight[:, self.config.hidden_size :]))

    def correction_from(self, hidden_part_BR: Tensor, state_BG: Tensor) -> Tensor:
        """Δ [..., V] from hidden_part(z) and the GRU state."""
        return self._layer(2)(self.low_rank(hidden_part_BR, state_BG))

    def correction(self, z_BD: Tensor, state_BG: Tensor) -> Tensor:
        """Δ [..., V] to add to the base logits of this draft."""
        return self.correction_from(self.hidden_part(z_BD), state_BG)

    def block(self, z_BQD: Tensor, read_embeds_BQD: Tensor) -> Tensor:
        """What the last layer multiplies for every draft of whole blocks at once, [B, Q, R]: teacher forcing.

        Zero for the first p drafts, which are not corrected. read_embeds: embeddings of text tokens a..a+Q-1, i.e. what
        the GRU has read last when draft i is due. The same numbers as repeated advance, by the fused GRU.
        """
        first = self.config.pure_draft_prefix_len
        states_BQG, _ = self.prefix_gru(read_embeds_BQD)
        low_BQR = self.low_rank(self.hidden_part(z_BQD[:, first:]), states_BQG[:, first:])
        return F.pad(low_BQR, (0, 0, first, 0))

    @property
    def last_weight(self) -> Tensor:
        """[V, R]: W2, which turns low_rank's result into a correction of the logits."""
        return self._layer(2).weight

    def _layer(self, index: int) -> nn.Linear:
        return cast(nn.Linear, self.embed_proj[index])
