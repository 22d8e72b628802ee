"""Versions on a replica's disk, so that it can start while the registry is away or its champion is unusable."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path

from domino_core.atomic_files import write_atomically
from domino_core.checkpoint import folder_digest
from domino_core.json_files import read_object
from serve.registry_alias import Alias, RegistryUnavailableError, Version

# Under Serve's own logger, so that lines land in the replica's log file.
logger = logging.getLogger("ray.serve.domino")

PARTIAL = ".partial-"  # a download that goes on
ABANDONED_S = 24 * 3600.0  # no download takes that long: its replica was killed


def remove_abandoned(folder: Path) -> None:
    """What killed replicas left of their downloads; another replica's own, which goes on, stays."""
    for partial in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):  # another replica is tidying too
            if time.time() - partial.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(partial, ignore_errors=True)


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
        if final.is_dir() and is_whole(final, version):
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        from mlflow import MlflowClient
        from mlflow.artifacts import download_artifacts

        remove_abandoned(final.parent)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=final.parent))
        try:  # the boundary to the artifact store; whatever happens no partial folder stays
            # Asking for `source` itself would look it up in MLflow's process-wide store instead of this one.
            model = MlflowClient(tracking_uri=alias.tracking_uri).get_logged_model(version.source.rpartition("/")[2])
            files = Path(
                download_artifacts(model.artifact_location, dst_path=str(partial), tracking_uri=alias.tracking_uri)
            )
            if not (files / "config.json").is_file():  # MLflow downloads nothing without a complaint
                raise FileNotFoundError(f"no config.json among the artifacts of {version.source}")
            # Another replica on this host may have been faster, and be reading what it put there.
            if final.is_dir() and not is_whole(final, version):
                final.rename(partial / "damaged")
            if not final.is_dir():
                files.rename(final)
        except Exception as error:  # the libraries of a store have errors of their own, or are not installed
            if not final.is_dir() or not is_whole(final, version):
                raise RegistryUnavailableError(f"{alias} version {version.number}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return final

    def remember(self, alias: Alias, version: Version) -> None:
        """Note the version as the last accepted one; written whole or not at all."""
        write_atomically(self._accepted_path(alias), json.dumps(asdict(version)).encode())

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
