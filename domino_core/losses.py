"""Base and final cross-entropy of drafted blocks, in chunks, as sums and counts.

X blocks (rows and blocks flattened) · Q drafts per block · D hidden · V vocabulary

The logits of a whole batch would be gigabytes (512 blocks · 16 drafts · 151,936 words in float32: 5 GB, twice), so they
exist for one chunk of blocks at a time and are computed again in the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LogitsOf = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(z [X, Q, D], GRU input ids [X, Q]) -> base and final logits, [X, Q, V] each."""


@dataclass(frozen=True, kw_only=True)
class BlockLosses:
    """Sums and counts over blocks, 0-dim float32 tensors: the caller adds them up over micro-batches and workers.

    final_sum and base_sum carry the gradient, nothing else does. Accepted lengths are 1 + the leading run of correct
    drafts, teacher-forced (compared with the data, the head reading the data): optimistic beside the measured τ.
    """

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


def mix(losses: BlockLosses, base_weight: float, denominator: Tensor | float) -> Tensor:
    """((1 - λ) · final + λ · base) / denominator, a step's sum of weights (the base-anchored objective).

    Divide by the sum of weights, not by a count: anything else changes the learning rate with gamma. Both terms stay in
    the graph at λ = 0 and 1, so that every parameter has a (maybe zero) gradient, which DDP insists on. The published
    1e-6 in the denominator makes a step without any label a loss of zero.
    """
    return ((1.0 - base_weight) * losses.final_sum + base_weight * losses.base_sum) / (denominator + 1e-6)


def block_losses(
    logits_of: LogitsOf, z_XQD: Tensor, inputs_XQ: Tensor, labels_XQ: Tensor, weights_XQ: Tensor, chunk_blocks: int
) -> BlockLosses:
    """Losses of all blocks, chunk by chunk with recomputation. Equals chunk_losses on everything at once."""
    tensors = (z_XQD, inputs_XQ, labels_XQ, weights_XQ)
    if len(z_XQD) <= chunk_blocks:
        return chunk_losses(logits_of, *tensors)  # recomputing the only chunk would save no memory at the peak
    total: BlockLosses | None = None
    for chunk in zip(*(t.split(chunk_blocks) for t in tensors), strict=True):
        # No dropout anywhere: the random state need not be kept for the second run.
        part = checkpoint(chunk_losses, logits_of, *chunk, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(part, BlockLosses)
        total = part if total is None else total + part
    assert total is not None
    return total


def chunk_losses(
    logits_of: LogitsOf, z_XQD: Tensor, inputs_XQ: Tensor, labels_XQ: Tensor, weights_XQ: Tensor
) -> BlockLosses:
    """The unchunked loss: all logits at once."""
    base_XQV, final_XQV = logits_of(z_XQD, inputs_XQ)
    labelled_XQ = weights_XQ > 0
    correct_final_XQ = (final_XQV.detach().argmax(-1) == labels_XQ) & labelled_XQ
    correct_base_XQ = (base_XQV.detach().argmax(-1) == labels_XQ) & labelled_XQ
    has_label_X = labelled_XQ.any(1)
    return BlockLosses(
        final_sum=_weighted_cross_entropy(final_XQV, labels_XQ, weights_XQ),
        base_sum=_weighted_cross_entropy(base_XQV, labels_XQ, weights_XQ),
        weight_sum=weights_XQ.sum(),
        correct_final_sum=correct_final_XQ.sum().float(),
        correct_base_sum=correct_base_XQ.sum().float(),
        num_labels=labelled_XQ.sum().float(),
        accepted_final_sum=_accepted_lengths(correct_final_XQ, has_label_X),
        accepted_base_sum=_accepted_lengths(correct_base_XQ, has_label_X),
        num_blocks=has_label_X.sum().float(),
    )


def _weighted_cross_entropy(logits_XQV: Tensor, labels_XQ: Tensor, weights_XQ: Tensor) -> Tensor:
    """In float32 whatever the logits' type: bfloat16 log-probabilities are too coarse to train on."""
    each = F.cross_entropy(logits_XQV.float().flatten(0, 1), labels_XQ.flatten(), reduction="none")
    return (each * weights_XQ.flatten()).sum()


def _accepted_lengths(correct_XQ: Tensor, has_label_X: Tensor) -> Tensor:
    run_X = correct_XQ.int().cumprod(1).sum(1)
    return ((1 + run_X) * has_label_X).sum().float()
