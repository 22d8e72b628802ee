"""Which drafter version is served: an alias in the MLflow registry, followed while the server runs.

    alias --look_up--> Version --fetch--> folder --accept--> loaded beside the live engine, self-checked, swapped

Accepting is the server's (serve/server.py). A version that fails on the way is refused with its reason and the one
before stays live; a registry that does not answer changes nothing. The last version that was accepted is remembered
beside the downloads, so that a replica can start while the registry is away or its champion is unusable.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from domino_core.checkpoint import folder_digest, read_provenance
from domino_core.json_files import read_object
from domino_core.redact import redacted, without_user

# Under Serve's own logger, so that lines land in the replica's log file.
logger = logging.getLogger("ray.serve.domino")

HEALTH_TIMEOUT_S = 5.0


class RegistryUnavailableError(ValueError):
    """The registry does not answer, which says nothing about any version."""


class NotYetError(ValueError):
    """There is no room for another version before an older one has gone, which says nothing about the version."""


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
            "(python -m jobs.promote), or serve without a drafter (drafter=none)"
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

    client = MlflowClient(tracking_uri=alias.tracking_uri, registry_uri=alias.tracking_uri)
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
        except OSError as error:
            raise RegistryUnavailableError(f"tracking server {tracking_uri} does not answer: {error}") from error
    elif tracking_uri.startswith("sqlite:///"):
        path = Path(tracking_uri.removeprefix("sqlite:///"))
        if not path.is_file():  # MLflow would create an empty one
            raise RegistryUnavailableError(
                f"there is no MLflow database at {path} (tracking_uri={tracking_uri}): train and promote a drafter "
                "first (make demo does both), or serve without one (drafter=none)"
            )
        try:
            sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5).close()
        except sqlite3.Error as error:
            raise RegistryUnavailableError(f"MLflow database {path}: {error}") from error


def is_whole(folder: Path, version: Version) -> bool:
    """Whether a downloaded version is what was registered, where the registry says so."""
    if not version.digest:
        return True
    try:  # what is left of a damaged folder may be anything
        same = folder_digest(folder) == version.digest
    except (OSError, ValueError):
        same = False
    if not same:
        logger.warning("%s is not what was registered as version %s: it is downloaded again", folder, version.number)
    return same


class DrafterCache:
    """Downloaded versions below one folder, each complete or absent, and the version last accepted for each alias."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).expanduser()

    def fetch(self, alias: Alias, version: Version) -> Path:
        """The version's local folder, downloaded once. RegistryUnavailableError if the artifacts cannot be had.

        One whose files have changed since, as cleaners of temporary folders and disks do it, is downloaded again.
        """
        final = self._folder / alias.name / version.folder_name
        damaged = final.is_dir() and not is_whole(final, version)
        if final.is_dir() and not damaged:
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        from mlflow import MlflowClient
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))
        try:  # the boundary to the artifact store; whatever happens no partial folder stays
            # Asking for `source` itself would look it up in MLflow's process-wide store instead of this one.
            model = MlflowClient(tracking_uri=alias.tracking_uri).get_logged_model(version.source.rpartition("/")[2])
            files = Path(
                download_artifacts(model.artifact_location, dst_path=str(partial), tracking_uri=alias.tracking_uri)
            )
            if not (files / "config.json").is_file():  # MLflow downloads nothing without a complaint
                raise FileNotFoundError(f"no config.json among the artifacts of {version.source}")
            if damaged:
                final.rename(partial / "damaged")
            if not final.is_dir():  # another replica on this host may have been faster
                files.rename(final)
        except (MlflowException, OSError) as error:
            if damaged or not final.is_dir():
                raise RegistryUnavailableError(f"{alias} version {version.number}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return final

    def remember(self, alias: Alias, version: Version) -> None:
        """Note the version as the last accepted one; written whole or not at all."""
        path = self._accepted_path(alias)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(asdict(version)))
        draft.replace(path)

    def last_accepted(self, alias: Alias) -> Version | None:
        """None where nothing was noted, or nothing that can be read: a note helps a start, and must not prevent one."""
        path = self._accepted_path(alias)
        try:  # a crash of the machine may leave it empty, and another version of this code may have written it
            noted = read_object(path) if path.is_file() else None
        except (OSError, ValueError) as error:
            logger.error("%s: the version accepted last is not known: %s", alias, error)
            return None
        if noted is None:
            return None
        known = {each.name: noted[each.name] for each in fields(Version) if each.name in noted}
        if not {"number", "source"} <= known.keys() or not all(isinstance(value, str) for value in known.values()):
            logger.error("%s: the version accepted last is not known: %s holds no version", alias, path)
            return None
        return Version(**known)

    def _accepted_path(self, alias: Alias) -> Path:
        return self._folder / alias.name / f"accepted-{alias.alias}.json"


@dataclass(kw_only=True)
class FollowerState:
    """What /health shows: the alias, the live version, and why another one is not served."""

    alias: str
    live: str = ""
    problem: str = ""  # "" when the live version is the alias's
    looked_up: int = 0  # times that the registry answered


class Follower:
    """Looks an alias up every few seconds on a thread of its own and brings new versions to `accept`.

    `accept(folder, version)` loads, checks and swaps; whatever it raises is the reason why the version is refused. A
    version whose gate failed is refused, too, as long as there is another. A refused version is not tried again until
    the alias has named another one, or the gate has another result; after NotYetError it is, at the next look.
    `then()` is called on the same thread after every look, so that no two versions are loaded at once.
    """

    def __init__(
        self,
        alias: Alias,
        cache: DrafterCache,
        accept: Callable[[Path, Version], None],
        then: Callable[[], None] | None = None,
    ) -> None:
        self.state = FollowerState(alias=str(alias))
        self._alias, self._cache, self._accept, self._then = alias, cache, accept, then
        self._live: Version | None = None
        self._refused: Version | None = None
        self._refusal = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, poll_seconds: float) -> None:
        """Bring the first version live, then follow. ValueError if neither the alias nor a remembered version works."""
        self.poll()
        remembered = self._cache.last_accepted(self._alias) if self._live is None else None
        if remembered is not None and remembered != self._refused:
            problem = self.state.problem
            self._try(remembered)
            self.state.problem = f"started with version {remembered.number}, accepted earlier: {problem}"
        if self._live is None:
            raise ValueError(f"no drafter can be served: {self.state.problem}")
        self._thread = threading.Thread(target=self._run, args=(poll_seconds,), name="drafter-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> None:
        """One look. Never raises: a failure here must not disturb what is being served."""
        try:  # the boundary to the registry
            version = look_up(self._alias)
        except Exception as error:
            self._report(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return
        self.state.looked_up += 1
        if self._refused is not None and version == self._refused and version.gate == self._refused.gate:
            self.state.problem = self._refusal
            return
        self._refused = None
        if version == self._live:
            self.state.problem = ""
        else:
            self._try(version)

    def _try(self, version: Version) -> None:
        # An alias that was moved by hand does not undo the gate; where there is nothing else, slow is better.
        stays = self._live or self._cache.last_accepted(self._alias)
        if version.gate.startswith("failed") and stays not in (None, version):
            self._refuse(version, f"its gate {version.gate}")
            return
        try:
            folder = self._cache.fetch(self._alias, version)
        except (RegistryUnavailableError, OSError) as error:  # says nothing about the version: it is tried again
            self._report(str(error))
            return
        try:  # the boundary to foreign checkpoints: any error is the reason of a refusal, not a crash
            self._accept(folder, version)
        except NotYetError as error:
            self._report(str(error))
            return
        except Exception as error:
            self._refuse(version, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return
        logger.info("%s: version %s is live (before: %s)", self._alias, version.number, self.state.live or "none")
        self._live = version
        self.state.live, self.state.problem = version.number, ""
        try:
            self._cache.remember(self._alias, version)
        except OSError as error:  # it is live all the same
            self._report(f"version {version.number} could not be noted for the next start: {error}")

    def _refuse(self, version: Version, reason: str) -> None:
        self._refused, self._refusal = version, redacted(f"version {version.number} is refused: {reason}")
        self._report(self._refusal)

    def _report(self, problem: str) -> None:
        problem = redacted(problem)  # /health shows it to everybody
        if problem != self.state.problem:
            logger.error("%s: %s (version %s stays)", self._alias, problem, self.state.live or "none")
        self.state.problem = problem

    def _run(self, poll_seconds: float) -> None:
        while not self._stop.wait(poll_seconds):
            self.poll()
            if self._then is not None:
                self._then()
