"""The Ray Serve application: one deployment that owns the engine and answers HTTP itself (one hop).

Started by either of

    serve run serve.app:build_app target=assets/tiny-qwen3 drafter=none
    python -m jobs.deploy --preset tiny
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve as ray_serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig

from serve.admission import Admission, digests, read_keys
from serve.autoscaling import FIRST_TOKEN, FirstTokenPolicy
from serve.config import ServeConfig, read_config
from serve.registry_alias import parse_alias

logger = logging.getLogger("ray.serve.domino")

REPORTS_TIMEOUT_S = 30.0

if TYPE_CHECKING:
    from serve.server import Server
    from serve.vllm_engine import VllmServer


@ray_serve.deployment(name="domino")
@ray_serve.ingress()
class Replica:
    """One loaded target under Ray Serve, which asks for its health, routes to it, and adds or removes copies of it."""

    _server: Server | VllmServer

    async def __init__(self, config: ServeConfig, keys: tuple[bytes, ...]) -> None:  # Serve awaits it
        self._keys = keys
        if config.engine == "vllm":
            from serve.vllm_engine import VllmServer

            self._server = VllmServer(config)
            await self._server.start()
        else:
            from serve.server import Server

            self._server = Server(config, with_ray=True)
        self._server.canary_reports = self._all_reports

    async def __serve_build_asgi_app__(self) -> FastAPI:
        if not self._keys:
            logger.warning("no API key is set: whoever reaches the port gets answers (docs/serving.md, API key)")
        return admitted(self._server, self._keys)

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if self._server.failure:
            raise RuntimeError(self._server.failure)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to the autoscaling policy."""
        return {FIRST_TOKEN: self._server.first_tokens.slowest_tenth()}

    def canary_report(self) -> dict[str, Any]:
        """Called by the replica that is asked for everyone's."""
        return self._server.canary_report()

    async def _all_reports(self) -> list[dict[str, Any]]:
        """Every replica's report; that of one which is just going is missed, and its figures with it.

        A replica that has all its requests answers when the first of them is through.
        """
        own = self._server.canary_report()
        if own["unable"]:  # for a reason that all have
            return [own]
        context = ray_serve.get_replica_context()
        everyone = ray_serve.get_deployment_handle(context.deployment, context.app_name).broadcast("canary_report")
        reports = await everyone.results_async(timeout_s=REPORTS_TIMEOUT_S, return_exceptions=True)
        return [report for report in reports if isinstance(report, dict)]

    async def __del__(self) -> None:
        # Also called when __init__ failed, and then there may be nothing to close. Not on this thread: what is closed
        # may be waiting for something that runs here.
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.close)


def build_app(args: dict[str, Any]) -> Application:
    """The application for `serve run` and for Serve config files: `args` are the fields of ServeConfig."""
    return application(read_config(args))


def admitted(server: Server | VllmServer, keys: tuple[bytes, ...]) -> FastAPI:
    """A server's routes behind its key and limits. keys: their digests."""
    config, app = server.config, server.http_app()
    app.add_middleware(  # and not around it: Serve looks at the routes of what it is given
        Admission,
        keys=keys,
        max_body_bytes=config.max_body_bytes,
        retry_after_s=config.retry_after_s,
        failure=lambda: server.failure,
    )
    return app


def application(config: ServeConfig) -> Application:
    """ValueError for a configuration without a target, with a drafter that cannot be looked up or keys that are none.

    Keys are read here, on the node that builds the application: replicas may run where their file is not.
    """
    if not config.target:
        raise ValueError("target= is required: a model id or a local folder")
    parse_alias(config.drafter, config.tracking_uri)
    scaling: dict[str, Any] = {
        "min_replicas": config.min_replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.target_ongoing_requests,
        "upscale_delay_s": config.upscale_delay_s,
        "downscale_delay_s": config.downscale_delay_s,
    }
    if config.target_first_token_s is not None:
        scaling["policy"] = {
            "policy_function": FirstTokenPolicy,
            "policy_kwargs": {"target_s": config.target_first_token_s},
        }
    return Replica.options(
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        backpressure_config=BackpressureConfig(retry_after_s=config.retry_after_s),
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": config.gpus_per_replica},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,  # running answers finish when a replica is taken away
    ).bind(config, digests(read_keys(config.api_key_file)))
