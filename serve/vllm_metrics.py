"""vLLM's metrics with the labels `target` and `drafter_version`, on the replica's /metrics and on Ray's metrics port.

vLLM decides which metrics there are and what they count. Only the classes that it makes them of are ours: they add the
two labels when something is counted, so that the counts of a version stay its own when the next one comes. Gauges say
what the engine does now, whoever drafts: they have `target` alone, or a version's last value would be shown for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.spec_decode.metrics import SpecDecodingProm

from serve.metrics import FirstTokens

Labels = Callable[[], dict[str, str]]


class Labelled:
    """A metric of prometheus_client that has more labels than vLLM knows of; counters and histograms go to Ray, too."""

    def __init__(
        self, kind: type, more: Labels, name: str, documentation: str = "", labelnames: Sequence[str] = (), **rest: Any
    ) -> None:
        self._more, self._known = more, tuple(labelnames)
        names = (*self._known, *more())
        self._metric: Any = kind(name, documentation, names, **rest)
        self._ray = None if kind is Gauge else _rays(kind.__name__, name, documentation, names, rest)
        self._values: dict[str, str] = {}

    def labels(self, *values: Any, **by_name: Any) -> Labelled:
        bound = copy.copy(self)
        given = dict(zip(self._known, values, strict=False)) | by_name
        bound._values = {name: str(value) for name, value in given.items()}
        bound._now()  # shown from now on, at 0 until something is counted
        return bound

    def inc(self, amount: float = 1.0) -> None:
        self._now().inc(amount)
        if self._ray is not None and amount > 0:
            self._ray.inc(amount, tags=self._values | self._more())

    def observe(self, value: float) -> None:
        self._now().observe(value)
        if self._ray is not None:
            self._ray.observe(value, tags=self._values | self._more())

    def set(self, value: float) -> None:
        self._now().set(value)

    def set_to_current_time(self) -> None:
        self._now().set_to_current_time()

    def _now(self) -> Any:
        return self._metric.labels(**self._values, **self._more())


def _rays(kind: str, name: str, documentation: str, names: Sequence[str], rest: dict[str, Any]) -> Any:
    from ray.util import metrics as ray_metrics

    boundaries = {"boundaries": list(rest["buckets"])} if "buckets" in rest else {}
    return getattr(ray_metrics, kind)(name.replace(":", "_"), description=documentation, tag_keys=names, **boundaries)


def stat_logger(labels: Labels, first_tokens: FirstTokens) -> type[PrometheusStatLogger]:
    """The logger that vLLM is to make in place of its own. labels: asked again at every count."""
    counter = partial(Labelled, Counter, labels)

    class SpecDecoding(SpecDecodingProm):
        _counter_cls = counter

    class StatLogger(PrometheusStatLogger):
        _gauge_cls = partial(Labelled, Gauge, lambda: {"target": labels()["target"]})
        _counter_cls = counter
        _histogram_cls = partial(Labelled, Histogram, labels)
        _spec_decoding_cls = SpecDecoding

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            super().record(scheduler_stats, iteration_stats, *args, **kwargs)
            for seconds in iteration_stats.time_to_first_tokens_iter if iteration_stats else ():
                first_tokens.add(seconds)

    return StatLogger
