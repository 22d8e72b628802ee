"""The training objective: weighted cross-entropy of base and final logits, as sums and counts. Pure functions.

X blocks of all rows · Q drafts of a block · N = X·Q drafts of all blocks · D hidden · R low rank · V vocabulary ·
J labels of a draft

The logits of a whole batch would be gigabytes (512 blocks · 16 drafts · 151,936 words in float32: 5 GB, twice). So
`block_losses` has them for a chunk of drafts at a time, and turns them into gradients on the spot: nothing is kept for
the backward pass but the gradients of its inputs, and no product is done twice. `whole_losses` is the same by autograd.

Beside the published objective there are two options. Soft labels: cross-entropy with the target's own most likely
tokens, each with its share, instead of the token that was sampled. Slot weights that follow the drafter's confidence
(`reach`): a draft counts as much as it is likely to be reached, i.e. all drafts before it to be right.
"""

from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class BlockLosses:
    """Sums and counts over blocks, 0-dim float32 tensors: the caller adds them up over micro-batches and workers.

    mixed_sum carries the gradient, nothing else does. Accepted lengths are 1 + the leading run of correct drafts,
    teacher-forced (compared with the data, the head reading the data): optimistic beside the measured τ.
    """

    mixed_sum: Tensor  # (1 - λ) · final_sum + λ · base_sum, the base-anchored objective
    final_sum: Tensor  # Σ weight · CE(final)
    base_sum: Tensor  # Σ weight · CE(base)
    weight_sum: Tensor  # of the given weights, whatever `reach` makes of them
    correct_final_sum: Tensor  # drafts whose argmax is the label, of num_labels
    correct_base_sum: Tensor
    num_labels: Tensor  # drafts with a weight
    accepted_final_sum: Tensor  # Σ over blocks, of num_blocks
    accepted_base_sum: Tensor
    num_blocks: Tensor  # blocks with at least one label

    def __add__(self, other: "BlockLosses") -> "BlockLosses":
        return BlockLosses(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def detach(self) -> "BlockLosses":
        return BlockLosses(**{f.name: getattr(self, f.name).detach() for f in fields(self)})

    def objective(self, denominator: Tensor | float) -> Tensor:
        """The loss: mixed_sum / denominator, a step's sum of weights.

        Divide by the sum of weights, not by a count: anything else changes the learning rate with gamma. The published
        1e-6 makes a step without any label a loss of zero.
        """
        return self.mixed_sum / (denominator + 1e-6)


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """What every draft of every block is predicted from, and what it should be. low and last: None without a head.

    labels: the text's tokens, by which drafts are counted as right. likely, shares: soft labels to be trained on in
    their place, whose shares sum to one; or None.
    """

    z_XQD: Tensor
    low_XQR: Tensor | None
    lm_head_VD: Tensor
    last_VR: Tensor | None
    labels_XQ: Tensor
    weights_XQ: Tensor
    likely_XQJ: Tensor | None = None
    shares_XQJ: Tensor | None = None


def logits_of(z_XD: Tensor, low_XR: Tensor | None, lm_head_VD: Tensor, last_VR: Tensor | None) -> tuple[Tensor, Tensor]:
    """Base and final logits, [..., V] each; without a head they are one tensor."""
    base_XV = F.linear(z_XD if torch.is_autocast_enabled(z_XD.device.type) else z_XD.to(lm_head_VD.dtype), lm_head_VD)
    if low_XR is None or last_VR is None:
        return base_XV, base_XV
    return base_XV, base_XV + F.linear(low_XR, last_VR)


def acceptance_weights(weights_XQ: Tensor, losses_XQ: Tensor, reach: float) -> Tensor:
    """Slot weights between the given ones (reach = 0) and the probability that a draft is reached at all (reach = 1).

    Draft i is reached if all drafts before it are right: Π_{j<i} exp(-loss of j), by the drafter's own teacher-forced
    probability of its label. A draft without a weight keeps none. No gradient flows through it.
    """
    before_XQ = F.pad(losses_XQ.detach()[:, :-1], (1, 0)).cumsum(1)
    return (1.0 - reach) * weights_XQ + reach * (weights_XQ > 0) * torch.exp(-before_XQ)


def whole_losses(drafts: Drafts, base_weight: float, reach: float = 0.0) -> BlockLosses:
    """All logits at once, differentiated by autograd: the slow twin. In float32 from the logits on: bfloat16
    log-probabilities are too coarse to train on.

    Both terms are in mixed_sum at λ = 0 and 1 too, so that every parameter has a (maybe zero) gradient, on which DDP
    insists.
    """
    labels_XQ, weights_XQ = drafts.labels_XQ, drafts.weights_XQ
    base_XQV, final_XQV = logits_of(drafts.z_XQD, drafts.low_XQR, drafts.lm_head_VD, drafts.last_VR)
    base_XQ, final_XQ = (_cross_entropy(logits_XQV, drafts) for logits_XQV in (base_XQV, final_XQV))
    base_XQ, final_XQ = (each * acceptance_weights(weights_XQ, each, reach) for each in (base_XQ, final_XQ))
    mixed_sum = (1.0 - base_weight) * final_XQ.sum() + base_weight * base_XQ.sum()
    final_right_XQ, base_right_XQ = final_XQV.argmax(-1) == labels_XQ, base_XQV.argmax(-1) == labels_XQ
    return _gather(mixed_sum, final_XQ.sum(), base_XQ.sum(), final_right_XQ, base_right_XQ, weights_XQ)


def _cross_entropy(logits_XQV: Tensor, drafts: Drafts) -> Tensor:
    logprobs_XQV = logits_XQV.float().log_softmax(-1)
    if drafts.likely_XQJ is None or drafts.shares_XQJ is None:
        return -logprobs_XQV.gather(-1, drafts.labels_XQ[..., None])[..., 0]
    return -(logprobs_XQV.gather(-1, drafts.likely_XQJ) * drafts.shares_XQJ).sum(-1)


def block_losses(drafts: Drafts, base_weight: float, chunk_tokens: int, reach: float = 0.0) -> BlockLosses:
    """The same, `chunk_tokens` drafts at a time (whole blocks, where weights follow the drafts before). Differentiable
    in z, low and last, to the first order.
    """
    kind, shape = drafts.lm_head_VD.dtype, drafts.labels_XQ.shape
    blocks_at_once = max(1, chunk_tokens // shape[1])
    soft_NJ = None
    if drafts.likely_XQJ is not None and drafts.shares_XQJ is not None:
        soft_NJ = drafts.likely_XQJ.flatten(0, 1), drafts.shares_XQJ.flatten(0, 1)
    found = _ChunkedLosses.apply(
        drafts.z_XQD.flatten(0, 1).to(kind),
        None if drafts.low_XQR is None else drafts.low_XQR.flatten(0, 1).to(kind),
        drafts.lm_head_VD,
        None if drafts.last_VR is None else drafts.last_VR.to(kind),
        drafts.labels_XQ.flatten(),
        soft_NJ,
        drafts.weights_XQ,
        (base_weight, reach),
        blocks_at_once * shape[1] if reach else chunk_tokens,
    )
    mixed_sum, final_sum, base_sum, final_right_N, base_right_N = cast(tuple[Tensor, ...], found)
    return _gather(
        mixed_sum, final_sum, base_sum, final_right_N.view(shape), base_right_N.view(shape), drafts.weights_XQ
    )


class _ChunkedLosses(torch.autograd.Function):
    """Forward and backward in one: see the module's docstring."""

    @staticmethod
    def forward(  # noqa: PLR0913 (autograd's functions have no self to keep what never changes)
        ctx: Any,
        z_ND: Tensor,
        low_NR: Tensor | None,
        lm_head_VD: Tensor,
        last_VR: Tensor | None,
        labels_N: Tensor,
        soft_NJ: tuple[Tensor, Tensor] | None,
        weights_XQ: Tensor,
        mix: tuple[float, float],
        chunk_tokens: int,
    ) -> tuple[Tensor, ...]:
        (base_weight, reach), num_drafts = mix, weights_XQ.shape[1]
        with torch.autocast(z_ND.device.type, enabled=False):
            weights_N2 = weights_XQ.flatten()[:, None].repeat(1, 2)  # of final and base
            grad_z_ND = torch.empty_like(z_ND)
            grad_low_NR = None if low_NR is None else torch.empty_like(low_NR)
            grad_last_VR = None if last_VR is None else torch.zeros_like(last_VR, dtype=torch.float32)
            losses_N2 = z_ND.new_empty(len(z_ND), 2, dtype=torch.float32)  # of final and base
            best_N2 = torch.empty_like(losses_N2, dtype=torch.int64)
            for first in range(0, len(z_ND), chunk_tokens):
                part = slice(first, first + chunk_tokens)
                base_NV = z_ND[part] @ lm_head_VD.t()
                final_NV = base_NV
                if low_NR is not None and last_VR is not None:
                    final_NV = torch.addmm(base_NV, low_NR[part], last_VR.t())
                work = Chunk(
                    base_NV=base_NV,
                    final_NV=final_NV,
                    labels_NJ=labels_N[part, None] if soft_NJ is None else soft_NJ[0][part],
                    shares_NJ=None if soft_NJ is None else soft_NJ[1][part],
                    weights_N2=weights_N2[part],
                    losses_N2=losses_N2[part],
                    best_N2=best_N2[part],
                )
                # From here on both hold gradients: final_NV of the final term alone, base_NV of both together.
                to_gradients(work, base_weight, reach, num_drafts)
                torch.mm(base_NV, lm_head_VD, out=grad_z_ND[part])
                if low_NR is not None and last_VR is not None:
                    assert grad_low_NR is not None
                    assert grad_last_VR is not None
                    torch.mm(final_NV, last_VR, out=grad_low_NR[part])
                    grad_last_VR += final_NV.t() @ low_NR[part]
                del base_NV, final_NV
            final_sum, base_sum = (losses_N2 * weights_N2).sum(0)
            right_N2 = best_N2 == labels_N[:, None]
        ctx.gradients = grad_z_ND, grad_low_NR, grad_last_VR
        mixed_sum = (1.0 - base_weight) * final_sum + base_weight * base_sum
        found = (mixed_sum, final_sum.clone(), base_sum.clone(), *right_N2.unbind(1))
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by = grads[0]
        grad_z_ND, grad_low_NR, grad_last_VR = ctx.gradients
        del ctx.gradients  # a second backward pass would be told wrong numbers by the scaling in place
        of_low = None if grad_low_NR is None else grad_low_NR.mul_(by)
        of_last = None if grad_last_VR is None else grad_last_VR.mul_(by).to(grad_z_ND.dtype)
        return grad_z_ND.mul_(by), of_low, None, of_last, None, None, None, None, None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Logits of some drafts on their way to gradients, in place. base and final may be one tensor.

    shares: of the labels, summing to one; None with one label each. weights, losses, best: of final, base.
    """

    base_NV: Tensor
    final_NV: Tensor
    labels_NJ: Tensor
    shares_NJ: Tensor | None
    weights_N2: Tensor
    losses_N2: Tensor
    best_N2: Tensor


def to_gradients(chunk: Chunk, base_weight: float, reach: float, num_drafts: int) -> None:
    """Turn logits into what (1 - λ) · w · CE(final) + λ · w · CE(base) does to them, in place.

    base_NV comes out with the sum of both, for the base logits are in the final ones too; final_NV with the final
    term's. Filled in: losses; best, the argmax of each; and where `reach` is not zero, weights.
    """
    if chunk.base_NV.is_cuda:
        from domino_core.kernels.loss import gradients_on_card, statistics_on_card, to_gradients_on_card

        if not reach:
            to_gradients_on_card(chunk, base_weight)
            return
        log_sums_N2 = statistics_on_card(chunk)
        _follow_acceptance(chunk, reach, num_drafts)
        gradients_on_card(chunk, log_sums_N2, base_weight)
        return
    log_sums_N2 = _statistics(chunk)
    if reach:
        _follow_acceptance(chunk, reach, num_drafts)
    if chunk.final_NV is chunk.base_NV:
        _one_to_gradient(chunk.base_NV, chunk, log_sums_N2[:, 1], chunk.weights_N2[:, 1])
        return
    _one_to_gradient(chunk.final_NV, chunk, log_sums_N2[:, 0], (1.0 - base_weight) * chunk.weights_N2[:, 0])
    _one_to_gradient(chunk.base_NV, chunk, log_sums_N2[:, 1], base_weight * chunk.weights_N2[:, 1])
    chunk.base_NV.add_(chunk.final_NV)


def _follow_acceptance(chunk: Chunk, reach: float, num_drafts: int) -> None:
    for weights_N, losses_N in zip(chunk.weights_N2.unbind(1), chunk.losses_N2.unbind(1), strict=True):
        given_XQ = weights_N.view(-1, num_drafts)
        weights_N.copy_(acceptance_weights(given_XQ, losses_N.view(-1, num_drafts), reach).flatten())


def _statistics(chunk: Chunk) -> Tensor:
    """Fills losses and best; returns the logarithms of the sums of exponentials, of final and base."""
    log_sums_N2 = torch.empty_like(chunk.losses_N2)
    for column, logits_NV in enumerate((chunk.final_NV, chunk.base_NV)):
        chunk.best_N2[:, column] = logits_NV.argmax(1)
        log_sums_N2[:, column] = logits_NV.float().logsumexp(1)
        own_NJ = logits_NV.gather(1, chunk.labels_NJ).float()
        own_N = own_NJ[:, 0] if chunk.shares_NJ is None else (own_NJ * chunk.shares_NJ).sum(1)
        chunk.losses_N2[:, column] = log_sums_N2[:, column] - own_N
        if chunk.final_NV is chunk.base_NV:
            for values_N2 in (chunk.best_N2, log_sums_N2, chunk.losses_N2):
                values_N2[:, 1] = values_N2[:, 0]
            break
    return log_sums_N2


def _one_to_gradient(logits_NV: Tensor, chunk: Chunk, log_sums_N: Tensor, weights_N: Tensor) -> None:
    """logits -> weight · (softmax - labels), in place."""
    wide_NV = logits_NV.float()  # itself, if it is float32 already
    shares_NJ = torch.ones_like(log_sums_N[:, None]) if chunk.shares_NJ is None else chunk.shares_NJ
    wide_NV.sub_(log_sums_N[:, None]).exp_().scatter_add_(1, chunk.labels_NJ, -shares_NJ)
    logits_NV.copy_(wide_NV.mul_(weights_N[:, None]))


def _gather(
    mixed_sum: Tensor,
    final_sum: Tensor,
    base_sum: Tensor,
    final_right_XQ: Tensor,
    base_right_XQ: Tensor,
    weights_XQ: Tensor,
) -> BlockLosses:
    labelled_XQ = weights_XQ > 0
    has_label_X = labelled_XQ.any(1)
    final_right_XQ, base_right_XQ = final_right_XQ & labelled_XQ, base_right_XQ & labelled_XQ
    return BlockLosses(
        mixed_sum=mixed_sum,
        final_sum=final_sum.detach(),
        base_sum=base_sum.detach(),
        weight_sum=weights_XQ.sum(),
        correct_final_sum=final_right_XQ.sum().float(),
        correct_base_sum=base_right_XQ.sum().float(),
        num_labels=labelled_XQ.sum().float(),
        accepted_final_sum=_accepted_lengths(final_right_XQ, has_label_X),
        accepted_base_sum=_accepted_lengths(base_right_XQ, has_label_X),
        num_blocks=has_label_X.sum().float(),
    )


def _accepted_lengths(right_XQ: Tensor, has_label_X: Tensor) -> Tensor:
    run_X = right_XQ.int().cumprod(1).sum(1)
    return ((1 + run_X) * has_label_X).sum().float()
