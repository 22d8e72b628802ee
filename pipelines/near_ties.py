"""Where two outputs of one request part, and how nearly their tokens tied there."""

from collections.abc import Sequence

import torch

from domino_core.engine import Request
from domino_core.penalties import TokenCounts, adjusted_logits
from domino_core.sampling import RowSampling, target_noise
from domino_core.target_model import Target


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two outputs differ, an end included; None if they are the same."""
    if list(one) == list(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@torch.inference_mode()
def score_gap(target: Target, request: Request, said: Sequence[int], one: int | None, other: int | None) -> float:
    """By how many nats the scores of two next tokens differ: logits as the request asks, and its noise at temperature.

    Infinite where an output ended: ends are tokens too, so that is no tie.
    """
    if one is None or other is None:
        return float("inf")
    device, params = target.device, request.sampling
    ids_1T = torch.tensor([[*request.prompt_ids, *said]], device=device)
    start_1 = torch.zeros(1, dtype=torch.int64, device=device)
    hidden_1TD, _ = target.forward(ids_1T, start_1, target.new_cache(*ids_1T.shape), ())
    logits_11V = target.logits(hidden_1TD[:, -1:]).float()
    sampling = RowSampling.stack([params], device)
    counts = TokenCounts.allocate(1, logits_11V.shape[-1], device)
    counts.start(0, ids_1T[0, : len(request.prompt_ids)])
    counts.output_BV[0] = ids_1T[0, len(request.prompt_ids) :].bincount(minlength=logits_11V.shape[-1])
    scores_11V = adjusted_logits(logits_11V, ids_1T[:, :0], sampling.adjustment, counts)
    noise_11V = target_noise(sampling, torch.tensor([[len(said)]], device=device), logits_11V.shape[-1])
    if noise_11V is not None:
        scores_11V = scores_11V + params.temperature * noise_11V
    return abs(float(scores_11V[0, 0, one] - scores_11V[0, 0, other]))
