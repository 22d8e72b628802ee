"""Replicas by requests under way and by time to first token: the policy alone, and a real Serve that follows it."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jobs.drill_ground import free_port
from serve.autoscaling import FIRST_TOKEN, FirstTokenPolicy
from serve.config import ServeConfig
from serve.metrics import RECENT_S, FirstTokens
from tests.serving import wait_until


def context(replicas: int, requests: float, *seconds: float) -> Any:
    """As much of an AutoscalingContext as is read: replicas that aim at 10 requests each."""
    return SimpleNamespace(
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        total_num_requests=requests,
        aggregated_metrics={FIRST_TOKEN: dict(enumerate(seconds))} if seconds else None,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 10),
        policy_state={},
    )


@pytest.mark.parametrize(
    ("replicas", "requests", "seconds", "wanted"),
    [
        (2, 30, (), 3),  # nothing is known of first tokens: by requests
        (2, 30, (0.0, 0.0), 3),
        (2, 8, (0.1, 0.1), 0.8),  # they come early: by requests, also downwards
        (2, 8, (0.7, 0.7), 2),  # nearly late: no replica goes
        (2, 8, (1.2, 1.2), 3),  # late: one more, whatever the requests say
        (2, 60, (1.2, 1.2), 6),  # late, and the requests ask for more still
        (2, 8, (3.0, 0.1), 3),  # the mean of those that answer anything
        (3, 8, (1.5, 0.0, 0.0), 4),
    ],
)
def test_policy(replicas, requests, seconds, wanted):
    desired, _ = FirstTokenPolicy(target_s=1.0)(context(replicas, requests, *seconds))
    assert desired == pytest.approx(wanted)


def test_first_tokens_are_those_of_the_last_half_minute():
    now = [0.0]
    recent = FirstTokens(clock=lambda: now[0])
    assert recent.slowest_tenth() == 0
    for seconds in range(1, 21):
        recent.add(float(seconds))
    assert recent.slowest_tenth() == 19
    now[0] = RECENT_S - 1
    recent.add(0.5)
    assert recent.slowest_tenth() == 18
    now[0] = RECENT_S + 1
    assert recent.slowest_tenth() == 0.5


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.matrix  # a minute, of which Serve's look-back takes most
def test_late_first_tokens_bring_a_second_replica(local_ray, embedded_target):
    """One request at a time, of which no replica has too many."""
    from ray import serve as ray_serve

    from serve.deployment import deploy

    config = ServeConfig(
        target=str(embedded_target),
        drafter="none",
        app_name="scaled",
        port=free_port(),
        max_length=256,
        max_rows=1,
        target_ongoing_requests=1000,
        max_ongoing_requests=1000,
        target_first_token_s=1e-4,
        upscale_delay_s=1.0,
    )
    done = threading.Event()
    try:
        url = deploy(config)

        def keep_asking() -> None:
            body = {"model": config.served_name, "prompt": "x", "max_tokens": 4, "temperature": 0}
            while not done.is_set():
                httpx.post(f"{url}/completions", json=body, timeout=60).raise_for_status()
                time.sleep(0.2)

        asking = threading.Thread(target=keep_asking)
        asking.start()

        def running() -> int:
            states = ray_serve.status().applications["scaled"].deployments["domino"].replica_states
            return sum(count for state, count in states.items() if state == "RUNNING")

        assert running() == 1
        wait_until(lambda: running() == 2, 240)
        done.set()
        asking.join()
    finally:
        done.set()
        ray_serve.shutdown()
