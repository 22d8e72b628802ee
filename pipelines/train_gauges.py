"""A run's metrics on Ray's metrics port, as `ray_domino_train_...` with the label `run`: for dashboards and alerts.

MLflow keeps the curves; these are what a run does now, and go when its worker ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

PREFIX = "domino_train_"  # before which Ray writes its own


class TrainGauges:
    """One gauge a metric, made when the metric first comes."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}

    def set(self, metrics: Mapping[str, float]) -> None:
        from ray.util.metrics import Gauge

        for name, value in metrics.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(PREFIX + name, description="See pipelines/train_metrics.", tag_keys=("run",))
            self._gauges[name].set(float(value), tags={"run": self._run})
