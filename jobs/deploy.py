"""Serve a target with the champion of its drafters behind an OpenAI endpoint.

    python -m jobs.deploy --preset tiny                     serve.drafter=none for plain decoding, or a folder
    python -m jobs.deploy --preset qwen3_8b target=Qwen/Qwen3-8B serve.gpus_per_replica=1 serve.port=8001

Connects to a running Ray (RAY_ADDRESS, or one on this machine), where the application stays after this command. Where
there is none, or with RAY_ADDRESS=local, it starts one, stays in the foreground until Ctrl-C (--wait does so in both
cases), and then stops what it started.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jobs.overrides import describe, job_parser, load, run_job

if TYPE_CHECKING:
    from jobs.presets import JobConfig
    from serve.schema import ServeConfig


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--wait", action="store_true", help="stay in the foreground, and undeploy on Ctrl-C")
    args = parser.parse_args(argv)
    config = serve_config(load(args, required=("target",)))
    if args.plan:
        print(describe(config))
        return
    # A terminated command cleans up as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    check_registry(config)
    started_ray = connect(config)
    try:
        url = deploy(config)
        print(how_to_call(config, url), flush=True)
        if started_ray or args.wait:
            print("Ctrl-C stops it.", flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr, flush=True)
        undeploy(config)
    finally:
        if started_ray:
            disconnect()


def serve_config(job: JobConfig) -> ServeConfig:
    """The job's serving section with what other sections decide: target, registry, and the champion as the default."""
    from pathlib import Path

    from pipelines.registry import registered_name
    from pipelines.tracking import tracking_uri
    from serve.schema import ServeConfig

    section = job.serve
    cache = str(Path(job.root) / "drafters") if section.cache_dir == ServeConfig().cache_dir else section.cache_dir
    folder = Path(section.drafter).expanduser()
    drafter = str(folder.resolve()) if section.drafter and folder.is_dir() else section.drafter
    return replace(
        section,
        target=section.target or job.target,
        tracking_uri=section.tracking_uri or tracking_uri(job.tracking_uri, job.root),
        drafter=drafter or f"models:/{registered_name(job.target)}@champion",
        cache_dir=cache,
    )


def check_registry(config: ServeConfig) -> None:
    """ValueError before anything is started: no such model, alias or folder, or a tracking server that is away."""
    from domino_core.target import read_target_config
    from serve.follower import look_up, parse_alias

    read_target_config(config.target)
    alias = parse_alias(config.drafter, config.tracking_uri)
    if alias is not None:
        version = look_up(alias)
        print(f"{alias} is version {version.number} in {alias.tracking_uri}", flush=True)


def connect(config: ServeConfig) -> bool:
    """Connect to a running Ray, or start one; True if it was started. ValueError if the port is somebody else's."""
    import ray

    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "local":
        try:  # the only way to ask whether there is one to connect to
            ray.init(address=address, log_to_driver=False)
            return False
        except ConnectionError as error:
            if address != "auto":
                raise ValueError(f"no Ray answers at RAY_ADDRESS={address}: {error}") from error
    check_port(config)
    ray.init(address="local", num_cpus=max(4, os.cpu_count() or 1), log_to_driver=False)
    return True


def disconnect() -> None:
    import ray
    from ray import serve as ray_serve

    ray_serve.shutdown()
    ray.shutdown()


def check_port(config: ServeConfig) -> None:
    """ValueError if something listens where the endpoint should be."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ValueError(
                f"port {config.port} on {config.host} cannot be used ({error.strerror}): "
                "stop what listens there, or choose another with serve.port="
            ) from error


def deploy(config: ServeConfig) -> str:
    """Run or update the application on the connected Ray; returns the endpoint's base URL once a replica answers."""
    from ray import serve as ray_serve

    from serve.app import application

    if ray_serve.status().proxies:
        if not serve_listens(config):
            raise ValueError(
                f"this Ray already serves HTTP, and not on {config.host}:{config.port}: "
                "give its port with serve.port=, or end it (serve shutdown)"
            )
    else:
        check_port(config)
        ray_serve.start(proxy_location="HeadOnly", http_options={"host": config.host, "port": config.port})
    try:  # Serve's own message says only that it failed; the deployment's has the replica's traceback
        ray_serve.run(application(config), name=config.app_name, route_prefix="/")
    except RuntimeError as error:
        deployments = ray_serve.status().applications[config.app_name].deployments.values()
        reasons = "\n".join(deployment.message for deployment in deployments)
        raise RuntimeError(f"{error}\n{reasons}") from error
    return f"http://{config.host}:{config.port}/v1"


def undeploy(config: ServeConfig) -> None:
    from ray import serve as ray_serve

    ray_serve.delete(config.app_name)


def serve_listens(config: ServeConfig) -> bool:
    """Whether a Ray Serve proxy answers on the configured port."""
    try:
        with urllib.request.urlopen(f"http://{config.host}:{config.port}/-/healthz", timeout=5) as response:
            return response.status == 200
    except urllib.error.HTTPError:
        return False
    except OSError:
        return False


def how_to_call(config: ServeConfig, url: str) -> str:
    body = (
        f'{{"model": "{config.served_name}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 64}}'
    )
    return (
        f"{config.served_name} answers at {url} (drafter: {config.drafter})\n"
        f"  curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  health {url.removesuffix('/v1')}/health    metrics {url.removesuffix('/v1')}/metrics"
    )


if __name__ == "__main__":
    sys.exit(run_job(main))
