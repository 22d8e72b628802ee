"""The parts of a round, each timed alone beside its floor (bench_shapes.py).

On a GPU a part is captured in a CUDA graph, so that the device is timed and not the host that feeds it; what the same
part takes when it is called as it stands is told beside it.

B rows · Q drafts · T = Q+1 tokens verified · C feature width · V vocabulary
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from domino_core.decode import RoundShape, draft_block
from domino_core.decode_state import DecodeState, DraftModel
from domino_core.drafter import Drafter
from domino_core.fused_drafter import CUT_POOL, FusedDrafter
from domino_core.sampling import RowSampling, accept, draw
from domino_core.sampling_params import SamplingParams
from domino_core.target_model import Target
from pipelines.bench_shapes import (
    Ceilings,
    Shape,
    Work,
    accept_work,
    draft_work,
    extend_work,
    head_work,
    pass_work,
    pooled_head_work,
)

Call = Callable[[], Any]
VERIFIED = (1, 2, 4, 5, 8, 9, 16, 17)
HEAD_PART = "head, fused"


def parts_table(
    shape: Shape, target: Target, drafter: Drafter, ceilings: Ceilings, *, context: int, repeats: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Milliseconds, floor and their ratio of every part of a round of one row behind `context` tokens, as measured."""
    for name, (call, work) in _parts(shape, target, drafter, context).items():
        floor_ms = ceilings.floor_ms(work)
        ms = 1e3 * device_seconds(call, target.device, repeats)
        eager_ms = 1e3 * eager_seconds(call, target.device, max(3, repeats // 4))
        yield (
            name,
            {
                "ms": ms,
                "floor_ms": floor_ms,
                "ratio": ms / floor_ms,
                "eager_ms": eager_ms,
                "bytes": work.bytes,
                "operations": work.operations,
            },
        )


@torch.inference_mode()
def _parts(shape: Shape, target: Target, drafter: Drafter, context: int) -> dict[str, tuple[Call, Work]]:
    """What is called and the least work it can be, by name."""
    size, fused, config = target.dtype.itemsize, FusedDrafter(drafter), shape.drafter
    state = _filled_state(target, fused, context)
    start_1 = state.length_B[:1]
    parts: dict[str, tuple[Call, Work]] = {}
    parts["plain step"] = (lambda: _plain_step(target, state), _pass(shape, 1, context, size))
    for tokens in VERIFIED:
        if tokens <= config.num_drafts + 1:
            verify = _verify(target, config.target_layer_ids, state, tokens)
            parts[f"verify, {tokens} tokens"] = (verify, _pass(shape, tokens, context, size))

    def backbone() -> torch.Tensor:
        assert state.draft_cache is not None
        z_1QD = fused.draft_hidden(state.draft_cache.view(1), state.anchor_B[:1], start_1, context)
        return fused.base_logits(z_1QD)

    parts["drafter's backbone"] = (backbone, draft_work(config, rows=1, context=context, itemsize=size))
    heads: dict[str, DraftModel] = {"head, as trained": drafter, HEAD_PART: fused}
    for name, model in heads.items():
        parts[name] = (_rollout(model, state, context), head_work(config, rows=1, itemsize=size))
    pooled = copy.copy(fused)
    pooled.head = copy.copy(fused.head)
    if pooled.head is not None:
        pooled.head.pool = CUT_POOL
        work = pooled_head_work(config, rows=1, pool=CUT_POOL, itemsize=size)
        parts[f"head, pool of {CUT_POOL}"] = (_rollout(pooled, state, context), work)
    parts |= _commit_parts(shape, target, fused, state)
    return parts


def _pass(shape: Shape, tokens: int, context: int, itemsize: int) -> Work:
    return pass_work(shape.target, rows=1, tokens=tokens, context=context, itemsize=itemsize)


def _filled_state(target: Target, drafter: DraftModel, context: int) -> DecodeState:
    """One row behind `context` tokens; the caches hold noise, since zeros would cost a chip less power."""
    state = DecodeState.allocate(target, drafter, 1, context + drafter.config.num_drafts + 1)
    assert state.draft_cache is not None
    for cache in (state.target_cache, state.draft_cache):
        cache.k.normal_()
        cache.v.normal_()
    state.length_B.fill_(context)
    state.drawn_B.fill_(1)
    state.lengths[0] = context
    return state


def _plain_step(target: Target, state: DecodeState) -> torch.Tensor:
    hidden_11D, _ = target.forward(
        state.anchor_B[:1, None], state.length_B[:1], state.target_cache.view(1), (), num_keys=state.lengths[0] + 1
    )
    return draw(target.logits(hidden_11D), None)


def _verify(target: Target, taps: tuple[int, ...], state: DecodeState, tokens: int) -> Call:
    ids_1T = torch.randint(target.config.vocab_size, (1, tokens), device=target.device)
    num_keys = state.lengths[0] + tokens

    def verify() -> torch.Tensor:
        hidden_1TD, _ = target.forward(ids_1T, state.length_B[:1], state.target_cache.view(1), taps, num_keys=num_keys)
        return target.logits(hidden_1TD)

    return verify


def _rollout(drafter: DraftModel, state: DecodeState, context: int) -> Call:
    """decode.draft_block of a drafter whose backbone has spoken: what is left of it is the head, one row, greedy."""
    assert state.draft_cache is not None
    z_1QD = drafter.draft_hidden(state.draft_cache.view(1), state.anchor_B[:1], state.length_B[:1], context)
    base_1QV = drafter.base_logits(z_1QD)
    spoken: Any = copy.copy(drafter)
    spoken.draft_hidden = lambda *_, **__: z_1QD
    spoken.base_logits = lambda _: base_1QV
    sampling = RowSampling.stack([SamplingParams()], z_1QD.device)
    shape = RoundShape(1, drafter.config.num_drafts, context + drafter.config.num_drafts + 1)
    return lambda: draft_block(spoken, state, sampling, None, shape)


def _commit_parts(
    shape: Shape, target: Target, drafter: FusedDrafter, state: DecodeState
) -> dict[str, tuple[Call, Work]]:
    """What follows a verification of a whole block."""
    config, size, device = shape.drafter, target.dtype.itemsize, target.device
    tokens = config.num_drafts + 1
    features_1TC = torch.randn(1, tokens, config.feature_width, dtype=target.dtype, device=device)
    logits_1TV = torch.randn(1, tokens, shape.target.vocab_size, dtype=target.dtype, device=device)
    drafts_1Q = torch.randint(shape.target.vocab_size, (1, config.num_drafts), device=device)
    position_1T = torch.arange(tokens, device=device)[None]
    written_1T = state.length_B[:1, None] + position_1T
    sampling = RowSampling.stack([SamplingParams()], device)
    anchor_1, length_1 = state.anchor_B[:1].clone(), state.length_B[:1].clone()

    def extend() -> None:
        assert state.draft_cache is not None
        drafter.extend_context(state.draft_cache.view(1), features_1TC, written_1T)

    def accept_and_commit() -> None:
        accepted_1, tokens_1T = accept(sampling, drafts_1Q, None, logits_1TV, None, position_1T)
        anchor_1.copy_(tokens_1T.gather(1, accepted_1[:, None])[:, 0])
        length_1.add_(accepted_1 + 1)

    return {
        f"extend context, {tokens} tokens": (extend, extend_work(config, rows=1, tokens=tokens, itemsize=size)),
        "accept and commit": (accept_and_commit, accept_work(shape.target, rows=1, tokens=tokens, itemsize=size)),
    }


@torch.inference_mode()
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A copy within the device, counted as read and written, and a large product of random numbers."""
    # Long enough not to need a graph; a copy in a graph is another one, and slower (2.4 against 3.0 TB/s on an H100).
    size, width = (4 << 30, 8192) if device.type == "cuda" else (1 << 24, 256)
    source, copied = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    return Ceilings(
        bytes_per_s=2 * size / eager_seconds(lambda: copied.copy_(source), device, 20),
        operations_per_s=2 * width**3 / eager_seconds(lambda: left @ right, device, 20),
    )


@torch.inference_mode()
def device_seconds(call: Call, device: torch.device, repeats: int) -> float:
    """The median time of a call: replays of its CUDA graph, timed by the device; on a CPU by the clock."""
    if device.type != "cuda":
        return eager_seconds(call, device, repeats)
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):  # what the first calls set up must not be captured
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


@torch.inference_mode()
def eager_seconds(call: Call, device: torch.device, repeats: int) -> float:
    """The median time of a call from the host's side, each waited for."""
    call()
    seconds: list[float] = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
