"""The Domino head's rollout over a block, without leaving the device: three kernels a draft.

`advance` takes the best token of the draft before it (each program of `correct` left the best of its share of the
vocabulary) and moves the GRU by it; `linear` multiplies the new state once for the next gates and for this correction;
`correct` reads the output matrix, adds the base logits, and leaves the best per share.

B rows · Q drafts of a block · G GRU width · R low rank · V vocabulary · P shares of the vocabulary
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from domino_core.kernels.launch import LAUNCH, after_predecessor, prefetch_rows
from domino_core.kernels.linear import linear

PREFETCH = 1
KEEP_BYTES = 16 << 20
SHARE = 64  # tokens of the vocabulary per program of `correct`


@triton.jit
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
    TABLE: tl.constexpr,
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
        x = input_ptr + (token if TABLE else b.to(tl.int64)) * (3 * G) + g
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
    PREFETCH: tl.constexpr,
    KEEP: tl.constexpr,
    SHARE: tl.constexpr,
    SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
):
    n0 = tl.program_id(0) * SHARE
    if PDL:
        prefetch_rows(w_ptr, n0, V, R, SHARE, PREFETCH)
    after_predecessor(PDL)
    b0 = tl.program_id(1) * BB
    b = b0 + tl.arange(0, BB)
    n = n0 + tl.arange(0, SHARE)
    row = (b < B)[:, None]
    acc = tl.zeros([SHARE, BB], tl.float32)
    for r0 in tl.static_range(0, R, BR):
        r = r0 + tl.arange(0, BR)
        address = w_ptr + n.to(tl.int64)[:, None] * R + r[None, :]
        there = (n < V)[:, None] & (r < R)[None, :]
        # The matrix is read for every draft. What of it the cache can hold is to stay there, the rest to pass through.
        if tl.program_id(0) < KEEP:
            w = tl.load(address, mask=there, other=0.0, eviction_policy="evict_last")
        else:
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


def rollout(
    first_BP: Tensor,
    base_BQV: Tensor,
    hidden_part_BQR: Tensor,
    inputs_VG: Tensor,
    state_XG: Tensor,
    last_VR: Tensor,
    temperature_B: Tensor,
    noise_BQV: Tensor | None,
) -> Tensor:
    """The drafts [B, Q] behind the anchor and the uncorrected drafts in `first` [B, 1+p]; those p come first again.

    inputs: the tokens' products with the GRU's input weights, [V, 3G]; state: the matrix that a state is multiplied
    with, [3G + R, G]. Without noise: greedy, whatever the temperature.
    """
    B, Q, V = base_BQV.shape
    R, G = hidden_part_BQR.shape[2], state_XG.shape[1]
    device, dtype = base_BQV.device, inputs_VG.dtype
    read = first_BP.shape[1]
    shares = triton.cdiv(V, SHARE)
    tokens_BT = torch.empty(B, Q + 1, dtype=torch.int64, device=device)
    tokens_BT[:, :read] = first_BP
    state_BG = torch.zeros(B, G, dtype=dtype, device=device)
    product_BX = torch.zeros(B, 3 * G + R, dtype=dtype, device=device)
    best_BP = torch.empty(B, shares, dtype=torch.float32, device=device)
    token_BP = torch.empty(B, shares, dtype=torch.int32, device=device)

    def advance(index: int, *, choose: bool, move: bool) -> None:
        _advance[(B,)](
            best_BP,
            token_BP,
            tokens_BT,
            inputs_VG,
            product_BX,
            state_BG,
            index,
            shares,
            Q + 1,
            G=G,
            BG=triton.next_power_of_2(G),
            R=R,
            BP=triton.next_power_of_2(shares),
            CHOOSE=choose,
            MOVE=move,
            TABLE=True,
            num_warps=8,
            **LAUNCH,
        )

    for index in range(read):
        advance(index, choose=False, move=True)
        product_BX = linear(state_BG, state_XG)
    rows = min(64, max(16, triton.next_power_of_2(B)))
    for index in range(read - 1, Q):
        hidden_part_BR, base_BV = hidden_part_BQR[:, index], base_BQV[:, index]
        noise_BV = base_BV if noise_BQV is None else noise_BQV[:, index]
        _correct[(shares, triton.cdiv(B, rows))](
            hidden_part_BR,
            product_BX,
            last_VR,
            base_BV,
            temperature_B,
            noise_BV,
            best_BP,
            token_BP,
            B,
            hidden_part_BR.stride(0),
            base_BV.stride(0),
            noise_BV.stride(0),
            V=V,
            G=G,
            R=R,
            BB=rows,
            BR=min(128, triton.next_power_of_2(R)),
            PREFETCH=PREFETCH * (1 << (R.bit_length() - 1)),
            KEEP=KEEP_BYTES // (SHARE * R * last_VR.element_size()),
            SHARE=SHARE,
            SAMPLED=noise_BQV is not None,
            num_warps=4,
            **LAUNCH,
        )
        last = index == Q - 1
        advance(index + 1, choose=True, move=not last)
        if not last:
            product_BX = linear(state_BG, state_XG)
    return tokens_BT[:, 1:]
