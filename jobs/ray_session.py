"""The Ray that a job runs on: the one that is there, or one of its own for as long as the job lasts."""

import contextlib
import os
import socket
from collections.abc import Iterator

from jobs.interrupts import as_interrupts

LOGICAL_CPUS = 4  # at least: train workers, a capture engine and reading wait for each other on fewer


@contextlib.contextmanager
def ray_session(*, dashboard: bool = False) -> Iterator[bool]:
    """Connect to a running Ray (a submitted job's, or RAY_ADDRESS's), or start a local one and stop it at the end.

    RAY_ADDRESS=local starts one in any case. dashboard: of one that is started here; it also brings the job and Serve
    commands. Yields whether it was started here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield False
        return
    started = not connected()
    if started:
        # A Ray without this writes an authentication token that every later `ray` command would need.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # For Serve's proxies, which take their environment from here (serve/proxy.py).
        os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "serve.proxy:middlewares")
        ray.init(
            address="local",
            num_cpus=max(LOGICAL_CPUS, os.cpu_count() or 1),
            include_dashboard=dashboard,
            log_to_driver=False,
        )
    try:
        yield started
    finally:
        ray.shutdown()


@contextlib.contextmanager
def own_ray(store_gb: float) -> Iterator[None]:
    """A local Ray with an object store of this size, for what is measured; stopped at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    ray.init(
        address="local",
        num_cpus=max(LOGICAL_CPUS, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=int(store_gb * 1e9),
    )
    try:  # Ray's processes are ours to end
        with as_interrupts():  # ray.init sets handlers of its own
            yield
    finally:
        ray.shutdown()


def connected() -> bool:
    """Connect to the Ray of RAY_ADDRESS, or to one that runs here; False where there is none to connect to.

    ValueError where RAY_ADDRESS names one that does not answer.
    """
    import ray

    named = os.environ.get("RAY_ADDRESS", "")
    if named == "local":
        return False
    check_answers(named)
    try:  # the only way to ask whether there is one
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        if named:
            raise ValueError(f"RAY_ADDRESS={named}: {error}") from error
        return False
    return True


def check_answers(named: str) -> None:
    """Say at once that nobody listens at host:port; Ray itself tries for minutes. Other forms are left to Ray."""
    host, _, port = named.rpartition(":")
    if "://" in named or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"RAY_ADDRESS={named} does not answer ({error}): name a running cluster's head, or unset it to use a Ray "
            "of this machine"
        ) from error
