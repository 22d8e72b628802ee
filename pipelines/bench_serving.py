"""What vLLM gives to so many clients at once, plain and with drafters: tokens/s, waiting times, tokens a round.

Every arm is an engine of its own in a process of its own, with the same arguments but for the drafter. Clients ask in a
closed loop: each sends its next request when the last one is answered.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

Prompt = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What all arms have in common. engine: arguments of vLLM's engine."""

    target: str
    prompts: tuple[Prompt, ...]
    concurrency: tuple[int, ...]
    max_tokens: int
    seconds: float  # that are measured at each concurrency
    warm_seconds: float  # before those, with the same clients
    temperature: float = 0.0
    ends: bool = True  # requests end where the target says so; random weights never do
    engine: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Window:
    """What arrived between two moments."""

    begin: float
    end: float
    tokens: int = 0
    requests: int = 0  # that ended
    first_waits: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])

    def arrived(self, now: float, sent: float, before: float | None, count: int) -> None:
        """`count` tokens at once; before: when the request's last ones came. A gap is shared among its tokens."""
        if not self.begin <= now < self.end:
            return
        self.tokens += count
        if before is None:
            self.first_waits.append(now - sent)
        else:
            self.gaps += [(now - before) / count] * count

    def figures(self) -> dict[str, float | int | None]:
        """Rates and waiting times; None where nothing arrived."""
        return {
            "tokens_per_s": self.tokens / (self.end - self.begin),
            "requests": self.requests,
            "ttft_p50_ms": percentile(self.first_waits, 50),
            "ttft_p99_ms": percentile(self.first_waits, 99),
            "itl_p50_ms": percentile(self.gaps, 50),
            "itl_p99_ms": percentile(self.gaps, 99),
        }


def percentile(seconds: list[float], percent: int) -> float | None:
    """In milliseconds."""
    if len(seconds) < 2:
        return 1e3 * seconds[0] if seconds else None
    return 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def serve_arm(plan: ServingPlan, speculative: dict[str, Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """("start", seconds of it), then (concurrency, figures) as they are measured. RuntimeError if the engine dies."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(plan, speculative, theirs))
    process.start()
    theirs.close()
    try:
        for _ in range(1 + len(plan.concurrency)):
            yield ours.recv()
    except EOFError as error:
        process.join()
        raise RuntimeError(f"the engine's process ended with exit code {process.exitcode}; see above") from error
    finally:
        ours.close()  # whoever does not listen to the end ends the measuring: the next line cannot be sent
        process.join(timeout=60)
        process.kill()


def _serve(plan: ServingPlan, speculative: dict[str, Any] | None, to: Connection) -> None:
    if speculative is not None and speculative["method"] == "ngram":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM's second model runner has no prompt lookup
    asyncio.run(_measure(plan, speculative, to))


async def _measure(plan: ServingPlan, speculative: dict[str, Any] | None, to: Connection) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from domino_core.vllm.plugin import register

    register()  # for a checkout on PYTHONPATH, whose entry point nobody sees
    started = time.perf_counter()
    arguments: dict[str, Any] = {"model": plan.target, "speculative_config": speculative, "seed": 0} | plan.engine
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(enable_prefix_caching=False, **arguments))
    try:
        await _answer(engine, plan, plan.prompts[0], "warm", None)
        to.send(("start", {"seconds": time.perf_counter() - started}))
        for clients in plan.concurrency:
            to.send((str(clients), await _level(engine, plan, clients)))
    finally:
        engine.shutdown()
        del engine  # vLLM complains of one that lives until the interpreter's end


async def _level(engine: Any, plan: ServingPlan, clients: int) -> dict[str, Any]:
    """Figures of so many clients. All begin with the same prompts, whatever the arm."""
    begin = time.perf_counter() + plan.warm_seconds
    window, numbers = Window(begin=begin, end=begin + plan.seconds), itertools.count()

    async def client() -> None:
        while True:
            number = next(numbers)
            await _answer(engine, plan, plan.prompts[number % len(plan.prompts)], f"{clients}-{number}", window)

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    counts: list[tuple[float, float]] = []
    for moment in (window.begin, window.end):
        await asyncio.wait(tasks, timeout=moment - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION)
        counts.append(_spec_counts())
    for task in tasks:
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(found, asyncio.CancelledError):
            raise found if isinstance(found, BaseException) else RuntimeError("a client ended")
    rounds, accepted = (late - early for early, late in zip(*counts, strict=True))
    return window.figures() | {"tau": 1 + accepted / rounds if rounds else 1.0}


async def _answer(engine: Any, plan: ServingPlan, prompt: Prompt, name: str, window: Window | None) -> None:
    """One request from its being sent to its last token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = SamplingParams(
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        ignore_eos=not plan.ends,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    sent, before = time.perf_counter(), None
    async for output in engine.generate({"prompt_token_ids": list(prompt)}, asked, name):
        now = time.perf_counter()
        count = len(output.outputs[0].token_ids)
        if window is not None and count:
            window.arrived(now, sent, before, count)
            before = now
    if window is not None and window.begin <= time.perf_counter() < window.end:
        window.requests += 1


def _spec_counts() -> tuple[float, float]:
    """Rounds and accepted drafts since the engine's start, by vLLM's own counters; zeros without a drafter."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    counts = {each.name: each.value for each in get_metrics_snapshot() if isinstance(each, Counter)}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    rounds, accepted = (float(counts.get(name, 0)) for name in names)
    return rounds, accepted
