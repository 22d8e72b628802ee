"""The Ray Serve application: one deployment that owns the engine and answers HTTP itself (one hop).

Started by either of

    serve run serve.app:build_app target=assets/tiny-qwen3 drafter=none
    python -m jobs.deploy --preset tiny
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve as ray_serve
from ray.serve import Application

from serve.config import ServeConfig, read_config
from serve.follower import parse_alias
from serve.openai_routes import http_app
from serve.server import Server


@ray_serve.deployment(name="domino")
@ray_serve.ingress()
class Replica:
    """A Server under Ray Serve, which asks for its health, routes to it, and adds or removes copies of it."""

    def __init__(self, config: ServeConfig) -> None:
        self._server = Server(config, with_ray=True)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return http_app(self._server)

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if self._server.loop.failure:
            raise RuntimeError(self._server.loop.failure)

    def __del__(self) -> None:
        # Also called when __init__ failed, and then there is nothing to close.
        if hasattr(self, "_server"):
            self._server.close()


def build_app(args: dict[str, Any]) -> Application:
    """The application for `serve run` and for Serve config files: `args` are the fields of ServeConfig."""
    return application(read_config(args))


def application(config: ServeConfig) -> Application:
    """ValueError for a configuration without a target or with a drafter that cannot be looked up."""
    if not config.target:
        raise ValueError("target= is required: a model id or a local folder")
    parse_alias(config.drafter, config.tracking_uri)
    return Replica.options(
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        autoscaling_config={
            "min_replicas": config.min_replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": config.target_ongoing_requests,
            "upscale_delay_s": config.upscale_delay_s,
            "downscale_delay_s": config.downscale_delay_s,
        },
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": config.gpus_per_replica},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,  # running answers finish when a replica is taken away
    ).bind(config)
