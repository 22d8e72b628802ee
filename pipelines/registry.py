"""Versions of a drafter in the MLflow registry: register, gate, promote, roll back."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """What a version must reach before it becomes champion."""

    min_tau: float = 1.5  # where there is no champion to compare with
    min_speedup: float = 1.0  # end to end against plain decoding, where there is no champion
    margin: float = 0.02  # relative loss of tau against the champion that is still accepted
    max_tie_gap: float = 0.0  # greedy outputs may part where the target's two best logits are this close (bfloat16)


def target_slug(target: str) -> str:
    """`Qwen/Qwen3-8B` or `/models/Qwen3-8B/` -> `qwen3-8b`: the part of a registered model's name that tells the target."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(target).name.lower()).strip("-.")


def registered_name(target: str) -> str:
    """Name of the registered model that holds every drafter of a target."""
    return f"domino-{target_slug(target)}"
