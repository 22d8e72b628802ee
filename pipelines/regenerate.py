"""The target's own answers to a file of prompts: what a drafter learns from, written once for many runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How the target answers the prompts that a drafter is trained on."""

    when: Literal["missing", "always", "never"] = "missing"  # rows that end with an answer are kept
    max_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0
    enable_thinking: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(
                f"answer.max_tokens={self.max_tokens}: a drafter learns from answers of two tokens or more"
            )
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            values = f"temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}"
            raise ValueError(f"answer: {values}; need temperature >= 0, 0 < top_p <= 1, top_k >= 0 (0 is off)")
