"""Serve a target with the champion of its drafters behind an OpenAI endpoint.

    python -m jobs.deploy --preset tiny                     serve.drafter=none for plain decoding, or a folder
    python -m jobs.deploy --preset qwen3_8b target=Qwen/Qwen3-8B serve.gpus_per_replica=1 serve.port=8001

Connects to a running Ray (RAY_ADDRESS, or one on this machine), where the application stays after this command. Where
there is none, or with RAY_ADDRESS=local, it starts one, stays in the foreground until Ctrl-C (--wait and --ui do so in
both cases), and then stops what it started.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from domino_core.redact import redacted
from jobs.interrupts import as_interrupts
from jobs.overrides import describe, job_parser, load, run_job
from serve.deployment import (
    LOOPBACK,
    check_engine,
    check_exposure,
    check_free,
    check_port,
    check_registry,
    deploy,
    undeploy,
)

if TYPE_CHECKING:
    from jobs.presets import JobConfig
    from serve.config import ServeConfig


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--wait", action="store_true", help="stay in the foreground, and undeploy on Ctrl-C")
    parser.add_argument("--ui", action="store_true", help="also start the MLflow UI")
    parser.add_argument("--ui-port", type=int, default=5000, help="its port (default: 5000)")
    args = parser.parse_intermixed_args(argv)
    config = serve_config(load(args, required=("target",)))
    check_exposure(config)
    check_engine(config)
    if args.plan:
        print(
            f"{describe(config, 'serve.')}\n\nwill serve {config.served_name} at http://{config.host}:{config.port}/v1"
        )
        return
    print(f"{config.served_name}: {check_registry(config)}", flush=True)
    check_port(config)
    if args.ui:
        check_free(LOOPBACK, args.ui_port, "--ui-port")
    import ray

    from jobs.ray_session import ray_session

    with contextlib.ExitStack() as session:
        started_ray = session.enter_context(ray_session(dashboard=True))
        dashboard = ray.init(ignore_reinit_error=True, log_to_driver=False).dashboard_url
        session.enter_context(as_interrupts())  # ray.init sets handlers of its own
        try:
            print(how_to_call(config, deploy(config), dashboard), flush=True)
            if args.ui:
                print(f"  MLflow   {session.enter_context(mlflow_ui(config, args.ui_port))}", flush=True)
            if started_ray or args.wait or args.ui:
                print("Ctrl-C stops it.", flush=True)
                threading.Event().wait()
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr, flush=True)
            undeploy(config)


def serve_config(job: JobConfig) -> ServeConfig:
    """The job's serving section with what other sections decide: target, registry, and the champion as the default."""
    from pipelines.registry import registered_name
    from pipelines.tracking import tracking_uri
    from serve.config import ServeConfig

    section = job.serve
    drafter = section.drafter or f"models:/{registered_name(job.target)}@champion"
    default_cache = section.cache_dir == ServeConfig().cache_dir
    return replace(
        section,
        target=section.target or job.target,
        tracking_uri=section.tracking_uri or tracking_uri(job.tracking_uri, job.root),
        # Replicas have another working directory.
        drafter=str(Path(drafter).expanduser().resolve()) if Path(drafter).expanduser().is_dir() else drafter,
        cache_dir=str(Path(job.root) / "drafters") if default_cache else section.cache_dir,
    )


def how_to_call(config: ServeConfig, url: str, dashboard: str | None) -> str:
    """Where to look, and a command that asks something. dashboard: host:port of Ray's."""
    from serve.admission import read_keys

    message = '{"role": "user", "content": "def read(path):"}'
    body = f'{{"model": "{config.served_name}", "max_tokens": 64, "temperature": 0, "messages": [{message}]}}'
    key = " -H 'Authorization: Bearer YOUR_KEY'" if read_keys(config.api_key_file) else ""
    return (
        f"  endpoint {url}\n"
        f"  curl     curl {url}/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n"
        f"  health   {url.removesuffix('/v1')}/health   metrics {url.removesuffix('/v1')}/metrics\n"
        f"  Ray      {f'http://{dashboard}' if dashboard else 'without a dashboard'}"
    )


@contextlib.contextmanager
def mlflow_ui(config: ServeConfig, port: int) -> Iterator[str]:
    """The UI's URL while it runs: a tracking server's own, or that of one started here on the database.

    On the loopback interface whatever serve.host says: MLflow asks for no password.
    """
    from pipelines.tracking import connect

    connect(config.tracking_uri)  # creates the database's folder; plain decoding needs none
    if config.tracking_uri.startswith(("http://", "https://")):
        yield redacted(config.tracking_uri)
        return
    address = ["--host", LOOPBACK, "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *address, "--workers", "1"],
        # Its job runners would be eight more processes.
        # The store is not on its command line, which everybody on the machine can list.
        env=os.environ
        | {"MLFLOW_BACKEND_STORE_URI": config.tracking_uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is ours to pass on
    )
    url = f"http://{LOOPBACK}:{port}"
    try:
        wait_for_answer(f"{url}/health", process)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the process answers; ten seconds on an idle machine. ValueError if it ends instead."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise ValueError(f"the MLflow UI ended with code {process.returncode}; `mlflow server` on the database says why")


if __name__ == "__main__":
    sys.exit(run_job(main))
