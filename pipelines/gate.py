"""The gate: what a registered version must show before it may be served.

result = examine(client, version, target, prompt_file, evaluate, limits)    measured, nothing is changed
record(client, version, result, "gsm8k")                                 in the version's tags
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from domino_core.checkpoint import load_drafter, read_config
from domino_core.drafter import Drafter
from domino_core.self_check import SelfCheck, take_samples
from domino_core.target import load_target, load_tokenizer, target_hash
from pipelines.evaluate import EvalConfig, held_out_prompts, measure, placement
from pipelines.measurement import Measurement, summary
from pipelines.registry import CHAMPION, alias_of, fetched

if TYPE_CHECKING:
    from pipelines.registry import MlflowClient, ModelVersion


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


def check_measurable(target: str, prompt_file: str | Path, evaluate: EvalConfig) -> None:
    """ValueError for what would stop the gate, before a version is registered for it: prompts, device."""
    placement(evaluate)
    held_out_prompts(prompt_file, load_tokenizer(target), evaluate)


def examine(
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


def verdict(name: str, result: GateResult) -> str:
    """What the gate found, in lines."""
    lines = [f"gate of {name} version {result.version}: {'passed' if result.passed else 'FAILED'}"]
    lines += [f"  {failure}" for failure in result.failures]
    if result.measurement is not None:
        lines.append("  " + summary(result.measurement).replace("\n", "\n  "))
    if result.champion_tau is not None:
        lines.append(f"  champion's tau {result.champion_tau:.3f}")
    return "\n".join(lines)
