"""When replicas are added: by requests under way, Serve's own measure, and by how long first tokens take.

Requests under way do not tell long prompts from short ones; the time to the first token does. Each replica reports what
nine of ten requests waited for at most (serve/metrics.py), and Serve hands the figures of all replicas to the policy.
"""

from __future__ import annotations

from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

FIRST_TOKEN = "first_token_s"  # the name under which replicas report
RELAXED = 0.5  # below this part of the aim a replica may go again; in between their number stays


class FirstTokenPolicy:
    """As many replicas as the requests under way ask for, and one more than there are while first tokens are late."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: AutoscalingContext) -> tuple[int | float, dict[str, Any]]:
        """Serve applies the bounds and the delays to what comes back."""
        by_requests, state = replica_queue_length_autoscaling_policy(context)
        reported = [seconds for seconds in (context.aggregated_metrics or {}).get(FIRST_TOKEN, {}).values() if seconds]
        if not reported:
            return by_requests, state
        seconds = sum(reported) / len(reported)
        if seconds > self._target_s:
            return max(by_requests, context.current_num_replicas + 1), state
        if seconds > RELAXED * self._target_s:
            return max(by_requests, context.current_num_replicas), state
        return by_requests, state
