"""The training objective: weighted cross-entropy of base and final logits, as sums and counts. Pure functions.

X blocks of all rows · Q drafts of a block · N = X·Q drafts of all blocks · D hidden · R low rank · V vocabulary

The logits of a whole batch would be gigabytes (512 blocks · 16 drafts · 151,936 words in float32: 5 GB, twice). So
`block_losses` has them for a chunk of drafts at a time, and turns them into gradients on the spot: nothing is kept for
the backward pass but the gradients of its inputs, and no product is done twice. `whole_losses` is the same by autograd.
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
    weight_sum: Tensor
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
    """What every draft of every block is predicted from, and what it should be. low and last: None without a head."""

    z_XQD: Tensor
    low_XQR: Tensor | None
    lm_head_VD: Tensor
    last_VR: Tensor | None
    labels_XQ: Tensor
    weights_XQ: Tensor


def logits_of(z_XD: Tensor, low_XR: Tensor | None, lm_head_VD: Tensor, last_VR: Tensor | None) -> tuple[Tensor, Tensor]:
    """Base and final logits, [..., V] each; without a head they are one tensor."""
    base_XV = F.linear(z_XD if torch.is_autocast_enabled(z_XD.device.type) else z_XD.to(lm_head_VD.dtype), lm_head_VD)
    if low_XR is None or last_VR is None:
        return base_XV, base_XV
    return base_XV, base_XV + F.linear(low_XR, last_VR)


def whole_losses(drafts: Drafts, base_weight: float) -> BlockLosses:
    """All logits at once, differentiated by autograd: the slow twin. In float32 from the logits on: bfloat16
    log-probabilities are too coarse to train on.

    Both terms are in mixed_sum at λ = 0 and 1 too, so that every parameter has a (maybe zero) gradient, on which DDP
    insists.
    """
    labels_XQ, weights_XQ = drafts.labels_XQ, drafts.weights_XQ
    base_XQV, final_XQV = logits_of(drafts.z_XQD, drafts.low_XQR, drafts.lm_head_VD, drafts.last_VR)
    base_N, final_N = (
        F.cross_entropy(logits.float().flatten(0, 1), labels_XQ.flatten(), reduction="none") * weights_XQ.flatten()
        for logits in (base_XQV, final_XQV)
    )
    mixed_sum = (1.0 - base_weight) * final_N.sum() + base_weight * base_N.sum()
    final_right_XQ, base_right_XQ = final_XQV.argmax(-1) == labels_XQ, base_XQV.argmax(-1) == labels_XQ
    return _gather(mixed_sum, final_N.sum(), base_N.sum(), final_right_XQ, base_right_XQ, weights_XQ)


def block_losses(drafts: Drafts, base_weight: float, chunk_tokens: int) -> BlockLosses:
    """The same, `chunk_tokens` drafts at a time. Differentiable in z, low and last, to the first order."""
    kind = drafts.lm_head_VD.dtype
    found = _ChunkedLosses.apply(
        drafts.z_XQD.flatten(0, 1).to(kind),
        None if drafts.low_XQR is None else drafts.low_XQR.flatten(0, 1).to(kind),
        drafts.lm_head_VD,
        None if drafts.last_VR is None else drafts.last_VR.to(kind),
        drafts.labels_XQ.flatten(),
        drafts.weights_XQ.flatten(),
        base_weight,
        chunk_tokens,
    )
    mixed_sum, final_sum, base_sum, final_right_N, base_right_N = cast(tuple[Tensor, ...], found)
    shape = drafts.labels_XQ.shape
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
        weights_N: Tensor,
        base_weight: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(z_ND.device.type, enabled=False):
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
                # From here on both hold gradients: final_NV of the final term alone, base_NV of both together.
                to_gradients(
                    base_NV, final_NV, labels_N[part], weights_N[part], base_weight, losses_N2[part], best_N2[part]
                )
                torch.mm(base_NV, lm_head_VD, out=grad_z_ND[part])
                if low_NR is not None and last_VR is not None:
                    assert grad_low_NR is not None
                    assert grad_last_VR is not None
                    torch.mm(final_NV, last_VR, out=grad_low_NR[part])
                    grad_last_VR += final_NV.t() @ low_NR[part]
                del base_NV, final_NV
            final_sum, base_sum = (losses_N2 * weights_N[:, None]).sum(0)
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
        return grad_z_ND.mul_(by), of_low, None, of_last, None, None, None, None


def to_gradients(
    base_NV: Tensor,
    final_NV: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    base_weight: float,
    losses_N2: Tensor,
    best_N2: Tensor,
) -> None:
    """Turn logits into what (1 - λ) · w · CE(final) + λ · w · CE(base) does to them, in place.

    base_NV comes out with the sum of both, for the base logits are in the final ones too; final_NV with the final
    term's. They may be one tensor. losses: CE(final), CE(base); best: the argmax of each.
    """
    if base_NV.is_cuda:
        from domino_core.kernels.loss import to_gradients_on_card

        to_gradients_on_card(base_NV, final_NV, labels_N, weights_N, base_weight, losses_N2, best_N2)
        return
    if final_NV is base_NV:
        _one_to_gradient(base_NV, labels_N, weights_N, losses_N2[:, 0], best_N2[:, 0])
        losses_N2[:, 1], best_N2[:, 1] = losses_N2[:, 0], best_N2[:, 0]
        return
    _one_to_gradient(final_NV, labels_N, (1.0 - base_weight) * weights_N, losses_N2[:, 0], best_N2[:, 0])
    _one_to_gradient(base_NV, labels_N, base_weight * weights_N, losses_N2[:, 1], best_N2[:, 1])
    base_NV += final_NV


def _one_to_gradient(logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, losses_N: Tensor, best_N: Tensor) -> None:
    """logits -> weight · (softmax - label), in place."""
    labels_N1 = labels_N[:, None]
    torch.argmax(logits_NV, 1, out=best_N)
    wide_NV = logits_NV.float()  # itself, if it is float32 already
    log_sum_N1 = wide_NV.logsumexp(1, keepdim=True)
    losses_N.copy_((log_sum_N1 - wide_NV.gather(1, labels_N1))[:, 0])
    wide_NV.sub_(log_sum_N1).exp_().scatter_add_(1, labels_N1, torch.full_like(log_sum_N1, -1.0))
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
