"""The Triton kernels against plain PyTorch, and the promise that carries exactness: bits do not depend on the batch."""

import pytest
import torch
from torch.nn import functional as F

from domino_core import sampling
from domino_core.checkpoint import read_config
from domino_core.layers import KVCache
from domino_core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def normal(*shape, seed=0, scale=1.0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(torch.bfloat16)


def relative(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("tokens", [1, 3, 17, 40, 65, 200])
@pytest.mark.parametrize(("inner", "outputs"), [(192, 320), (72, 1000), (4096, 6144)])
def test_linear(tokens, inner, outputs):
    from domino_core.kernels.linear import linear, linear_parts, part_length

    x, w = normal(tokens, inner), normal(outputs, inner, seed=1, scale=inner**-0.5)
    wanted = x.double() @ w.double().T
    assert relative(linear(x, w), wanted) < 3e-3
    parts = linear_parts(x, w)
    assert parts.dtype == torch.float32
    assert relative(parts.sum(0), wanted) < 1e-5
    half = part_length(inner)
    assert relative(parts[0], x[:, :half].double() @ w[:, :half].double().T) < 1e-5
    pair = normal(2 * outputs, inner, seed=3, scale=inner**-0.5)
    gate, up = (x.double() @ pair.double().T).chunk(2, -1)
    assert relative(linear(x, pair, is_gated=True), F.silu(gate) * up) < 1e-2


@pytest.mark.parametrize(
    ("inner", "outputs", "is_gated"), [(4096, 6144, False), (576, 1536, True), (12288, 4096, False)]
)
def test_a_token_gets_the_same_bits_in_every_batch(inner, outputs, is_gated):
    from domino_core.kernels.linear import linear, linear_parts

    w = normal(outputs * (2 if is_gated else 1), inner, seed=1, scale=inner**-0.5)
    x = normal(1088, inner)
    few = x.split(17)  # as a row's block
    apart = torch.cat([linear(each, w, is_gated=is_gated) for each in few])
    parts = torch.cat([linear_parts(each, w) for each in few], dim=1)
    for tokens in (1, 2, 16, 17, 33, 64, 65, 128, 130, 288, 544, 1088):
        assert torch.equal(linear(x[:tokens], w, is_gated=is_gated), apart[:tokens]), tokens
        assert torch.equal(linear_parts(x[:tokens], w), parts[:, :tokens]), tokens


def attention_case(rows, tokens, starts, H, J, d, room, layers=1, seed=0):
    start_B = torch.tensor(starts, device=DEVICE)
    cache = KVCache.allocate(layers, rows, room, J, d, torch.bfloat16, DEVICE)
    cache.k.copy_(normal(*cache.k.shape, seed=seed + 1))
    cache.v.copy_(normal(*cache.v.shape, seed=seed + 2))
    positions_BT = start_B[:, None] + torch.arange(tokens, device=DEVICE)
    return normal(rows * tokens, H, d, seed=seed), cache, start_B, positions_BT


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("tokens", "starts", "H", "J", "d"),
    [
        (1, [0], 4, 2, 32),
        (1, [5, 300, 700], 8, 2, 64),
        (5, [0, 255, 513], 6, 2, 48),
        (17, [250], 32, 8, 128),
        (150, [300], 4, 1, 32),
    ],
)
def test_attention(tokens, starts, H, J, d, causal):
    from domino_core.kernels.attention import attend

    q, cache, start_B, positions_BT = attention_case(len(starts), tokens, starts, H, J, d, max(starts) + tokens + 30)
    found = attend(q, cache.k[0], cache.v[0], start_B, tokens, max(starts) + tokens + 20, causal)
    last_BT = positions_BT if causal else positions_BT[:, -1:].expand(-1, tokens)
    mask = torch.arange(cache.length, device=DEVICE) <= last_BT[..., None]
    wanted = F.scaled_dot_product_attention(
        q.view(len(starts), tokens, H, d).transpose(1, 2).double(),
        cache.k[0].transpose(1, 2).double(),
        cache.v[0].transpose(1, 2).double(),
        attn_mask=mask[:, None],
        enable_gqa=True,
    )
    assert relative(found, wanted.transpose(1, 2).reshape(found.shape)) < 5e-3


@pytest.mark.parametrize(("H", "J", "d"), [(32, 8, 128), (9, 3, 64), (6, 2, 32)])
@pytest.mark.parametrize("start", [0, 3, 250, 255, 1000, 1023])
def test_a_token_attends_to_the_same_bits_alone_and_among_drafts(H, J, d, start):
    from domino_core.kernels.attention import attend

    q, cache, start_B, _ = attention_case(3, 17, [start, 40, 1200], H, J, d, 1400)
    together = attend(q, cache.k[0], cache.v[0], start_B, 17, 1300, True)
    for tokens in (1, 2, 5, 9, 16):
        alone = attend(q[:tokens], cache.k[0, :1], cache.v[0, :1], start_B[:1], tokens, start + tokens, True)
        assert torch.equal(together[:tokens], alone), tokens
    for t in (1, 8, 16):  # as plain decoding comes to it
        alone = attend(q[t : t + 1], cache.k[0, :1], cache.v[0, :1], start_B[:1] + t, 1, start + t + 1, True)
        assert torch.equal(together[t : t + 1], alone), t


@pytest.mark.parametrize(("H", "J", "d", "layers"), [(4, 2, 32, 1), (0, 2, 48, 3), (32, 8, 128, 1)])
@pytest.mark.parametrize("with_norm", [True, False])
def test_norm_rotate_store(H, J, d, layers, with_norm):
    from domino_core.fused import rotary_frequency, rotary_table, rotate
    from domino_core.kernels.attention import norm_rotate_store

    _, cache, _, positions_BT = attention_case(2, 3, [4, 0], 4, J, d, 12, layers)
    before = cache.k.clone(), cache.v.clone()
    rotary = rotary_table(rotary_frequency(d, 1e4), 12, torch.bfloat16, torch.device(DEVICE))
    N, rotated = H + 2 * layers * J, H + layers * J
    projected = normal(6, N * d, seed=5)
    weight = normal(rotated, d, seed=6) if with_norm else None
    turns = rotary[:, positions_BT.flatten(), 0]
    q = norm_rotate_store(projected, weight, 1e-6, turns, positions_BT, cache.k, cache.v)
    heads = projected.view(6, N, d).double()
    qk = heads[:, :rotated]
    if weight is not None:
        qk = F.rms_norm(qk, (d,), None, 1e-6) * weight.double()
    cos, sin = rotary[:, positions_BT.flatten()].double().unbind(0)
    qk = rotate(qk, cos, sin)
    if H:
        assert relative(q, qk[:, :H]) < 3e-3
    for x in range(6):
        row, position = x // 3, int(positions_BT.flatten()[x])
        assert relative(cache.k[:, row, position].flatten(0, 1), qk[x, H:]) < 3e-3
        assert torch.equal(cache.v[:, row, position].flatten(0, 1), projected.view(6, N, d)[x, rotated:])
        before[0][:, row, position], before[1][:, row, position] = cache.k[:, row, position], cache.v[:, row, position]
    assert torch.equal(cache.k, before[0])
    assert torch.equal(cache.v, before[1])


@pytest.mark.parametrize("shape", [(1, 4096), (7, 192), (30, 576)])
def test_rms_norm(shape):
    from domino_core.kernels.norm import rms_norm

    x, weight = normal(*shape, scale=3.0), normal(shape[1], seed=1)
    assert relative(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), shape[1:], weight.double(), 1e-5)) < 3e-3


@pytest.mark.parametrize("shape", [(1, 4096), (7, 192)])
def test_add_norm(shape):
    from domino_core.kernels.norm import add_norm

    x, weight = normal(*shape), normal(shape[1], seed=1)
    parts = torch.randn(2, *shape, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE)
    added, normed = add_norm(x, parts, weight, 1e-5)
    wanted = x + (parts[0] + parts[1]).to(torch.bfloat16)
    assert torch.equal(added, wanted)
    assert relative(normed, F.rms_norm(wanted.double(), shape[1:], weight.double(), 1e-5)) < 3e-3


def test_gumbel_noise_is_the_same_numbers():
    from domino_core.kernels.noise import gumbel_noise

    seed_X = torch.tensor([0, 1, -7, 2**62, -(2**63)])
    position_X = torch.tensor([0, 5, 100000, 3, 2**40])
    for stream in (sampling.TARGET_STREAM, sampling.DRAFT_STREAM):
        wanted = sampling.gumbel_noise(seed_X, position_X, 1500, stream)
        found = gumbel_noise(seed_X.to(DEVICE), position_X.to(DEVICE), 1500, stream).cpu()
        assert (found == wanted).float().mean() > 0.999
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def head_case(reference_dir):
    """(fused head, its twin's scores of drafts in float32, base logits, hidden part), of 20 rows."""
    from domino_core.fused_drafter import FusedHead
    from domino_core.head import DominoHead

    config = read_config(reference_dir / "draft_shift1_p1")
    head = DominoHead(config).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        for index, parameter in enumerate(head.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=index, scale=parameter.shape[-1] ** -0.5))
    V, D, Q = config.vocab_size, config.hidden_size, config.num_drafts
    embed = normal(V, D, seed=50)
    fused = FusedHead(head, embed, torch.bfloat16)
    z, base = normal(20, Q, D, seed=51), normal(20, Q, V, seed=52)
    twin = head.float()

    def scores(anchors, drafts):
        read = torch.cat((anchors[:, None], drafts[:, :-1]), dim=1)
        low = twin.block(z[: len(anchors)].float(), F.embedding(read, embed).float())
        return base[: len(anchors)].float() + low @ twin.last_weight.T

    return fused, scores, base, z @ fused.hidden_DR


def check_best(drafts, scores):
    """Each draft is the best of its scores, up to bfloat16's rounding."""
    best, chosen = scores.amax(-1), scores.gather(2, drafts[..., None])[..., 0]
    assert (best - chosen).max() < 0.1
    assert (best == chosen).float().mean() > 0.9


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("pool", [0, 128])
def test_rollout_drafts_what_the_head_scores_best(head_case, rows, sampled, pool):
    """Under the twin's scores given the drafts before it; with a pool, the best of the tokens in it."""
    fused, scores_of, base, part = head_case
    base, part = base[:rows], part[:rows]
    Q, V = base.shape[1:]
    settings = [SamplingParams(temperature=0.5 + 0.05 * row if sampled else 0.0, seed=row) for row in range(rows)]
    stacked = sampling.RowSampling.stack(settings, DEVICE)
    noise = (
        torch.randn(rows, Q, V, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)) if sampled else None
    )
    anchors = torch.arange(rows, device=DEVICE) % V
    fused.pool = pool
    drafts = fused.rollout(anchors, base, part, stacked, noise)
    scores = scores_of(anchors, drafts)
    if noise is None and not pool:
        assert torch.equal(fused.most_likely(anchors, base, part), drafts)
    if noise is not None:
        scores = scores / stacked.temperature_B[:, None, None] + noise
    if pool:
        outside = base < base.topk(pool, dim=-1).values[..., -1:]
        scores = scores.masked_fill(outside, -torch.inf)
    check_best(drafts, scores)


@torch.inference_mode()
def test_drafts_in_a_pool_obey_top_k_top_p_and_min_p(head_case):
    fused, scores_of, base, part = head_case
    Q, V = base.shape[1:]
    cuts = [{"top_k": 1}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.999}]
    settings = [SamplingParams(temperature=0.9, seed=row, **cuts[row % 6]) for row in range(18)] + [
        SamplingParams()
    ] * 2
    stacked = sampling.RowSampling.stack(settings, DEVICE)
    noise = torch.randn(20, Q, V, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(4))
    noise[18:] = 0
    anchors = torch.arange(20, device=DEVICE) % V
    fused.pool = 0
    drafts = fused.rollout(anchors, base, part, stacked, noise)
    outside = base < base.topk(256, dim=-1).values[..., -1:]
    scores = scores_of(anchors, drafts).masked_fill(outside, -torch.inf)
    # A cut's edge moves with rounding, so a few drafts lie on its other side.
    processed = sampling.processed_logits(scores, stacked) + noise
    best, chosen = processed.amax(-1), processed.gather(2, drafts[..., None])[..., 0]
    assert (best == chosen).float().mean() > 0.9
    assert (chosen > -torch.inf).float().mean() > 0.97
