"""Counters of a replica under vLLM's names, so that dashboards made for vLLM read them unchanged.

Each metric is kept twice: in a registry of our own, which the API port shows at /metrics (one replica's view), and in
Ray's, which every node's metrics port shows for all replicas as `ray_vllm_...`. Mean acceptance length is
1 + num_accepted_tokens / num_drafts; position i is accepted num_accepted_tokens_per_pos[i] / num_drafts of the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from domino_core.decode import Acceptance

# vLLM's buckets, in seconds.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
LABELS = ("model_name", "target", "drafter_version")
RECENT_S = 30.0


def acceptance_report(acceptance: Acceptance, num_drafts: int) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding` of a response, summary level; num_drafts: the most of a round."""
    at_least = [acceptance.rounds, *acceptance.accepted_at]
    at_least += [0] * (num_drafts + 2 - len(at_least))
    return {
        "mean_acceptance_length": acceptance.tau,
        "draft_acceptance_rate": acceptance.accepted / acceptance.drafted if acceptance.drafted else 0.0,
        # [j]: rounds that accepted exactly j drafts.
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        "num_spec_steps": acceptance.rounds,
        "num_accepted_draft_tokens": acceptance.accepted,
        "num_draft_tokens": acceptance.drafted,
        "num_spec_tokens": num_drafts,
    }


class FirstTokens:
    """Times to the first token of the last half minute. Any thread may add, any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[tuple[float, float]] = deque(maxlen=4096)

    def add(self, seconds: float) -> None:
        self._times.append((self._clock(), seconds))

    def slowest_tenth(self) -> float:
        """Nine of ten requests waited for no longer; 0 where none came."""
        since = self._clock() - RECENT_S
        recent = sorted(seconds for moment, seconds in list(self._times) if moment >= since)
        return recent[(9 * len(recent)) // 10] if recent else 0.0


class Metrics:
    """The counters of one replica. `target` and the served name label all of them, the drafter's version most."""

    def __init__(self, model_name: str, target: str, with_ray: bool) -> None:
        self.registry = CollectorRegistry()
        self.first_tokens = FirstTokens()
        self._fixed = {"model_name": model_name, "target": target}
        self._with_ray = with_ray
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated, after stops and limits.")
        self._requests = self._counter("request_success", "Requests finished.", ("finished_reason",))
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds that drafted.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by position.", ("position",)
        )
        self._refusals = self._counter("spec_decode_drafter_refusals", "Drafter versions that were not let in.")
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_BUCKETS)
        self._latency = self._histogram("e2e_request_latency_seconds", "Time to the last token.", LATENCY_BUCKETS)

    def admitted(self, version: str, prompt_tokens: int) -> None:
        self._prompt_tokens(prompt_tokens, drafter_version=version)

    def progressed(self, version: str, new_tokens: int, before: Acceptance, after: Acceptance) -> None:
        """One output of one request: tokens that it added, and the request's acceptance before and after it."""
        self._generation_tokens(new_tokens, drafter_version=version)
        if after.drafted == before.drafted:
            return  # prefill's token, or plain decoding
        self._drafts(after.rounds - before.rounds, drafter_version=version)
        self._draft_tokens(after.drafted - before.drafted, drafter_version=version)
        self._accepted(after.accepted - before.accepted, drafter_version=version)
        for position, (now, then) in enumerate(zip_longest(after.accepted_at, before.accepted_at, fillvalue=0)):
            self._accepted_at(now - then, drafter_version=version, position=str(position))

    def first_token(self, version: str, seconds: float) -> None:
        self._first_token(seconds, drafter_version=version)
        self.first_tokens.add(seconds)

    def finished(self, version: str, reason: str, seconds: float) -> None:
        """`reason` is stop, length, abort (the client left) or error."""
        self._requests(1, drafter_version=version, finished_reason=reason)
        self._latency(seconds, drafter_version=version)

    def refused(self, version: str) -> None:
        self._refusals(1, drafter_version=version)

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when the page is asked for."""
        gauge = Gauge(f"vllm:{name}", help_text, ("model_name", "target"), registry=self.registry)
        gauge.labels(**self._fixed).set_function(read)

    def page(self) -> bytes:
        """Prometheus text format of this replica."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, extra: Sequence[str] = ()) -> Callable[..., None]:
        ours = Counter(f"vllm:{name}", help_text, (*LABELS, *extra), registry=self.registry)
        rays = self._ray("Counter", name, help_text, extra)

        def add(amount: float, **labels: str) -> None:
            ours.labels(**self._fixed, **labels).inc(amount)
            if rays is not None and amount > 0:
                rays.inc(amount, tags=self._fixed | labels)

        return add

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Callable[..., None]:
        ours = Histogram(f"vllm:{name}", help_text, LABELS, registry=self.registry, buckets=buckets)
        rays = self._ray("Histogram", name, help_text, (), boundaries=list(buckets))

        def observe(seconds: float, **labels: str) -> None:
            ours.labels(**self._fixed, **labels).observe(seconds)
            if rays is not None:
                rays.observe(seconds, tags=self._fixed | labels)

        return observe

    def _ray(self, kind: str, name: str, help_text: str, extra: Sequence[str], **options: Any) -> Any:
        if not self._with_ray:
            return None
        from ray.util import metrics as ray_metrics

        make = getattr(ray_metrics, kind)
        return make(f"vllm_{name}", description=help_text, tag_keys=(*LABELS, *extra), **options)
