"""The Domino head's rollout over a block, without leaving the device: three kernels a draft.

`advance` takes the best token of the draft before it (each program of `correct` left the best of its share of the
vocabulary) and moves the GRU by it; `linear` multiplies the new state once for the next gates and for this correction;
`correct` reads the output matrix, adds the base logits, and leaves the best per share. Or `choose_in_pool` picks the
draft from a few candidates, and the matrix is hardly read.

B rows · Q drafts of a block · G GRU width · R low rank · V vocabulary · P shares of the vocabulary
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from domino_core.kernels.launch import LAUNCH, after_predecessor
from domino_core.kernels.linear import linear
from domino_core.sampling import RowSampling

SHARE = 64  # tokens of the vocabulary per program of `correct`


@triton.jit(do_not_specialize=["index"])
def _advance(
    best_ptr,
    token_ptr,
    chosen_ptr,
    input_ptr,
    product_ptr,
    state_ptr,
    index,
    shares,
    stride,
    G: tl.constexpr,
    BG: tl.constexpr,
    R: tl.constexpr,
    BP: tl.constexpr,
    CHOOSE: tl.constexpr,
    MOVE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_predecessor(PDL)
    b = tl.program_id(0)
    if CHOOSE:  # the first of equals, as draw() has it
        p = tl.arange(0, BP)
        best = tl.load(best_ptr + b * shares + p, mask=p < shares, other=-float("inf"))
        tokens = tl.load(token_ptr + b * shares + p, mask=p < shares, other=2147483647)
        token = tl.min(tl.where(best == tl.max(best, 0), tokens, 2147483647), 0).to(tl.int64)
        tl.store(chosen_ptr + b * stride + index, token)
    else:
        token = tl.load(chosen_ptr + b * stride + index)
    if MOVE:
        g = tl.arange(0, BG)
        inside = g < G
        x = input_ptr + token * (3 * G) + g
        h = product_ptr + b * (3 * G + R) + g
        reset = tl.load(x, mask=inside, other=0.0).to(tl.float32) + tl.load(h, mask=inside, other=0.0).to(tl.float32)
        keep = tl.load(x + G, mask=inside, other=0.0).to(tl.float32)
        keep += tl.load(h + G, mask=inside, other=0.0).to(tl.float32)
        new = tl.load(x + 2 * G, mask=inside, other=0.0).to(tl.float32)
        new += tl.sigmoid(reset) * tl.load(h + 2 * G, mask=inside, other=0.0).to(tl.float32)
        new = 2.0 * tl.sigmoid(2.0 * new) - 1.0  # tanh
        state = tl.load(state_ptr + b * G + g, mask=inside, other=0.0).to(tl.float32)
        state = new + tl.sigmoid(keep) * (state - new)
        tl.store(state_ptr + b * G + g, state.to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["index"])
def _choose_in_pool(
    pool_ptr,
    base_ptr,
    hidden_part_ptr,
    product_ptr,
    w_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    noise_ptr,
    chosen_ptr,
    index,
    stride,
    hidden_part_stride,
    pool_stride,
    noise_stride,
    G: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    WIDTH: tl.constexpr,
    CORRECTED: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    PDL: tl.constexpr,
):
    after_predecessor(PDL)
    b = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, WIDTH)
    token = tl.load(pool_ptr + b * pool_stride + rank)
    score = tl.load(base_ptr + b * pool_stride + rank).to(tl.float32)
    for r0 in tl.range(0, R if CORRECTED else 0, BR):
        r = r0 + tl.arange(0, BR)
        part = tl.load(hidden_part_ptr + b * hidden_part_stride + r, mask=r < R, other=0.0).to(tl.float32)
        low = part + tl.load(product_ptr + b * (3 * G + R) + 3 * G + r, mask=r < R, other=0.0).to(tl.float32)
        low = low / (1.0 + tl.exp(-low))
        w = tl.load(w_ptr + token[:, None] * R + r[None, :], mask=(r < R)[None, :], other=0.0).to(tl.float32)
        score += tl.sum(w * low[None, :], 1)
    if SAMPLED:
        score = score / tl.load(temperature_ptr + b)
    if TRUNCATED:  # sampling.processed_logits, for this draft alone
        peak = tl.max(score, 0)
        score = tl.where(score < peak + tl.load(log_min_p_ptr + b), -float("inf"), score)
        descending = tl.sort(score, descending=True)
        top_k = tl.load(top_k_ptr + b)
        in_top_k = rank < tl.where(top_k > 0, top_k, WIDTH)
        mass = tl.where(in_top_k, tl.exp(descending - peak), 0.0)
        mass = mass / tl.sum(mass, 0)
        top_p = tl.load(top_p_ptr + b)
        kept = in_top_k & (tl.cumsum(mass, 0) - mass < tl.where(top_p < 1.0, top_p, float("inf")))
        lowest = tl.min(tl.where(kept, descending, float("inf")), 0)
        score = tl.where(score < lowest, -float("inf"), score)
    if SAMPLED:
        score += tl.load(noise_ptr + b * noise_stride + token)
    best = tl.min(tl.where(score == tl.max(score, 0), token, 9223372036854775807), 0)
    tl.store(chosen_ptr + b * stride + index, best)


@triton.jit
def _correct(
    hidden_part_ptr,
    product_ptr,
    w_ptr,
    base_ptr,
    temperature_ptr,
    noise_ptr,
    best_ptr,
    token_ptr,
    B,
    hidden_part_stride,
    base_stride,
    noise_stride,
    V: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    BB: tl.constexpr,
    BR: tl.constexpr,
    SHARE: tl.constexpr,
    CORRECTED: tl.constexpr,
    SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
):
    n0 = tl.program_id(0) * SHARE
    after_predecessor(PDL)
    b0 = tl.program_id(1) * BB
    b = b0 + tl.arange(0, BB)
    n = n0 + tl.arange(0, SHARE)
    row = (b < B)[:, None]
    acc = tl.zeros([SHARE, BB], tl.float32)
    for r0 in tl.static_range(0, R if CORRECTED else 0, BR):
        r = r0 + tl.arange(0, BR)
        address = w_ptr + n.to(tl.int64)[:, None] * R + r[None, :]
        there = (n < V)[:, None] & (r < R)[None, :]
        # The matrix passes through the cache: it must not push out what the other two kernels read.
        w = tl.load(address, mask=there, other=0.0, eviction_policy="evict_first")
        kept = row & (r < R)[None, :]
        part = tl.load(hidden_part_ptr + b[:, None] * hidden_part_stride + r[None, :], mask=kept, other=0.0)
        product = tl.load(product_ptr + b[:, None] * (3 * G + R) + 3 * G + r[None, :], mask=kept, other=0.0)
        low = part.to(tl.float32) + product.to(tl.float32)
        low = low / (1.0 + tl.exp(-low))
        acc = tl.dot(w, low.to(w.dtype).T, acc)
    seen = row.T & (n < V)[:, None]
    score = acc + tl.load(base_ptr + b.to(tl.int64)[None, :] * base_stride + n[:, None], mask=seen, other=0.0)
    if SAMPLED:
        score = score / tl.load(temperature_ptr + b, mask=b < B, other=1.0)[None, :]
        score += tl.load(noise_ptr + b.to(tl.int64)[None, :] * noise_stride + n[:, None], mask=seen, other=0.0)
    score = tl.where(seen, score, -float("inf"))
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best[None, :], n[:, None], 2147483647), 0)
    place = b * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + place, best, mask=b < B)
    tl.store(token_ptr + place, token, mask=b < B)


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """A head as a rollout reads it. prefix: drafts that are not corrected.

    inputs: the tokens' products with the GRU's input weights, [V, 3G]; state: the matrix that a state is multiplied
    with, for its gates and its correction, [3G + R, G]; last: the output matrix [V, R].
    """

    inputs_VG: Tensor
    state_XG: Tensor
    last_VR: Tensor
    prefix: int


class _Memory:
    """The GRU's side of a rollout: the drafts read so far, and the products of its state."""

    def __init__(self, weights: HeadWeights, anchor_B: Tensor, num_drafts: int, shares: int) -> None:
        B, device, dtype = len(anchor_B), anchor_B.device, weights.state_XG.dtype
        X, self.width = weights.state_XG.shape
        self.weights = weights
        self.tokens_BT = torch.empty(B, num_drafts + 1, dtype=torch.int64, device=device)
        self.tokens_BT[:, 0] = anchor_B
        self.state_BG = torch.zeros(B, self.width, dtype=dtype, device=device)
        self.product_BX = torch.zeros(B, X, dtype=dtype, device=device)
        self.best_BP = torch.empty(B, shares, dtype=torch.float32, device=device)
        self.token_BP = torch.empty(B, shares, dtype=torch.int32, device=device)
        self.read(0)

    def read(self, index: int, *, choose: bool = False, last: bool = False) -> None:
        """Move on by token `index`; choose: take it from the shares' best first. last: only do that."""
        B, shares = self.best_BP.shape
        X = self.product_BX.shape[1]
        _advance[(B,)](
            self.best_BP,
            self.token_BP,
            self.tokens_BT,
            self.weights.inputs_VG,
            self.product_BX,
            self.state_BG,
            index,
            shares,
            self.tokens_BT.stride(0),
            G=self.width,
            BG=triton.next_power_of_2(self.width),
            R=X - 3 * self.width,
            BP=triton.next_power_of_2(shares),
            CHOOSE=choose,
            MOVE=not last,
            num_warps=8,
            **LAUNCH,
        )
        if not last:
            self.product_BX = linear(self.state_BG, self.weights.state_XG)


def rollout(
    weights: HeadWeights,
    anchor_B: Tensor,
    base_BQV: Tensor,
    hidden_part_BQR: Tensor,
    temperature_B: Tensor,
    noise_BQV: Tensor | None,
) -> Tensor:
    """The drafts [B, Q] behind the anchors. Without noise: greedy, whatever the temperature."""
    B, Q, V = base_BQV.shape
    shares = triton.cdiv(V, SHARE)
    memory = _Memory(weights, anchor_B, Q, shares)
    rows = min(64, max(16, triton.next_power_of_2(B)))
    R = hidden_part_BQR.shape[2]
    for index in range(Q):
        hidden_part_BR, base_BV = hidden_part_BQR[:, index], base_BQV[:, index]
        noise_BV = base_BV if noise_BQV is None else noise_BQV[:, index]
        _correct[(shares, triton.cdiv(B, rows))](
            hidden_part_BR,
            memory.product_BX,
            weights.last_VR,
            base_BV,
            temperature_B,
            noise_BV,
            memory.best_BP,
            memory.token_BP,
            B,
            hidden_part_BR.stride(0),
            base_BV.stride(0),
            noise_BV.stride(0),
            V=V,
            G=memory.width,
            R=R,
            BB=rows,
            BR=min(128, max(16, triton.next_power_of_2(R))),
            SHARE=SHARE,
            CORRECTED=index >= weights.prefix,
            SAMPLED=noise_BQV is not None,
            num_warps=4,
            **LAUNCH,
        )
        memory.read(index + 1, choose=True, last=index == Q - 1)
    return memory.tokens_BT[:, 1:]


def rollout_in_pool(
    weights: HeadWeights,
    anchor_B: Tensor,
    base_BQV: Tensor,
    hidden_part_BQR: Tensor,
    sampling: RowSampling,
    noise_BQV: Tensor | None,
    width: int,
) -> Tensor:
    """As `rollout`, but a draft is one of the `width` tokens (a power of two) with the best base logits of its slot.

    Their rows of the output matrix are all that is read of it. Top-k, top-p and min-p are applied within the pool.
    """
    B, Q, _ = base_BQV.shape
    R = hidden_part_BQR.shape[2]
    pool = base_BQV.topk(width, dim=-1)
    memory = _Memory(weights, anchor_B, Q, 1)
    for index in range(Q):
        hidden_part_BR = hidden_part_BQR[:, index]
        noise_BV = base_BQV if noise_BQV is None else noise_BQV[:, index]
        _choose_in_pool[(B,)](
            pool.indices[:, index],
            pool.values[:, index],
            hidden_part_BR,
            memory.product_BX,
            weights.last_VR,
            sampling.temperature_B,
            sampling.top_k_B,
            sampling.top_p_B,
            sampling.log_min_p_B,
            noise_BV,
            memory.tokens_BT,
            index + 1,
            memory.tokens_BT.stride(0),
            hidden_part_BR.stride(0),
            pool.values.stride(0),
            noise_BV.stride(0),
            G=memory.width,
            R=R,
            BR=min(32, max(16, triton.next_power_of_2(R))),
            WIDTH=width,
            CORRECTED=index >= weights.prefix,
            SAMPLED=noise_BQV is not None,
            TRUNCATED=sampling.truncated or sampling.min_p,
            num_warps=8,
            **LAUNCH,
        )
        if index < Q - 1:
            memory.read(index + 1)
    return memory.tokens_BT[:, 1:]
