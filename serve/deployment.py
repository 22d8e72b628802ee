"""Putting the application on a Ray that is running, with the checks that belong before it."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from domino_core.redact import redacted

if TYPE_CHECKING:
    from serve.config import ServeConfig

LOOPBACK = "127.0.0.1"


def check_registry(config: ServeConfig) -> str:
    """What will be served, in words. ValueError for a target, alias or folder that is not there, or a registry away."""
    from domino_core.checkpoint import read_config, read_provenance
    from domino_core.target import read_target_config
    from serve.registry_alias import look_up, parse_alias

    target = read_target_config(config.target)
    if config.max_length > target.max_position_embeddings:
        raise ValueError(
            f"serve.max_length={config.max_length} exceeds the {target.max_position_embeddings} positions of "
            f"{config.target}: give less"
        )
    alias = parse_alias(config.drafter, config.tracking_uri)
    if config.drafter == "none":
        return "plain decoding, without a drafter"
    if alias is None:
        folder = Path(config.drafter).expanduser()
        read_config(folder).check_fits(target)
        check_made_for(config, read_provenance(folder).get("target_hash", ""))
        return f"drafter {folder}"
    version = look_up(alias)
    check_made_for(config, version.target_hash)
    return f"drafter {alias}, now version {version.number}, of {redacted(alias.tracking_uri)}"


def check_made_for(config: ServeConfig, made_for: str) -> None:
    """ValueError if the drafter says (with a target's hash) that it was made for another target."""
    from domino_core.target import target_hash

    if made_for and made_for != (own := target_hash(config.target)):
        raise ValueError(
            f"drafter {config.drafter} was made for a target with hash {made_for}, {config.target} has {own}: "
            "give its own target=, or another serve.drafter="
        )


def check_engine(config: ServeConfig) -> None:
    """ValueError for flags of vLLM's that a replica would refuse, where vLLM is installed here, too."""
    if config.engine == "vllm" and importlib.util.find_spec("vllm") is not None:
        from serve.vllm_flags import parse_flags

        parse_flags(config, None)


def check_exposure(config: ServeConfig) -> None:
    """ValueError for keys that are none, and for an endpoint that other machines reach and that asks for no key."""
    from serve.admission import KEY_VARIABLE, read_keys

    if not read_keys(config.api_key_file) and not _is_loopback(config.host):
        raise ValueError(
            f"serve.host={config.host} is reached from other machines, and there is no API key: set {KEY_VARIABLE} "
            f"(or serve.api_key_file=FILE), or listen on {LOOPBACK}; a gateway in front is given the key, too"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:  # a name may be anyone's
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(config: ServeConfig) -> None:
    """ValueError if something other than a Ray Serve proxy listens where the endpoint should be."""
    if not serve_listens(config):
        check_free(config.host, config.port, "serve.port")


def check_free(host: str, port: int, setting: str) -> None:
    """ValueError, which names the setting to change, if the port cannot be listened on."""
    if not 1 <= port <= 65535:
        raise ValueError(f"{setting}={port}: expected 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port {port} on {host} cannot be used ({error.strerror}): "
                f"stop what listens there, or choose another with {setting}="
            ) from error


def serve_listens(config: ServeConfig) -> bool:
    """Whether a Ray Serve proxy answers on the configured port."""
    try:
        with urllib.request.urlopen(f"http://{config.host}:{config.port}/-/healthz", timeout=5) as response:
            return response.read() == b"success"
    except (OSError, urllib.error.HTTPError):
        return False


def deploy(config: ServeConfig) -> str:
    """Run or update the application on the connected Ray; returns the endpoint's base URL once a replica answers."""
    from ray import serve as ray_serve

    from serve.app import application

    if not ray_serve.status().proxies:
        check_free(config.host, config.port, "serve.port")
        ray_serve.start(proxy_location="HeadOnly", http_options={"host": config.host, "port": config.port})
    elif not serve_listens(config):
        raise ValueError(
            f"this Ray already serves HTTP, and not on {config.host}:{config.port}: "
            "give its port with serve.port=, or end it (serve shutdown)"
        )
    try:  # Serve's own message says only that it failed; the deployment's has the replica's traceback
        ray_serve.run(application(config), name=config.app_name, route_prefix="/")
    except RuntimeError as error:
        deployments = ray_serve.status().applications[config.app_name].deployments.values()
        reasons = "\n".join(deployment.message for deployment in deployments)
        counts = [counted for deployment in deployments for counted in deployment.replica_states.items()]
        left = sum(count for state, count in counts if state.value == "RUNNING")
        told = f"{left} replicas of before still answer" if left else "no replica is left, and requests get 503"
        told += ": deploy settings that work, such as those of before"
        raise RuntimeError(f"{error}\n{reasons}\n{told}") from error
    return f"http://{config.host}:{config.port}/v1"


def undeploy(config: ServeConfig) -> None:
    from ray import serve as ray_serve

    ray_serve.delete(config.app_name)
