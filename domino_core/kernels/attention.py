"""Attention of a pass's tokens over static caches, in chunks of keys whose partial results are then combined.

The chunks lie at fixed positions and are combined in their order, so a token's result depends on its keys alone, and
not on how many tokens or rows share the pass (docs/exactness.md).

B rows · T tokens per row · X = B·T · M keys · H, J query and key/value heads · G = H/J · d head width · S chunks ·
N = H + 2J heads of a fused projection
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from domino_core.fused import CHUNK_KEYS, LONG_PASS
from domino_core.kernels.launch import LAUNCH, after_predecessor

KEYS = 64  # keys of a tile


@triton.jit
def _norm_rotate_store(
    projected_ptr,
    weight_ptr,
    turns_ptr,
    position_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    layer_stride,
    row_stride,
    X,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    LAYERS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    HEADS: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    x = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    ROTATED: tl.constexpr = H + LAYERS * J
    TOTAL: tl.constexpr = H + 2 * LAYERS * J
    d = tl.arange(0, BD)
    partner = tl.where(d < D // 2, d + D // 2, d - D // 2)
    inside = (head < TOTAL)[:, None] & (d < D)[None, :]
    rotated = inside & (head < ROTATED)[:, None]
    if NORM:  # weights change never, so they need not be waited for
        weights = weight_ptr + head[:, None] * D
        own_weight = tl.load(weights + d[None, :], mask=rotated, other=0.0).to(tl.float32)
        other_weight = tl.load(weights + partner[None, :], mask=rotated, other=0.0).to(tl.float32)
    after_predecessor(PDL)
    base = (x * TOTAL + head)[:, None] * D
    own = tl.load(projected_ptr + base + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(projected_ptr + base + partner[None, :], mask=rotated, other=0.0).to(tl.float32)
    cos = tl.load(turns_ptr + x * D + d, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.load(turns_ptr + (X + x) * D + d, mask=d < D, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + x)
    own_normed = own
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + EPS)[:, None]
        own_normed = own * scale * own_weight
        other = other * scale * other_weight
    turned = own_normed * cos[None, :] + other * sin[None, :]
    tl.store(q_ptr + (x * H + head)[:, None] * D + d[None, :], turned, mask=rotated & (head < H)[:, None])
    is_value = head >= ROTATED
    cached = tl.where(is_value, head - ROTATED, head - H)
    slot = (cached // J).to(tl.int64) * layer_stride + (x // T) * row_stride
    slot += position * (J * D) + (cached % J) * D
    place = slot[:, None] + d[None, :]
    tl.store(k_ptr + place, turned, mask=rotated & (head >= H)[:, None])
    tl.store(v_ptr + place, own, mask=inside & is_value[:, None])


def norm_rotate_store(
    projected_XN: Tensor,
    weight_Nd: Tensor | None,
    eps: float,
    turns_2Xd: Tensor,
    positions_BT: Tensor,
    k_LBMJd: Tensor,
    v_LBMJd: Tensor,
) -> Tensor:
    """Of fused projections, normalise and rotate queries and keys, put keys and values to their places in the caches,
    and return the queries [X, H, d].

    A projection holds H queries, then L·J keys, then L·J values (H may be 0). weight: [H + L·J, d], None for no norm.
    turns: cos and signed sin of each token's position.
    """
    layers, _, _, J, d = k_LBMJd.shape
    tokens, heads = projected_XN.shape[0], projected_XN.shape[1] // d
    H = heads - 2 * layers * J
    q_XHd = torch.empty(tokens, max(H, 1), d, dtype=projected_XN.dtype, device=projected_XN.device)
    group = 2
    _norm_rotate_store[(tokens, triton.cdiv(heads, group))](
        projected_XN,
        projected_XN if weight_Nd is None else weight_Nd,
        turns_2Xd,
        positions_BT,
        q_XHd,
        k_LBMJd,
        v_LBMJd,
        k_LBMJd.stride(0),
        k_LBMJd.stride(1),
        tokens,
        positions_BT.shape[1],
        H=H,
        J=J,
        LAYERS=layers,
        D=d,
        BD=triton.next_power_of_2(d),
        HEADS=group,
        EPS=eps,
        NORM=weight_Nd is not None,
        num_warps=1,
        **LAUNCH,
    )
    return q_XHd


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    start_ptr,
    partial_ptr,
    stats_ptr,
    row_stride,
    T,
    S,
    scale,
    J: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PDL: tl.constexpr,
):
    after_predecessor(PDL)
    split, j = tl.program_id(0), tl.program_id(1)
    tiles = (T * G + BQ - 1) // BQ
    b, tile = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    start = tl.load(start_ptr + b).to(tl.int32)
    first, last = split * CHUNK, tl.minimum(start + T, split * CHUNK + CHUNK)
    if first >= last:
        return
    query = tile * BQ + tl.arange(0, BQ)
    t = query // G
    valid = query < T * G
    d = tl.arange(0, BD)
    head_row = ((b * T + t) * (J * G) + j * G + query % G).to(tl.int64)  # of [X, H]
    q = tl.load(q_ptr + head_row[None, :] * D + d[:, None], mask=valid[None, :] & (d < D)[:, None], other=0.0)
    visible = tl.full([BQ], 0, tl.int32) + start + T
    if CAUSAL:
        visible = start + t + 1
        # The tile's last token sees most.
        last = tl.minimum(last, start + (tile * BQ + BQ - 1) // G + 1)
    highest = tl.full([BQ], -float("inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    acc = tl.zeros([BD, BQ], tl.float32)
    rows = b.to(tl.int64) * row_stride + j * D
    for begin in tl.range(first, last, KEYS):
        key = begin + tl.arange(0, KEYS)
        place = rows + key.to(tl.int64)[:, None] * (J * D) + d[None, :]
        there = (key < last)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + place, mask=there, other=0.0)
        scores = tl.dot(k, q) * scale
        scores = tl.where(key[:, None] < visible[None, :], scores, -float("inf"))
        scores = tl.where((key < last)[:, None], scores, -float("inf"))
        new = tl.maximum(highest, tl.max(scores, 0))
        pivot = tl.where(new == -float("inf"), 0.0, new)  # a token that sees no key of this chunk
        weights = tl.exp2(scores - pivot[None, :])
        shrink = tl.exp2(highest - pivot)
        total = total * shrink + tl.sum(weights, 0)
        v = tl.load(v_ptr + place, mask=there, other=0.0)
        acc = tl.dot(v.T, weights.to(v.dtype), acc * shrink[None, :])
        highest = new
    place = head_row * S + split
    tl.store(partial_ptr + place[None, :] * D + d[:, None], acc, mask=valid[None, :] & (d < D)[:, None])
    tl.store(stats_ptr + place * 2, highest, mask=valid)
    tl.store(stats_ptr + place * 2 + 1, total, mask=valid)


@triton.jit
def _combine(
    partial_ptr,
    stats_ptr,
    start_ptr,
    out_ptr,
    T,
    S,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    CHUNK: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    after_predecessor(PDL)
    x = tl.program_id(0)
    head_row = x.to(tl.int64) * H + tl.program_id(1)
    start = tl.load(start_ptr + x // T).to(tl.int32)
    keys = start + x % T + 1 if CAUSAL else start + T
    d = tl.arange(0, BD)
    highest = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BD], tl.float32)
    for begin in tl.range(0, tl.cdiv(keys, CHUNK), BS):
        split = begin + tl.arange(0, BS)
        there = split * CHUNK < keys
        place = head_row * S + split
        peaks = tl.load(stats_ptr + place * 2, mask=there, other=-float("inf"))
        totals = tl.load(stats_ptr + place * 2 + 1, mask=there, other=0.0)
        partial = tl.load(
            partial_ptr + place[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
        )
        new = tl.maximum(highest, tl.max(peaks, 0))
        weights = tl.exp2(peaks - new)
        shrink = tl.exp2(highest - new)
        total = total * shrink + tl.sum(weights * totals, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * partial, 0)
        highest = new
    tl.store(out_ptr + head_row * D + d, (acc / total).to(out_ptr.dtype.element_ty), mask=d < D)


def attend(
    q_XHd: Tensor, k_BMJd: Tensor, v_BMJd: Tensor, start_B: Tensor, num_tokens: int, num_keys: int, causal: bool
) -> Tensor:
    """[X, H·d]. Token t of a row sees keys 0..start+t of its row if causal, else 0..start+T-1, its own pass's last.

    num_keys: no row's start + T exceeds it.
    """
    tokens, H, d = q_XHd.shape
    B, _, J, _ = k_BMJd.shape
    G = H // J
    # A prompt's many tokens keep a card busy without chunks, and partial results of them all would be many.
    chunk = CHUNK_KEYS if num_tokens < LONG_PASS else 1 << 24
    splits = triton.cdiv(num_keys, chunk)
    tile = min(64, max(16, triton.next_power_of_2(num_tokens * G)))
    partial = torch.empty(tokens, H, splits, d, dtype=torch.float32, device=q_XHd.device)
    stats = torch.empty(tokens, H, splits, 2, dtype=torch.float32, device=q_XHd.device)
    out_XE = torch.empty(tokens, H * d, dtype=q_XHd.dtype, device=q_XHd.device)
    shape = {"D": d, "BD": max(16, triton.next_power_of_2(d)), "CHUNK": chunk, "CAUSAL": causal}
    _attend[(splits, J, B * triton.cdiv(num_tokens * G, tile))](
        q_XHd,
        k_BMJd,
        v_BMJd,
        start_B,
        partial,
        stats,
        k_BMJd.stride(0),
        num_tokens,
        splits,
        d**-0.5 * 1.4426950408889634,  # exp2 is what the hardware has
        J=J,
        G=G,
        BQ=tile,
        KEYS=KEYS,
        num_warps=4,
        **shape,
        **LAUNCH,
    )
    _combine[(tokens, H)](
        partial, stats, start_B, out_XE, num_tokens, splits, H=H, BS=8, num_warps=1, **shape, **LAUNCH
    )
    return out_XE
