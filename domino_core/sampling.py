"""From logits to tokens: greedy, or sampling with noise that belongs to (seed, output position) and to nothing else.

The token at output position i of a request is argmax_v(log p_i(v) + g(seed, i, v)), where p_i is the target's
distribution after temperature, top-k and top-p, and g is standard Gumbel noise. By the Gumbel-max identity that token
is a draw from p_i; because g is a pure function of (seed, i, v), it is the same draw however the logits were come by.
The drafter draws with the same g from its own distribution, and a draft is accepted when it is the target's token. So
speculation cannot change a request's output, whatever is drafted or verified, and whoever else is in the batch.

Letters: B rows · Q drafts per block · T tokens of a forward pass · V vocabulary · X any number of leading dimensions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this temperature a request is greedy (the published implementation and vLLM draw the line at the same place).
GREEDY_TEMPERATURE = 1e-5
# Beyond these a setting means what it means here, and would not fit its tensor.
LARGEST_TOP_K = 2**31 - 1
SMALLEST_TOP_P = 2.0**-126  # float32's; 0 would keep no token at all


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request turns logits into tokens. `temperature=0` is greedy and ignores the rest; `top_k=0` is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be a finite number ≥ 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1] (1 is off)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be ≥ 0 (0 is off)")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must fit in 64 signed bits")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """The settings of the rows of a batch as tensors, with what the host needs to know to skip work.

    `top_k_width` is the widest top-k of the sampled rows, or 0 when one of them has none: its sort cannot be bounded.
    """

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    seed_B: Tensor
    greedy_B: Tensor
    greedy: bool
    truncated: bool
    top_k_width: int

    @classmethod
    def stack(cls, rows: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "RowSampling":
        sampled = [row for row in rows if not row.greedy]
        top_ps = [1.0 if row.greedy else max(row.top_p, SMALLEST_TOP_P) for row in rows]
        top_ks = [0 if row.greedy else min(row.top_k, LARGEST_TOP_K) for row in rows]
        bounded = bool(sampled) and all(row.top_k > 0 for row in sampled)
        return cls(
            temperature_B=torch.tensor([1.0 if row.greedy else row.temperature for row in rows], device=device),
            top_p_B=torch.tensor(top_ps, device=device),
            top_k_B=torch.tensor(top_ks, device=device),
            seed_B=torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device),
            greedy_B=torch.tensor([row.greedy for row in rows], dtype=torch.bool, device=device),
            greedy=not sampled,
            truncated=any(row.top_k > 0 or row.top_p < 1 for row in sampled),
            top_k_width=max(row.top_k for row in sampled) if bounded else 0,
        )


def processed_logits(logits_BTV: Tensor, sampling: RowSampling) -> Tensor:
    """The logits of the distribution that is sampled: temperature, then top-k, then top-p; removed tokens are -inf.

    Top-p keeps the smallest set of most probable tokens (of those top-k left) whose mass reaches top_p. Tokens that tie
    with the last one kept are kept too, so the set does not depend on how a device sorts.
    """
    scaled_BTV = logits_BTV.float() / sampling.temperature_B[:, None, None]
    if not sampling.truncated:
        return scaled_BTV
    vocabulary = scaled_BTV.shape[-1]
    width = min(sampling.top_k_width or vocabulary, vocabulary)
    descending_BTW = scaled_BTV.topk(width, dim=-1).values
    rank_W = torch.arange(width, device=scaled_BTV.device)
    limit_B = torch.where(sampling.top_k_B > 0, sampling.top_k_B, vocabulary)
    in_top_k_BTW = (rank_W < limit_B[:, None, None]).expand_as(descending_BTW)
    probs_BTW = descending_BTW.masked_fill(~in_top_k_BTW, -torch.inf).softmax(-1)
    mass_before_BTW = probs_BTW.cumsum(-1) - probs_BTW
    # top_p = 1 keeps everything: a running sum in float32 may pass 1 before its end.
    top_p_B = torch.where(sampling.top_p_B < 1, sampling.top_p_B, torch.inf)
    kept_BTW = in_top_k_BTW & (mass_before_BTW < top_p_B[:, None, None])
    lowest_BT1 = descending_BTW.masked_fill(~kept_BTW, torch.inf).amin(-1, keepdim=True)
    return scaled_BTV.masked_fill(scaled_BTV < lowest_BT1, -torch.inf)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's output function (Steele, Lea, Flood 2014) on wrapping int64; masks make `>>` logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, the increment of splitmix64, as a signed number


def gumbel_noise(seed_X: Tensor, position_X: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise [X, V] in float32, a pure function of (seed, output position, token).

    Each (seed, position) keys a splitmix64 stream and token v reads its v-th number. Integer arithmetic is the same on
    every device; the logarithms are float64, so that rounding to float32 hides how each device computes them.
    """
    key_X = _mix(_mix(seed_X + _GOLDEN) ^ (position_X * _GOLDEN + 1))
    step_V = torch.arange(1, vocabulary + 1, device=key_X.device) * _GOLDEN
    bits_XV = (_mix(key_X[..., None] + step_V) >> 12) & ((1 << 52) - 1)
    uniform_XV = (bits_XV.double() + 0.5) * 2.0**-52  # exact, and strictly inside (0, 1)
    return uniform_XV.log_().neg_().log_().neg_().float()


def position_noise(sampling: RowSampling, position_BT: Tensor, vocabulary: int) -> Tensor | None:
    """The noise [B, T, V] of output positions of a batch's rows; None if every row is greedy."""
    return None if sampling.greedy else gumbel_noise(sampling.seed_B[:, None], position_BT, vocabulary)


def draw(logits_BTV: Tensor, sampling: RowSampling, noise_BTV: Tensor | None) -> Tensor:
    """The tokens [B, T] for the given logits: their argmax, with the positions' noise in rows that sample.

    Drafter and target both come through here, with the same noise, which is what makes their draws agree.
    """
    # max, not argmax: the same index (the first of equals), and three times as fast on a CPU.
    if noise_BTV is None:
        return logits_BTV.max(-1).indices
    sampled_BT = (processed_logits(logits_BTV, sampling) + noise_BTV).max(-1).indices
    return torch.where(sampling.greedy_B[:, None], logits_BTV.max(-1).indices, sampled_BT)


def count_accepted(drafts_BQ: Tensor, drawn_BT: Tensor) -> Tensor:
    """How many leading drafts equal the target's own tokens, [B]. drawn has T = Q+1 columns, one beyond the drafts."""
    return (drafts_BQ == drawn_BT[:, :-1]).int().cumprod(-1).sum(-1)
