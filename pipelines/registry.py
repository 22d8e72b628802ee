"""Versions of a drafter in the MLflow registry: register -> gate (gate.py) -> promote -> roll back.

A target has one registered model, `domino-<slug>`. A version is a LoggedModel without a flavour (published checkpoint
and provenance.json at its root, nothing pickled); its source is `models:/<model id>`. Three aliases, all behind the
gate: `champion` is the version that is served, `challenger` the one that is tried out beside it (canary.py), `previous`
the one that a rollback brings back.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from domino_core.checkpoint import folder_digest, read_config, read_provenance
from domino_core.json_files import read_json
from domino_core.redact import redacted
from domino_core.target import read_target_config, target_hash
from pipelines.tracking import EXPERIMENT, experiment_id
from pipelines.train_state import DRAFTER_FOLDER, RUN_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHALLENGER, CHAMPION, PREVIOUS = "challenger", "champion", "previous"
CANARY, RUNNING = "canary", "running"  # a version's tag and its value while the version is tried out
ROLLED_BACK = "rolled_back"  # a version's tag from a rollback until it is champion again by a promotion


class RegistryAwayError(ValueError):
    """The registry does not answer."""


def target_slug(target: str) -> str:
    """`Qwen/Qwen3-8B` or `/models/Qwen3-8B/` -> `qwen3-8b`: what tells the target in names of models and runs."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(target).name.lower()).strip("-.")


def registered_name(target: str) -> str:
    """Name of the registered model that holds every drafter of a target."""
    return f"domino-{target_slug(target)}"


def register(client: MlflowClient, folder: str | Path, target: str, root: str | Path, run_id: str | None = None) -> str:
    """Register a drafter folder as a new version, which has no alias yet; returns the version's number.

    The same folder again, for the same target, gives the same version. ValueError if the folder is no drafter, or was
    made for another target.
    """
    from mlflow.exceptions import MlflowException

    folder, name = Path(folder), registered_name(target)
    config = read_config(folder)
    config.check_fits(read_target_config(target))
    made = read_provenance(folder)
    own_hash = target_hash(target)
    if made.get("target_hash", own_hash) != own_hash:
        raise ValueError(f"{folder} was trained for a target with hash {made['target_hash']}; {target} has {own_hash}")
    digest = folder_digest(folder)
    try:  # somebody may have created it, now or long ago
        client.create_registered_model(name, tags={"target": str(target)})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    for found in client.search_model_versions(f"name = '{name}'"):
        # Another target may have the same name, and a version is for one.
        if found.tags.get("digest") == digest and found.tags.get("target_hash") == own_hash:
            return str(found.version)
    tags = {
        "target": str(target),
        "target_hash": own_hash,
        "block_size": str(config.block_size),
        "target_layer_ids": ",".join(map(str, config.target_layer_ids)),
        "head": str(config.head).lower(),
        "data_hash": str(made.get("data_hash", "unknown")),
        "commit": str(made.get("commit", "unknown")),
        "digest": digest,
        "gate": "not run",
    }
    model = client.create_logged_model(
        experiment_id(client, EXPERIMENT, root), name=name, source_run_id=run_id, tags=tags, model_type="domino-drafter"
    )
    client.log_model_artifacts(model.model_id, str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    version = client.create_model_version(
        name, source=f"models:/{model.model_id}", run_id=run_id, tags=tags, model_id=model.model_id
    )
    return str(version.version)


def register_run(client: MlflowClient, run_dir: Path, target: str, root: str | Path) -> str:
    """Register the drafter that a training run left in its folder. ValueError if there is none."""
    folder = run_dir / DRAFTER_FOLDER
    if not folder.is_dir():
        others = sorted(each.parent.name for each in run_dir.parent.glob(f"*/{DRAFTER_FOLDER}"))
        there = f", or give one of {', '.join(others)} by --run" if others else ""
        raise ValueError(f"run {run_dir.name} has no drafter at {folder}: train it first (python -m jobs.train){there}")
    run_file = run_dir / RUN_FILE
    saved = read_json(run_file) if run_file.exists() else {}
    # A run that was tracked elsewhere is unknown to this store.
    run_id = saved["run_id"] if saved.get("tracking_uri") == redacted(client.tracking_uri) else None
    return register(client, folder, target, root, run_id)


def check_alias(alias: str) -> None:
    """ValueError for a name that MLflow would refuse, which would be after the gate has measured."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", alias) or re.fullmatch(r"[vV]\d+|latest", alias):
        raise ValueError(
            f"alias {alias!r} cannot be set: use letters, digits, - and _, and not v1 or latest, which name versions"
        )


def find_version(client: MlflowClient, name: str, *, alias: str = "", version: str = "") -> ModelVersion:
    """A version by alias or number. ValueError naming what does not exist and what does."""
    from mlflow.exceptions import MlflowException

    assert bool(alias) != bool(version)
    try:  # the registry says "not there" with an exception
        if alias:
            return client.get_model_version_by_alias(name, alias)
        return client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        known = [f"{found.version}" for found in client.search_model_versions(f"name = '{name}'")]
        wanted = f"alias {alias!r}" if alias else f"version {version}"
        there = (
            f"its versions are {', '.join(sorted(known))}" if known else "it has no versions: train and register first"
        )
        raise ValueError(f"registered model {name} has no {wanted}; {there}") from error


@contextmanager
def answering() -> Iterator[None]:
    """RegistryAwayError in place of MLflow's own where the registry fails; what it refuses is raised as it is."""
    from mlflow.exceptions import MlflowException

    try:  # the boundary to the registry
        yield
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS"):
            raise
        raise RegistryAwayError(str(error)) from error


@contextmanager
def fetched(client: MlflowClient, version: ModelVersion) -> Iterator[Path]:
    """The version's files in a temporary folder."""
    from mlflow.artifacts import download_artifacts

    with tempfile.TemporaryDirectory(prefix="drafter-") as scratch:
        yield Path(download_artifacts(version.source, dst_path=scratch, tracking_uri=client.tracking_uri))


def promote(client: MlflowClient, version: ModelVersion, alias: str = CHAMPION) -> None:
    """Point `alias` at a version that passed the gate. The champion that it replaces becomes `previous`."""
    name, number = version.name, version.version
    if alias == CHAMPION:
        champion = alias_of(client, name, CHAMPION)
        if champion is not None and champion.version != number:
            # First what a rollback needs: if we stop in between, the champion is still the old one.
            client.set_model_version_tag(name, number, "replaces", str(champion.version))
            client.set_registered_model_alias(name, PREVIOUS, champion.version)
        if ROLLED_BACK in version.tags:
            client.delete_model_version_tag(name, number, ROLLED_BACK)
    client.set_registered_model_alias(name, alias, number)
    challenger = alias_of(client, name, CHALLENGER)
    if alias == CHALLENGER or challenger is None or challenger.version != number:
        return
    if alias == CHAMPION or challenger.tags.get(CANARY) != RUNNING:  # another alias ends no canary
        client.delete_registered_model_alias(name, CHALLENGER)


def rollback(client: MlflowClient, name: str) -> tuple[str, str]:
    """Make `previous` champion again: (version that goes, version that returns). ValueError if there is none.

    `previous` then names the one before it, unless that was deleted or taken back itself: a second rollback goes
    further back and not forth. Where `previous` is champion already (moved by hand, or by a rollback that was
    interrupted) both versions are that one, and only `previous` goes on.
    """
    champion, back = find_version(client, name, alias=CHAMPION), find_version(client, name, alias=PREVIOUS)
    if champion.version != back.version:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        client.set_model_version_tag(name, champion.version, ROLLED_BACK, now)
        client.set_registered_model_alias(name, CHAMPION, back.version)
    before = back.tags.get("replaces", "")
    # Deleted ones are gone without a trace.
    there = {str(found.version): found for found in client.search_model_versions(f"name = '{name}'")}
    if before in there and ROLLED_BACK not in there[before].tags:
        client.set_registered_model_alias(name, PREVIOUS, before)
    else:
        client.delete_registered_model_alias(name, PREVIOUS)
    return str(champion.version), str(back.version)


def alias_of(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version behind an alias; None if nothing has it, or nothing is registered."""
    from mlflow.exceptions import MlflowException

    try:  # the registry says "not there" with an exception
        number = client.get_registered_model(name).aliases.get(alias)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return None if number is None else client.get_model_version(name, str(number))
