"""Logits to gradients of the training objective, in place: each logit is read twice and written once.

Where weights follow from the losses of other drafts, the two halves are two launches of the one kernel.

N drafts · V vocabulary · J labels of a draft
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from domino_core.losses import Chunk

BLOCK = 2048  # words at a time


@triton.jit
def _follow(x, at, peak, total, best):
    """One step of a running softmax per lane. One exponential serves both cases: a new peak, or none."""
    above = x > peak
    scale = tl.exp(-tl.abs(x - peak))
    total = tl.where(above, total * scale + 1.0, total + scale)
    return tl.where(above, x, peak), total, tl.where(above, at, best)


@triton.jit
def _over_lanes(peak, total, best):
    """(log of the sum of exponentials, first index of the maximum) from the lanes' own."""
    most = tl.max(peak, 0)
    log_sum = most + tl.log(tl.sum(total * tl.exp(peak - most), 0))
    return log_sum, tl.min(tl.where(peak == most, best, 2147483647), 0)


@triton.jit
def _labelled(logits_ptr, labels_ptr, shares_ptr, J: tl.constexpr, SOFT: tl.constexpr):
    """The logit of the label, or the mean of the labels' by their shares."""
    if not SOFT:
        return tl.load(logits_ptr + tl.load(labels_ptr)).to(tl.float32)
    total = 0.0
    for j in tl.static_range(J):
        total += tl.load(shares_ptr + j) * tl.load(logits_ptr + tl.load(labels_ptr + j)).to(tl.float32)
    return total


@triton.jit
def _shares_at(v, first, labels_ptr, shares_ptr, J: tl.constexpr, SOFT: tl.constexpr):
    """What the labels have of each word."""
    if not SOFT:
        return tl.where(v == first, 1.0, 0.0)
    here = tl.where(v == first, tl.load(shares_ptr), 0.0)
    for j in tl.static_range(1, J):
        here += tl.where(v == tl.load(labels_ptr + j), tl.load(shares_ptr + j), 0.0)
    return here


@triton.jit(do_not_specialize=["base_weight"])
def _to_gradients(
    base_ptr,
    final_ptr,
    labels_ptr,
    shares_ptr,
    weights_ptr,
    losses_ptr,
    best_ptr,
    log_sums_ptr,
    base_weight,
    V,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    J: tl.constexpr,
    SOFT: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRADIENTS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    base_ptr += n * V
    final_ptr += n * V
    labels_ptr += n * J
    shares_ptr += n * J
    lane = tl.arange(0, BLOCK)

    if STATISTICS:
        # Finite, not -inf: lanes behind the last word never meet a logit, and -inf - -inf is NaN.
        base_peak = tl.full([BLOCK], -1e30, tl.float32)
        base_total = tl.zeros([BLOCK], tl.float32)
        base_best = tl.zeros([BLOCK], tl.int32)
        final_peak, final_total, final_best = base_peak, base_total, base_best
        for v0 in tl.range(0, V, BLOCK):
            v = v0 + lane
            x = tl.load(base_ptr + v, mask=v < V, other=-1e30).to(tl.float32)
            base_peak, base_total, base_best = _follow(x, v, base_peak, base_total, base_best)
            if HEAD:
                x = tl.load(final_ptr + v, mask=v < V, other=-1e30).to(tl.float32)
                final_peak, final_total, final_best = _follow(x, v, final_peak, final_total, final_best)
        base_log_sum, base_word = _over_lanes(base_peak, base_total, base_best)
        base_loss = base_log_sum - _labelled(base_ptr, labels_ptr, shares_ptr, J, SOFT)
        final_log_sum, final_word, final_loss = base_log_sum, base_word, base_loss
        if HEAD:
            final_log_sum, final_word = _over_lanes(final_peak, final_total, final_best)
            final_loss = final_log_sum - _labelled(final_ptr, labels_ptr, shares_ptr, J, SOFT)
        tl.store(losses_ptr + 2 * n, final_loss)
        tl.store(losses_ptr + 2 * n + 1, base_loss)
        tl.store(best_ptr + 2 * n, final_word.to(tl.int64))
        tl.store(best_ptr + 2 * n + 1, base_word.to(tl.int64))
        if not GRADIENTS:
            tl.store(log_sums_ptr + 2 * n, final_log_sum)
            tl.store(log_sums_ptr + 2 * n + 1, base_log_sum)
    else:
        final_log_sum = tl.load(log_sums_ptr + 2 * n)
        base_log_sum = tl.load(log_sums_ptr + 2 * n + 1)

    if GRADIENTS:
        final_weight = tl.load(weights_ptr + 2 * n)
        base_of = tl.load(weights_ptr + 2 * n + 1)
        if HEAD:
            final_weight *= 1.0 - base_weight
            base_of *= base_weight
        first = tl.load(labels_ptr)
        for v0 in tl.range(0, V, BLOCK):
            v = v0 + lane
            here = _shares_at(v, first, labels_ptr, shares_ptr, J, SOFT)
            x = tl.load(base_ptr + v, mask=v < V, other=-1e30).to(tl.float32)
            total = base_of * (tl.exp(x - base_log_sum) - here)
            if HEAD:
                x = tl.load(final_ptr + v, mask=v < V, other=-1e30).to(tl.float32)
                final = final_weight * (tl.exp(x - final_log_sum) - here)
                tl.store(final_ptr + v, final.to(final_ptr.dtype.element_ty), mask=v < V)
                total += final
            tl.store(base_ptr + v, total.to(base_ptr.dtype.element_ty), mask=v < V)


def to_gradients_on_card(chunk: Chunk, base_weight: float) -> None:
    """losses.to_gradients with the weights as they are, on a CUDA device."""
    _launch(chunk, chunk.losses_N2, base_weight, statistics=True, gradients=True)


def statistics_on_card(chunk: Chunk) -> Tensor:
    """Fills losses and best alone; returns the logarithms of the sums of exponentials [N, 2], of final and base."""
    log_sums_N2 = torch.empty_like(chunk.losses_N2)
    _launch(chunk, log_sums_N2, 0.0, statistics=True, gradients=False)
    return log_sums_N2


def gradients_on_card(chunk: Chunk, log_sums_N2: Tensor, base_weight: float) -> None:
    """The rest, behind statistics_on_card and whatever it has made of the weights."""
    _launch(chunk, log_sums_N2, base_weight, statistics=False, gradients=True)


def _launch(chunk: Chunk, log_sums_N2: Tensor, base_weight: float, *, statistics: bool, gradients: bool) -> None:
    shares_NJ = chunk.weights_N2 if chunk.shares_NJ is None else chunk.shares_NJ
    tensors = (chunk.base_NV, chunk.final_NV, chunk.labels_NJ, shares_NJ)
    tensors += (chunk.weights_N2, chunk.losses_N2, chunk.best_N2, log_sums_N2)
    assert all(tensor.is_contiguous() for tensor in tensors)
    N, V = chunk.base_NV.shape
    _to_gradients[(N,)](
        *tensors,
        float(base_weight),
        V,
        BLOCK=min(BLOCK, triton.next_power_of_2(V)),
        HEAD=chunk.final_NV is not chunk.base_NV,
        J=chunk.labels_NJ.shape[1],
        SOFT=chunk.shares_NJ is not None,
        STATISTICS=statistics,
        GRADIENTS=gradients,
        num_warps=8,
    )
