"""What is quoted of the experiment's runs: means over seeds with their intervals, gains, τ by position and context."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

HELDOUT = "heldout"
# Two-sided 95 % points of Student's t by degrees of freedom; beyond the last the normal distribution's.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def summarise(result: dict[str, Any]) -> None:
    """result["arms"] from runs and speed."""
    first = f"{HELDOUT}/T0"
    runs_of: dict[str, dict[str, dict[str, Any]]] = {}
    for key, found in result["runs"].items():
        name, seed = key.split("/")
        runs_of.setdefault(name, {})[seed] = found
    greedy = {name: {seed: run["tau"][first]["tau"] for seed, run in by.items()} for name, by in runs_of.items()}
    arms: dict[str, dict[str, Any]] = {}
    for name, by_seed in runs_of.items():
        runs = list(by_seed.values())
        arms[name] = {
            "tau": over_seeds([run["tau"][first]["tau"] for run in runs]),
            "tau_by_position": _means([run["tau"][first]["tau_by_position"] for run in runs]),
            "tau_by_context": _by_context(runs),
            "tau_by_set": {key: over_seeds([run["tau"][key]["tau"] for run in runs]) for key in runs[0]["tau"]},
            "parameters": runs[0]["parameters"],
            "training_seconds": statistics.mean(run["training_seconds"] for run in runs),
        } | result.get("speed", {}).get(name, {})
        rivals = {"gain_over_dflash": "dflash", "gain_over_twin": twin_of(name)}
        for gain, rival in rivals.items():
            if rival != name and (paired := greedy[name].keys() & greedy.get(rival, {}).keys()):
                arms[name][gain] = over_seeds([greedy[name][seed] / greedy[rival][seed] - 1 for seed in sorted(paired)])
    result["arms"] = arms


def twin_of(name: str) -> str:
    """The arm that differs in the head and its curriculum alone, if there is one of that name."""
    return "published_dflash" if name == "published_setting" else name.replace("domino_", "dflash_", 1)


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean, and half the width of its 95 % t-interval; None for a single seed."""
    interval = None
    if len(values) > 1:
        t = T95[len(values) - 2] if len(values) - 2 < len(T95) else 1.96
        interval = t * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": statistics.mean(values), "interval": interval, "seeds": len(values)}


def _by_context(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Greedy τ of all sets and seeds together, by the most tokens that a round's context has."""
    rounds: dict[str, int] = {}
    tokens: dict[str, float] = {}
    for key, found in ((key, found) for run in runs for key, found in run["tau"].items()):
        if key.endswith("/T0"):
            for end, part in found["tau_by_context"].items():
                rounds[str(end)] = rounds.get(str(end), 0) + part["rounds"]
                tokens[str(end)] = tokens.get(str(end), 0.0) + part["rounds"] * part["tau"]
    return {end: {"tau": tokens[end] / rounds[end], "rounds": rounds[end]} for end in sorted(rounds, key=int)}


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(column) for column in zip(*rows, strict=True)]
