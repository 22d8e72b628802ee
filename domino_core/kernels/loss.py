"""Logits to gradients of the training objective, in place: each logit is read twice and written once.

N drafts · V vocabulary
"""

import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit(do_not_specialize=["base_weight"])
def _to_gradients(
    base_ptr,
    final_ptr,
    labels_ptr,
    weights_ptr,
    losses_ptr,
    best_ptr,
    base_weight,
    V,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    base_ptr += n * V
    final_ptr += n * V
    label = tl.load(labels_ptr + n)
    weight = tl.load(weights_ptr + n)
    lane = tl.arange(0, BLOCK)

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
    base_loss = base_log_sum - tl.load(base_ptr + label).to(tl.float32)
    final_log_sum, final_word, final_loss = base_log_sum, base_word, base_loss
    if HEAD:
        final_log_sum, final_word = _over_lanes(final_peak, final_total, final_best)
        final_loss = final_log_sum - tl.load(final_ptr + label).to(tl.float32)
    tl.store(losses_ptr + 2 * n, final_loss)
    tl.store(losses_ptr + 2 * n + 1, base_loss)
    tl.store(best_ptr + 2 * n, final_word.to(tl.int64))
    tl.store(best_ptr + 2 * n + 1, base_word.to(tl.int64))

    for v0 in tl.range(0, V, BLOCK):
        v = v0 + lane
        here = tl.where(v == label, 1.0, 0.0)
        x = tl.load(base_ptr + v, mask=v < V, other=-1e30).to(tl.float32)
        total = weight * (tl.exp(x - base_log_sum) - here)
        if HEAD:
            x = tl.load(final_ptr + v, mask=v < V, other=-1e30).to(tl.float32)
            final = weight * (1.0 - base_weight) * (tl.exp(x - final_log_sum) - here)
            tl.store(final_ptr + v, final.to(final_ptr.dtype.element_ty), mask=v < V)
            total = base_weight * total + final
        tl.store(base_ptr + v, total.to(base_ptr.dtype.element_ty), mask=v < V)


def to_gradients_on_card(
    base_NV: Tensor,
    final_NV: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    base_weight: float,
    losses_N2: Tensor,
    best_N2: Tensor,
) -> None:
    """losses.to_gradients, on a CUDA device."""
    assert base_NV.is_contiguous()
    assert final_NV.is_contiguous()
    assert losses_N2.is_contiguous()
    assert best_N2.is_contiguous()
    N, V = base_NV.shape
    _to_gradients[(N,)](
        base_NV,
        final_NV,
        labels_N,
        weights_N,
        losses_N2,
        best_N2,
        float(base_weight),
        V,
        BLOCK=min(BLOCK, triton.next_power_of_2(V)),
        HEAD=final_NV is not base_NV,
        num_warps=8,
    )
