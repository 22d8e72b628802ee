"""The drafts of one block from its backbone states: the head's loop, for an engine that has its own sampling.

decode.draft_block does the same for the torch engine, with that engine's noise. No vLLM here.

B rows · Q drafts · T drafts drawn at once · D hidden · V vocabulary
"""

from collections.abc import Callable

import torch
from torch import Tensor

from domino_core.head import DominoHead

Draw = Callable[[Tensor, int], Tensor]
"""(logits_BTV, number of their first draft) -> tokens_BT. It keeps what rejection sampling will ask for."""


def roll_out(
    head: DominoHead | None,
    embed: Callable[[Tensor], Tensor],
    anchor_B: Tensor,
    z_BQD: Tensor,
    base_BQV: Tensor,
    draw: Draw,
) -> Tensor:
    """Drafts [B, Q]: the first p from the base logits alone, each later one after the head has read those before it.

    z: of the predicting slots. embed: token ids to the target's embeddings.
    """
    num_drafts = base_BQV.shape[1]
    prefix = num_drafts if head is None else min(head.config.pure_draft_prefix_len, num_drafts)
    tokens = [draw(base_BQV[:, :prefix], 0)] if prefix else []
    if head is not None and prefix < num_drafts:
        hidden_part_BQR = head.hidden_part(z_BQD)
        state_BG = head.initial_state(len(anchor_B))
        for token_B in torch.cat((anchor_B[:, None], *tokens), dim=1).unbind(1):
            state_BG = head.advance(embed(token_B), state_BG)
        for index in range(prefix, num_drafts):
            logits_BV = base_BQV[:, index] + head.correction_from(hidden_part_BQR[:, index], state_BG)
            tokens.append(draw(logits_BV[:, None], index))
            if index + 1 < num_drafts:
                state_BG = head.advance(embed(tokens[-1][:, 0]), state_BG)
    return torch.cat(tokens, dim=1)


def most_likely(logits_BTV: Tensor, first: int) -> Tensor:
    """The greedy Draw."""
    return logits_BTV.argmax(-1)


class Proposals:
    """A Draw from softmax(logits / T) that keeps these distributions, q of rejection sampling.

    temperature: of each row. Rows below `greedy_below` draft their most likely token; what is kept of them is not used.
    """

    def __init__(self, temperature_B: Tensor, greedy_below: float) -> None:
        self.greedy_B1 = (temperature_B < greedy_below)[:, None]
        self.temperature_B11 = temperature_B.masked_fill(self.greedy_B1[:, 0], 1.0)[:, None, None]
        self.drawn_from: list[Tensor] = []

    def __call__(self, logits_BTV: Tensor, first: int) -> Tensor:
        q_BTV = (logits_BTV.float() / self.temperature_B11).softmax(-1)
        self.drawn_from.append(q_BTV)
        # The largest of q / exponential noise is a draw from q, without a wait for the device as multinomial has.
        noise_BTV = torch.empty_like(q_BTV).exponential_()
        return torch.where(self.greedy_B1, logits_BTV.argmax(-1), (q_BTV / noise_BTV).argmax(-1))

    def distributions(self) -> Tensor:
        """q of all drafts, [B, Q, V]."""
        return torch.cat(self.drawn_from, dim=1)
