"""The other engine: vLLM with Domino drafting in it, behind vLLM's own OpenAI routes.

A request is vLLM's from the first byte to the last: its routes, its chat templates, tools, structured output, scheduler
and metrics. Ours are which drafter is in it, and what the replica says of itself.

    flags of `vllm serve` --> AsyncLLM (an engine process of its own) --> vLLM's app, with our /health before it
    a new version --> checked here --> its weights into the running engine, between two steps

vLLM's private API is touched here and in serve/vllm_metrics.py, in the versions of domino_core.vllm.plugin.TESTED.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from concurrent.futures import wait
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import Route

from domino_core.checkpoint import read_config, read_state
from domino_core.config import DrafterConfig
from domino_core.target import target_hash
from domino_core.vllm.plugin import SECOND, TESTED, version_problem
from domino_core.vllm.settings import GREEDY_BELOW, changed_settings
from serve.config import ServeConfig
from serve.disconnects import TellsOfLeaving
from serve.drafter_cache import DrafterCache
from serve.follower import Follower
from serve.metrics import FirstTokens
from serve.registry_alias import Version, check_target, parse_alias
from serve.vllm_flags import installed_version, parse_flags

logger = logging.getLogger("ray.serve.domino")

ALIVE_S = 5.0  # how often somebody who waits for the engine looks whether it still runs
NOT_SERVED = (
    "/invocations",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
)  # a second way to generate; vLLM's own scaling


class VllmServer:
    """vLLM for one target, and the drafter version in it. `start` and the routes run on Serve's event loop."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.target_hash = target_hash(config.target)
        self.first_tokens = FirstTokens()
        self.version = "none"
        self.follower: Follower | None = None
        self._engine: Any = None
        self._broken = ""
        self.canary_reports = self._own_report  # under Serve: those of all replicas
        self._folder: Path | None = None
        self._drafter: DrafterConfig | None = None
        self._app = FastAPI(docs_url=None, redoc_url=None)
        absent = JSONResponse({"error": {"message": "not served", "type": "NotFoundError", "code": 404}}, 404)
        self._app.router.routes += [Route(path, endpoint=absent) for path in NOT_SERVED]

    async def start(self) -> None:
        """Bring the configured drafter live and follow its alias. ValueError for what does not fit."""
        set_environment(self.config)
        check_vllm()
        parse_flags(self.config, None)  # what is wrong with them is no drafter's fault
        alias = parse_alias(self.config.drafter, self.config.tracking_uri)
        self._loop = asyncio.get_running_loop()
        if alias is not None:
            self.follower = Follower(alias, DrafterCache(self.config.cache_dir), self.accept)
            await asyncio.to_thread(self.follower.start, self.config.poll_seconds)
        elif self.config.drafter == "none":
            await self._begin(None)
        else:
            folder = Path(self.config.drafter).expanduser()
            await asyncio.to_thread(self.accept, folder, Version(number=folder.name, source=str(folder)))

    def accept(self, folder: Path, version: Version) -> None:
        """Check a version and draft with it. If it is not right: raise and change nothing. Not on the event loop."""
        check_target(folder, version, self.target_hash)
        drafter = read_config(folder)
        read_state(folder)  # every tensor there, of its shape, and finite
        self._wait_for(
            self._begin(folder, version.number) if self._engine is None else self._exchange(folder, drafter, version)
        )
        self._folder, self._drafter, self.version = folder, drafter, version.number
        self._show_version()

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done on Serve's event loop. What an engine was asked before it died is never answered."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not wait([future], timeout=ALIVE_S).done:
            if self._engine is not None and self._engine.errored:
                future.cancel()
                raise self._engine.dead_error
        future.result()

    async def _begin(self, folder: Path | None, version: str = "none") -> None:
        """Make the engine, and the routes in front of it. All of it is there in the end, or nothing."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from serve.vllm_metrics import stat_logger

        args = parse_flags(self.config, folder)
        settings = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        on_cpu = settings.device_config.device_type == "cpu"
        make: Any = greedy_only() if folder is not None and on_cpu else AsyncLLM
        self.version = version  # before there are metrics, which start at 0 with their labels
        engine = None
        try:
            engine = make.from_vllm_config(
                settings,
                stat_loggers=[stat_logger(self.labels, self.first_tokens)],
                enable_log_requests=args.enable_log_requests,
                disable_log_stats=args.disable_log_stats,
            )
            tasks = await engine.get_supported_tasks()
            routes = build_app(args, tasks, engine.model_config)
            await init_app_state(engine, routes.state, args, tasks)
        except Exception:
            self.version = "none"
            if engine is not None:
                await asyncio.to_thread(engine.shutdown)  # another version may want its memory
            raise
        routes.state.server = SimpleNamespace()  # vLLM's own launcher would be told to end here; Serve asks for health
        self._app.get("/health")(self._health_page)
        self._app.get("/canary")(self._canary_page)
        self._app.mount("/", TellsOfLeaving(routes))
        self._engine, self._state = engine, routes.state
        self._show_version()

    async def _exchange(self, folder: Path, drafter: DrafterConfig, version: Version) -> None:
        """Another version's weights into the engine, while it pauses: all of its workers have them, or none.

        Requests that are being answered go on after it. What the old drafter made of their texts is of no use to the
        new one, so the cache is emptied and they are taken in once more; their answers are the target's, whoever
        drafts. The pause waits for steps under way: 0.26.0 would lose their tokens when the requests start again.
        """
        assert self._drafter is not None
        if changed := changed_settings(self._drafter, drafter):
            raise ValueError(
                f"it has another {', '.join(changed)} than the drafter in the engine, which was made for that: "
                "python -m jobs.deploy, given again, makes new engines and lets the old ones finish"
            )
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        try:
            await self._load(folder)
        except Exception:  # some tensors, or some workers, may have it
            try:
                await self._load(self._folder)
            except Exception as error:
                self._broken = (
                    f"drafter {version.number} could not be loaded, and {self.version} not put back "
                    f"({type(error).__name__}: {error}): the weights are of neither"
                )
            raise
        finally:
            if not self._broken:  # workers with different drafts would not even agree on the answer
                await self._engine.resume_generation()

    async def _load(self, folder: Path | None) -> None:
        await self._engine.collective_rpc("load_drafter", args=(str(folder),))
        await self._engine.reset_prefix_cache(reset_running_requests=True)

    def _show_version(self) -> None:
        """In system_fingerprint, which vLLM's routes keep one by one."""
        for routes in vars(self._state)["_state"].values():
            if hasattr(routes, "system_fingerprint"):
                routes.system_fingerprint = f"{self.target_hash}-drafter-{self.version}"

    def labels(self) -> dict[str, str]:
        """What every metric is labelled with, besides vLLM's own labels."""
        return {"target": self.target_hash, "drafter_version": self.version}

    def http_app(self) -> FastAPI:
        return self._app

    @property
    def failure(self) -> str:
        """Why this replica has to be replaced; "" when all is well."""
        if self._engine is None:
            return "the engine has not started"
        return str(self._engine.dead_error) if self._engine.errored else self._broken

    async def _health_page(self) -> JSONResponse:
        state = self.health()
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    def canary_report(self) -> dict[str, Any]:
        return {
            "unable": "with serve.engine=vllm an engine has one drafter, so no share of its requests goes to another: "
            "promote without --canary (--rollback brings the champion back), or compare behind a second endpoint"
        }

    async def _own_report(self) -> list[dict[str, Any]]:
        return [self.canary_report()]

    async def _canary_page(self) -> dict[str, Any]:
        return {"replicas": await self.canary_reports()}

    def health(self) -> dict[str, Any]:
        """As the torch engine's, without what vLLM keeps to itself: which requests have a row and which wait."""
        return {
            "status": "failed" if self.failure else "ok",
            "failure": self.failure,
            "model": self.config.served_name,
            "target_hash": self.target_hash,
            "drafter": {"live": self.version} | (asdict(self.follower.state) if self.follower else {}),
            "requests": {"unfinished": self._engine.output_processor.get_num_unfinished_requests()},
        }

    def close(self) -> None:
        """End the follower and the engine's process. Not on the event loop, which the follower may be waiting for."""
        if self.follower is not None:
            self.follower.close()
        if self._engine is not None:
            self._engine.shutdown()


def set_environment(config: ServeConfig) -> None:
    """What vLLM reads from the environment, before it is imported; what the replica was given there stays.

    ValueError for a key of vLLM's own: it asks for that on some paths alone.
    """
    if os.environ.get("VLLM_API_KEY"):
        raise ValueError("VLLM_API_KEY is set where Ray runs: give the key as DOMINO_API_KEY, which all paths ask for")
    on_cpu = config.resolved_device == "cpu"
    second = not on_cpu and SECOND in TESTED.get(installed_version(), ())  # there, drafting is part of a graph
    chosen = {"VLLM_USE_V2_MODEL_RUNNER": str(int(second)), "VLLM_MAX_N_SEQUENCES": str(config.max_choices)}
    if on_cpu:
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # engines of two replicas would share one core
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def check_vllm() -> None:
    """ValueError for a vLLM that is not known, or that will not find our drafters."""
    if problem := version_problem():
        raise ValueError(problem)
    if not any(point.value.startswith("domino_core.") for point in entry_points(group="vllm.general_plugins")):
        raise ValueError("vLLM cannot draft with Domino here: this package is not installed (pip install -e .)")


def greedy_only() -> type:
    """AsyncLLM that refuses sampled requests, for the CPU build: there they would end the engine (drafting.py)."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    class GreedyOnly(AsyncLLM):
        def generate(self, prompt: Any, sampling_params: Any, request_id: str, **settings: Any) -> Any:
            """Not a generator: it refuses when it is called, while the answer can still have a status."""
            if sampling_params.temperature >= GREEDY_BELOW:
                raise VLLMValidationError(
                    "this server runs vLLM's CPU build, which verifies drafts of sampled requests wrongly: "
                    'send "temperature": 0 (or serve without a drafter, on a GPU, or with engine=torch)',
                    parameter="temperature",
                    value=sampling_params.temperature,
                )
            return super().generate(prompt, sampling_params, request_id, **settings)

    return GreedyOnly
