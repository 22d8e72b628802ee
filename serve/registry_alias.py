"""The registry as a server sees it: an alias, the version that it names now, and whether anybody answers at all."""

from __future__ import annotations

import http.client
import os
import re
import sqlite3
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from domino_core.checkpoint import read_provenance
from domino_core.redact import without_user

HEALTH_TIMEOUT_S = 5.0


class RegistryUnavailableError(ValueError):
    """The registry does not answer, which says nothing about any version."""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """models:/NAME@ALIAS at a tracking URI."""

    name: str
    alias: str
    tracking_uri: str

    def __str__(self) -> str:
        return f"models:/{self.name}@{self.alias}"


@dataclass(frozen=True, kw_only=True)
class Version:
    """One registered version. `source` (models:/<model id>) identifies it; its number may exist in other registries."""

    number: str
    source: str
    target_hash: str = field(default="", compare=False)  # "" where the version does not say
    digest: str = field(default="", compare=False)  # of its files; "" where the version does not say
    self_check: str = field(default="", compare=False)  # domino_core/self_check.py, as JSON; "" where there is none
    canary: str = field(default="", compare=False)  # since when it is tried out; "": it is not
    gate: str = field(default="", compare=False)  # what the promotion gate wrote: "passed", "failed: ...", "not run"

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "_", f"v{self.number}-{self.source.rpartition('/')[2]}")


def parse_alias(drafter: str, tracking_uri: str) -> Alias | None:
    """An Alias for models:/NAME@ALIAS; None for a folder or "none". ValueError for neither."""
    if not drafter:
        raise ValueError('drafter is empty: give models:/NAME@ALIAS, a folder, or "none" for plain decoding')
    if drafter.startswith("models:/"):
        name, _, alias = drafter.removeprefix("models:/").partition("@")
        # Both name files of the cache, and are MLflow's to know.
        if not re.fullmatch(r"\w[\w. -]*", name) or not re.fullmatch(r"[A-Za-z0-9_-]+", alias):
            raise ValueError(f"drafter={drafter}: expected models:/NAME@ALIAS, for example models:/domino-x@champion")
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            raise ValueError(f"drafter={drafter} needs tracking_uri= (or MLFLOW_TRACKING_URI) to look it up")
        return Alias(name=name, alias=alias, tracking_uri=uri)
    if drafter != "none" and not Path(drafter).expanduser().is_dir():
        raise ValueError(f"drafter={drafter}: no such folder (expected models:/NAME@ALIAS, a folder, or none)")
    return None


def check_target(folder: Path, version: Version, target_hash: str) -> None:
    """ValueError if the version, or its files, say that it drafts for another target."""
    made_for = {version.target_hash, read_provenance(folder).get("target_hash", "")} - {"", None}
    if made_for - {target_hash}:
        raise ValueError(
            f"drafter {version.number} was made for the target {', '.join(sorted(made_for))}, this is {target_hash}"
        )


def look_up(alias: Alias) -> Version:
    """The version that the alias names now. RegistryUnavailableError, or ValueError if there is no such alias."""
    version = find(alias)
    if version is None:
        raise ValueError(
            f"{alias} does not exist in {alias.tracking_uri}; promote a version first "
            "(python -m jobs.promote), or serve without a drafter (serve.drafter=none)"
        )
    return version


def find(alias: Alias) -> Version | None:
    """The version that the alias names now, None where there is no such alias. RegistryUnavailableError."""
    check_reachable(alias.tracking_uri)
    # MLflow retries for minutes by default; we come again in a few seconds anyway.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:  # an address that MLflow cannot use, or a database whose driver is not installed
        client = MlflowClient(tracking_uri=alias.tracking_uri, registry_uri=alias.tracking_uri)
    except (MlflowException, ImportError) as error:
        raise RegistryUnavailableError(f"MLflow cannot use {alias.tracking_uri}: {error}") from error
    try:  # the boundary to the registry
        found = client.get_model_version_by_alias(alias.name, alias.alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise RegistryUnavailableError(f"{alias.tracking_uri}: {error}") from error
    tags = found.tags or {}
    return Version(
        number=str(found.version),
        source=found.source or "",
        target_hash=tags.get("target_hash", ""),
        digest=tags.get("digest", ""),
        self_check=tags.get("self_check", ""),
        canary=tags.get("canary_started", "") if tags.get("canary") == "running" else "",  # jobs.promote --canary
        gate=tags.get("gate", ""),
    )


def check_reachable(tracking_uri: str) -> None:
    """RegistryUnavailableError within seconds for a server that does not answer or a database that is not there."""
    if tracking_uri.startswith(("http://", "https://")):
        try:
            urllib.request.urlopen(without_user(tracking_uri).rstrip("/") + "/health", timeout=HEALTH_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # somebody answers; whether the registry is behind it shows at the look-up
        except (OSError, http.client.HTTPException) as error:  # the latter: what answers speaks no HTTP
            raise RegistryUnavailableError(f"tracking server {tracking_uri} does not answer: {error}") from error
    elif tracking_uri.startswith("sqlite:///"):
        path = Path(tracking_uri.removeprefix("sqlite:///"))
        if not path.is_file():  # MLflow would create an empty one
            raise RegistryUnavailableError(
                f"there is no MLflow database at {path} (tracking_uri={tracking_uri}): train and promote a drafter "
                "first (make demo does both), or serve without one (serve.drafter=none)"
            )
        try:
            # As a URI, or a # or % in the path would name another file, which SQLite may then create.
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5).close()
        except sqlite3.Error as error:
            raise RegistryUnavailableError(f"MLflow database {path}: {error}") from error
