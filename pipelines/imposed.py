"""An acceptance that a benchmark imposes: random weights of real shapes then decode at the τ of a trained drafter.

What a round costs depends on how many drafts are made, verified and kept, and not on what they say. So the speed at
a given τ can be measured without the drafter that reaches it. Whatever is measured so has to say so.

B rows · Q drafts of this round · T = Q+1 tokens verified · V vocabulary
"""

import math

import torch
from torch import Tensor

from domino_core.sampling import ACCEPT_STREAM, RowSampling, draw, uniform_noise

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def survival(tau: float, num_drafts: int) -> list[float]:
    """s_1 ≥ s_2 ≥ …: the probability that at least i drafts are accepted, s_i = a^i with Σ s_i = τ - 1."""
    if not 1.0 <= tau <= num_drafts + 1.0:
        raise ValueError(f"tau {tau} cannot be had: {num_drafts} drafts give 1 to {num_drafts + 1} tokens a round")
    low, high = 0.0, 1.0
    for _ in range(60):  # the sum grows with a
        middle = (low + high) / 2.0
        if 1.0 + sum(middle**i for i in range(1, num_drafts + 1)) < tau:
            low = middle
        else:
            high = middle
    return [high**i for i in range(1, num_drafts + 1)]


class ImposedAcceptance:
    """A sampling.AcceptRule with survival probabilities in place of a comparison; tokens are the target's own draws.

    A row's noise moves on by the golden ratio from round to round, from a start that is hashed from its index: over n
    rounds each draw comes as often as it should to within a few rounds, where independent noise would need thousands of
    rounds for a τ that is right to a percent. The host is not asked for anything, so the rule can be captured in a CUDA
    graph, and `impose` changes what a captured graph does: it writes into the tensor that the graph reads.
    """

    def __init__(self, num_drafts: int, max_rows: int, device: torch.device | str) -> None:
        row_B = torch.arange(max_rows, device=device)
        self.survival_Q = torch.zeros(num_drafts, dtype=torch.float64, device=device)
        self.start_B = uniform_noise(row_B, torch.zeros_like(row_B), 1, ACCEPT_STREAM)[:, 0]
        self.rounds = torch.zeros((), dtype=torch.float64, device=device)

    def impose(self, tau: float) -> None:
        """From the next round on, whole blocks give τ tokens on average; rounds that verify less give less."""
        self.survival_Q.copy_(torch.tensor(survival(tau, len(self.survival_Q)), dtype=torch.float64))

    def __call__(
        self,
        sampling: RowSampling,
        drafts_BQ: Tensor,
        draft_logits_BQV: Tensor | None,
        logits_BTV: Tensor,
        noise_BTV: Tensor | None,
        position_BT: Tensor,
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_drafts = drafts_BQ.shape
        self.rounds.add_(1.0)
        u_B = torch.frac(self.start_B[:num_rows] + self.rounds * GOLDEN)
        accepted_B = (u_B[:, None] < self.survival_Q[:num_drafts]).sum(-1)
        return accepted_B, draw(logits_BTV, noise_BTV)
