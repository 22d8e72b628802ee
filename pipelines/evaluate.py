"""Acceptance and speed of a drafter on held-out prompts, through the serving engine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to generate and how to time it."""

    num_prompts: int = 64
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    concurrency: int = 1  # rows decoded at once
    repeats: int = 3  # timed passes per arm, interleaved; the median counts
    num_verify: int | None = None  # drafts verified a round; None: all
    enable_thinking: bool = False
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
