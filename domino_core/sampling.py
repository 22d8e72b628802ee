"""From logits to tokens, and which drafts count: greedy, or with noise that belongs to (seed, output position) alone.

The token at output position i of a request is argmax_v(log p_i(v) + g(seed, i, v)), where p_i is the target's
distribution after temperature, min-p, top-k and top-p, and g is standard Gumbel noise. By the Gumbel-max identity that
token is a draw from p_i; because g is a pure function of (seed, i, v), it is the same draw however the logits were come
by. A draft is accepted when it is that token. So speculation cannot change a request's output, whatever is drafted or
verified, and whoever else is in the batch. What the drafter draws with is up to the rule (sampling_params.DraftRule).

Rejection sampling is the exception: there drafts and acceptance have noise of their own, and the output has the right
distribution without being plain decoding's.

Letters: B rows · Q drafts per block · T = Q+1 tokens verified · V vocabulary · X any number of leading dimensions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_core.penalties import Adjustment
from domino_core.sampling_params import SamplingParams

# Beyond these a setting means what it means here, and would not fit its tensor.
LARGEST_TOP_K = 2**31 - 1
SMALLEST_TOP_P = 2.0**-126  # float32's; 0 would keep no token at all

# To how many tokens a sort is bounded when every row has a top-k; beyond the last one it is not.
TOP_K_WIDTHS = (64, 1024)

# Independent noise for independent decisions. A position's target noise draws its token, or replaces a rejected draft.
TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """The settings of the rows of a batch as tensors, with what the host needs to know to skip work.

    `top_k_width`: no sampled row's top-k is wider; 0 when one of them has none: its sort cannot be bounded.
    """

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    log_min_p_B: Tensor
    seed_B: Tensor
    greedy_B: Tensor
    greedy_draft_B: Tensor
    rejection_B: Tensor
    greedy: bool
    truncated: bool
    min_p: bool
    shared_noise: bool
    rejection: bool
    top_k_width: int
    adjustment: Adjustment | None

    @classmethod
    def stack(cls, rows: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "RowSampling":
        sampled = [row for row in rows if not row.greedy]
        top_ps = [1.0 if row.greedy else max(row.top_p, SMALLEST_TOP_P) for row in rows]
        top_ks = [0 if row.greedy else min(row.top_k, LARGEST_TOP_K) for row in rows]
        min_ps = [0.0 if row.greedy else row.min_p for row in rows]
        bounded = bool(sampled) and all(row.top_k > 0 for row in sampled)

        def where(flags: Sequence[bool]) -> Tensor:
            return torch.tensor(flags, dtype=torch.bool, device=device)

        return cls(
            temperature_B=torch.tensor([1.0 if row.greedy else row.temperature for row in rows], device=device),
            top_p_B=torch.tensor(top_ps, device=device),
            top_k_B=torch.tensor(top_ks, device=device),
            log_min_p_B=torch.tensor(min_ps, device=device).log(),
            seed_B=torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device),
            greedy_B=where([row.greedy for row in rows]),
            greedy_draft_B=where([row.rule == "greedy_draft" for row in rows]),
            rejection_B=where([row.rule == "rejection" and not row.greedy for row in rows]),
            greedy=not sampled,
            truncated=any(row.top_k > 0 or row.top_p < 1 for row in sampled),
            min_p=any(row.min_p > 0 for row in sampled),
            shared_noise=all(row.rule == "shared_noise" for row in sampled),
            rejection=any(row.rule == "rejection" for row in sampled),
            top_k_width=_width(max(row.top_k for row in sampled)) if bounded else 0,
            adjustment=Adjustment.stack(rows, device),
        )

    @property
    def kind(self) -> tuple[bool | int, ...]:
        """What decides which operations a round consists of; two batches of one kind differ in numbers alone."""
        return tuple(value for value in vars(self).values() if isinstance(value, bool | int))

    def copy_(self, other: "RowSampling") -> None:
        """Take over the numbers of a batch of the same kind and size, neither with an adjustment."""
        assert self.kind == other.kind
        assert self.adjustment is other.adjustment is None
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                value.copy_(getattr(other, name), non_blocking=True)


def processed_logits(logits_BTV: Tensor, sampling: RowSampling) -> Tensor:
    """The logits of the distribution that is sampled: temperature, min-p, top-k, then top-p; removed tokens are -inf.

    Min-p keeps the tokens that are at least min_p times as probable as the best one. Top-p keeps the smallest set of
    most probable tokens (of those left) whose mass reaches top_p. Tokens that tie with the last one kept are kept too,
    so the set does not depend on how a device sorts. Greedy rows keep all of theirs.
    """
    if sampling.greedy:
        return logits_BTV
    scaled_BTV = logits_BTV.float() / sampling.temperature_B[:, None, None]
    if sampling.min_p:
        lowest_BT1 = scaled_BTV.amax(-1, keepdim=True) + sampling.log_min_p_B[:, None, None]
        scaled_BTV = scaled_BTV.masked_fill(scaled_BTV < lowest_BT1, -torch.inf)
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


def uniform_noise(seed_X: Tensor, position_X: Tensor, count: int, stream: int) -> Tensor:
    """Numbers in (0, 1), [X, count] in float64, a pure function of (seed, output position, stream, index).

    Each (seed, position, stream) keys a splitmix64 stream and index v reads its v-th number: integer arithmetic, the
    same on every device. Keys of streams differ as keys of positions astronomically far apart do.
    """
    key_X = _mix(_mix(seed_X + _GOLDEN) ^ (position_X * _GOLDEN + (1 + stream)))
    step_V = torch.arange(1, count + 1, device=key_X.device) * _GOLDEN
    bits_XV = (_mix(key_X[..., None] + step_V) >> 12) & ((1 << 52) - 1)
    return (bits_XV.double() + 0.5) * 2.0**-52  # exact, and strictly inside (0, 1)


def gumbel_noise(seed_X: Tensor, position_X: Tensor, vocabulary: int, stream: int = TARGET_STREAM) -> Tensor:
    """Standard Gumbel noise [X, V] in float32, a pure function of (seed, output position, stream, token).

    The logarithms are float64, so that rounding to float32 hides how each device computes them.
    """
    if position_X.is_cuda:
        from domino_core.kernels import noise

        return noise.gumbel_noise(seed_X, position_X, vocabulary, stream)
    return uniform_noise(seed_X, position_X, vocabulary, stream).log_().neg_().log_().neg_().float()


def target_noise(sampling: RowSampling, position_BT: Tensor, vocabulary: int) -> Tensor | None:
    """The noise [B, T, V] of output positions of a batch's rows, 0 in greedy ones; None if every row is greedy."""
    if sampling.greedy:
        return None
    noise_BTV = gumbel_noise(sampling.seed_B[:, None], position_BT, vocabulary)
    return noise_BTV.masked_fill_(sampling.greedy_B[:, None, None], 0.0)


def draft_noise(sampling: RowSampling, position_BQ: Tensor, target_noise_BQV: Tensor | None) -> Tensor | None:
    """What the drafter draws with: the target's noise, none (0), or its own, as each row's rule says."""
    if target_noise_BQV is None or sampling.shared_noise:
        return target_noise_BQV
    noise_BQV = target_noise_BQV.masked_fill(sampling.greedy_draft_B[:, None, None], 0.0)
    if sampling.rejection:
        own_BQV = gumbel_noise(sampling.seed_B[:, None], position_BQ, noise_BQV.shape[-1], DRAFT_STREAM)
        noise_BQV = torch.where(sampling.rejection_B[:, None, None], own_BQV, noise_BQV)
    return noise_BQV


def draw(processed_BTV: Tensor, noise_BTV: Tensor | None) -> Tensor:
    """The tokens [B, T] for processed logits: their argmax, with the noise of their positions where it is given.

    Drafter and target both come through here.
    """
    # max, not argmax: the same index (the first of equals), and three times as fast on a CPU.
    return (processed_BTV if noise_BTV is None else processed_BTV + noise_BTV).max(-1).indices


def count_accepted(drafts_BQ: Tensor, drawn_BT: Tensor) -> Tensor:
    """How many leading drafts equal the target's own tokens, [B]. drawn has T = Q+1 columns, one beyond the drafts."""
    return _leading(drafts_BQ == drawn_BT[:, :-1])


def accept(
    sampling: RowSampling,
    drafts_BQ: Tensor,
    draft_logits_BQV: Tensor | None,
    logits_BTV: Tensor,
    noise_BTV: Tensor | None,
    position_BT: Tensor,
) -> tuple[Tensor, Tensor]:
    """(number of drafts accepted [B], tokens [B, T]): of a row's tokens, the accepted drafts and one more count.

    Both logits are processed; the drafter's are those that its drafts were drawn from, and are needed in a batch with
    rejection sampling alone.
    """
    tokens_BT = draw(logits_BTV, noise_BTV)
    accepted_B = count_accepted(drafts_BQ, tokens_BT)
    if not sampling.rejection or not drafts_BQ.shape[1]:
        return accepted_B, tokens_BT
    assert draft_logits_BQV is not None
    assert noise_BTV is not None
    p_BTV, q_BQV = logits_BTV.softmax(-1), draft_logits_BQV.softmax(-1)
    u_BQ = uniform_noise(sampling.seed_B[:, None], position_BT[:, :-1], 1, ACCEPT_STREAM)[..., 0]
    p_BQ = p_BTV[:, :-1].gather(2, drafts_BQ[..., None])[..., 0]
    q_BQ = q_BQV.gather(2, drafts_BQ[..., None])[..., 0]
    kept_B = _leading(u_BQ * q_BQ < p_BQ)
    # Behind the last accepted draft: the rejected one's replacement, or, where all were accepted, one more from p.
    row_B = torch.arange(len(kept_B), device=kept_B.device)
    p_BV, noise_BV = p_BTV[row_B, kept_B], noise_BTV[row_B, kept_B]
    q_BV = torch.cat((q_BQV, torch.zeros_like(q_BQV[:, :1])), dim=1)[row_B, kept_B]
    last_B = (residual(p_BV, q_BV).log() + noise_BV).max(-1).indices
    filled_BT = torch.cat((drafts_BQ, last_B[:, None]), dim=1).scatter(1, kept_B[:, None], last_B[:, None])
    return (
        torch.where(sampling.rejection_B, kept_B, accepted_B),
        torch.where(sampling.rejection_B[:, None], filled_BT, tokens_BT),
    )


AcceptRule = Callable[[RowSampling, Tensor, Tensor | None, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
"""`accept`, or what a benchmark puts in its place: same arguments, same results."""


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """max(p - q, 0), to be normalised: what the target still owes where the drafter's token was rejected.

    A rejection means p < q at one token and so p > q at another; where rounding hides that one, p itself is returned.
    """
    owed_BV = (p_BV - q_BV).clamp_min(0.0)
    return torch.where(owed_BV.sum(-1, keepdim=True) > 0, owed_BV, p_BV)


def _width(top_k: int) -> int:
    """One of few, since a CUDA graph has a fixed one."""
    return next((width for width in TOP_K_WIDTHS if width >= top_k), 0)


def _leading(flags_BQ: Tensor) -> Tensor:
    """How many flags are set before the first that is not, [B]."""
    return flags_BQ.int().cumprod(-1).sum(-1)
