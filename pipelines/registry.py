"""Versions of a drafter in the MLflow registry: register -> gate -> promote -> roll back.

A target has one registered model, `domino-<slug>`. A version is a LoggedModel without a flavour (published checkpoint
and provenance.json at its root, nothing pickled); its source is `models:/<model id>`. Three aliases: `challenger` is
the newest registered version, or the one whose canary is running (canary.py); `champion` the one that is served,
`previous` the one that a rollback brings back.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from domino_core.checkpoint import folder_digest, load_drafter, read_config, read_provenance
from domino_core.drafter import Drafter
from domino_core.json_files import read_json
from domino_core.redact import redacted
from domino_core.self_check import SelfCheck, take_samples
from domino_core.target import load_target, load_tokenizer, read_target_config, target_hash
from pipelines.evaluate import EvalConfig, Measurement, held_out_prompts, measure, placement, summary
from pipelines.tracking import EXPERIMENT, experiment_id
from pipelines.train_state import DRAFTER_FOLDER, RUN_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHALLENGER, CHAMPION, PREVIOUS = "challenger", "champion", "previous"
CANARY, RUNNING = "canary", "running"  # a version's tag and its value while the version is tried out


class RegistryAwayError(ValueError):
    """The registry does not answer."""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """What a version must reach before it becomes champion."""

    min_tau: float = 1.5  # where there is no champion to compare with
    min_speedup: float = 1.0  # end to end against plain decoding, where there is no champion
    margin: float = 0.02  # relative loss of τ against the champion that is still accepted
    max_tie_gap: float = 0.5  # in bfloat16, outputs may part where the scores of the two tokens are this close

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ValueError(f"gate.margin must be between 0 and 1, got {self.margin}")


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """What the gate measured, and every number that failed (none: passed). champion_tau: None without a champion."""

    version: str
    failures: list[str]
    measurement: Measurement | None
    champion_tau: float | None = None
    self_check: SelfCheck | None = None  # for replicas that load the version

    @property
    def passed(self) -> bool:
        return not self.failures


def target_slug(target: str) -> str:
    """`Qwen/Qwen3-8B` or `/models/Qwen3-8B/` -> `qwen3-8b`: what tells the target in names of models and runs."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(target).name.lower()).strip("-.")


def registered_name(target: str) -> str:
    """Name of the registered model that holds every drafter of a target."""
    return f"domino-{target_slug(target)}"


def register(client: MlflowClient, folder: str | Path, target: str, root: str | Path, run_id: str | None = None) -> str:
    """Register a drafter folder as a new version with the alias `challenger`; returns the version's number.

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
    challenger = alias_of(client, name, CHALLENGER)
    if challenger is None or challenger.tags.get(CANARY) != RUNNING:
        client.set_registered_model_alias(name, CHALLENGER, version.version)
    return str(version.version)


def register_run(client: MlflowClient, run_dir: Path, target: str, root: str | Path) -> str:
    """Register the drafter that a training run left in its folder. ValueError if there is none."""
    folder = run_dir / DRAFTER_FOLDER
    if not folder.is_dir():
        raise ValueError(f"run {run_dir.name} has no drafter at {folder}: train it first (python -m jobs.train)")
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


def check_measurable(target: str, prompt_file: str | Path, evaluate: EvalConfig) -> None:
    """ValueError for what would stop the gate, before a version is registered for it: prompts, device."""
    placement(evaluate)
    held_out_prompts(prompt_file, load_tokenizer(target), evaluate)


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


def gate(
    client: MlflowClient,
    version: ModelVersion,
    target: str,
    prompt_file: str | Path,
    evaluate: EvalConfig,
    limits: GateConfig,
) -> GateResult:
    """Reload a version strictly, check that it fits the target, and measure it and the champion on the same prompts.

    Nothing is changed. Decoding is greedy whatever evaluate.temperature says, because identity is checked.
    """
    number = str(version.version)
    own_hash = target_hash(target)
    if version.tags.get("target_hash") != own_hash:
        failure = f"target_hash: made for {version.tags.get('target_hash')}, {target} has {own_hash}"
        return GateResult(version=number, failures=[failure], measurement=None)
    evaluate = replace(evaluate, temperature=0.0)
    device, dtype = placement(evaluate)
    loaded = load_target(target, device=device, dtype=dtype)
    prompts = held_out_prompts(prompt_file, load_tokenizer(target), evaluate)

    def drafter_of(version: ModelVersion) -> Drafter:
        with fetched(client, version) as folder:
            read_config(folder).check_fits(loaded.config)
            return load_drafter(folder, loaded.embed_VD, loaded.lm_head_VD, device=device, dtype=dtype)

    try:  # a version that cannot be loaded fails the gate, with the loader's own words
        drafter = drafter_of(version)
        measurement = measure(loaded, drafter, prompts, evaluate)
        self_check = take_samples(loaded, drafter, prompts)
        del drafter  # the champion wants its memory
    except ValueError as error:
        return GateResult(version=number, failures=[f"reload: {error}"], measurement=None)
    champion = alias_of(client, version.name, CHAMPION)
    champion_tau = None
    if champion is not None and champion.version != version.version and champion.tags.get("target_hash") == own_hash:
        champion_tau = measure(loaded, drafter_of(champion), prompts, replace(evaluate, repeats=1)).tau
    return GateResult(
        version=number,
        failures=judge(measurement, limits, champion_tau),
        measurement=measurement,
        champion_tau=champion_tau,
        self_check=self_check,
    )


def identity_failure(measurement: Measurement, limits: GateConfig) -> str | None:
    """How the output differs from plain decoding beyond what the number format explains; None if it does not."""
    allowed = limits.max_tie_gap if measurement.dtype == "bfloat16" else None
    if not measurement.mismatches or (allowed is not None and measurement.largest_gap <= allowed):
        return None
    worst = max(measurement.mismatches, key=lambda mismatch: mismatch.gap)
    return (
        f"greedy identity: {len(measurement.mismatches)} of {measurement.num_prompts} outputs differ from "
        f"plain decoding, prompt {worst.prompt} at token {worst.position}, where the two tokens' scores are "
        f"{worst.gap:.3g} apart (allowed in {measurement.dtype}: {allowed or 0.0:.3g})"
    )


def judge(measurement: Measurement, limits: GateConfig, champion_tau: float | None) -> list[str]:
    """Every number that is not good enough, with what it should have been."""
    failures = [failure for failure in [identity_failure(measurement, limits)] if failure]
    if champion_tau is not None:
        least = champion_tau * (1 - limits.margin)
        if measurement.tau < least:
            failures.append(
                f"tau {measurement.tau:.3f} < {least:.3f}, the champion's {champion_tau:.3f} less {limits.margin:.1%}"
            )
        return failures
    if measurement.tau < limits.min_tau:
        failures.append(f"tau {measurement.tau:.3f} < gate.min_tau {limits.min_tau:.3f}")
    if measurement.speedup < limits.min_speedup:
        failures.append(f"speedup {measurement.speedup:.3f} < gate.min_speedup {limits.min_speedup:.3f}")
    return failures


def record(client: MlflowClient, version: ModelVersion, result: GateResult, dataset: str) -> None:
    """Write what the gate found into the version's tags, passed or not."""
    tags = {"gate": "passed" if result.passed else "failed: " + "; ".join(result.failures)}
    if result.measurement is not None:
        tags |= {
            f"tau.{dataset}": f"{result.measurement.tau:.4f}",
            "speedup": f"{result.measurement.speedup:.4f}",
            "greedy_identical": str(result.measurement.identical).lower(),
        }
    tags = {key: value[:5000] for key, value in tags.items()}
    if result.self_check is not None:
        tags["self_check"] = result.self_check.to_json()  # whole, or it could not be read
    for key, value in tags.items():
        client.set_model_version_tag(version.name, version.version, key, value)
    if result.measurement is not None and version.run_id:
        # Beside the run's curves, and tied to the model, so that versions can be compared by them.
        model_id = str(version.source).removeprefix("models:/")
        for key in ("tau", "speedup", "tokens_per_s", "plain_tokens_per_s"):
            client.log_metric(version.run_id, f"gate.{key}", getattr(result.measurement, key), model_id=model_id)


def promote(client: MlflowClient, version: ModelVersion, alias: str = CHAMPION) -> None:
    """Point `alias` at a version that passed the gate. The champion that it replaces becomes `previous`."""
    name, number = version.name, version.version
    if alias == CHAMPION:
        champion = alias_of(client, name, CHAMPION)
        if champion is not None and champion.version != number:
            # First what a rollback needs: if we stop in between, the champion is still the old one.
            client.set_model_version_tag(name, number, "replaces", str(champion.version))
            client.set_registered_model_alias(name, PREVIOUS, champion.version)
    client.set_registered_model_alias(name, alias, number)
    challenger = alias_of(client, name, CHALLENGER)
    if alias != CHALLENGER and challenger is not None and challenger.version == number:
        client.delete_registered_model_alias(name, CHALLENGER)


def rollback(client: MlflowClient, name: str) -> tuple[str, str]:
    """Make `previous` champion again: (version that goes, version that returns). ValueError if there is none.

    `previous` then names the one before it, if any, so that a second rollback goes further back and not forth.
    """
    champion, back = find_version(client, name, alias=CHAMPION), find_version(client, name, alias=PREVIOUS)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    client.set_registered_model_alias(name, CHAMPION, back.version)
    client.set_model_version_tag(name, champion.version, "rolled_back", now)
    before = back.tags.get("replaces")
    if before:
        client.set_registered_model_alias(name, PREVIOUS, before)
    else:
        client.delete_registered_model_alias(name, PREVIOUS)
    return str(champion.version), str(back.version)


def verdict(name: str, result: GateResult) -> str:
    """What the gate found, in lines."""
    lines = [f"gate of {name} version {result.version}: {'passed' if result.passed else 'FAILED'}"]
    lines += [f"  {failure}" for failure in result.failures]
    if result.measurement is not None:
        lines.append("  " + summary(result.measurement).replace("\n", "\n  "))
    if result.champion_tau is not None:
        lines.append(f"  champion's tau {result.champion_tau:.3f}")
    return "\n".join(lines)


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
