"""The target's own answers: how it is asked. (The job that writes them to a file follows below.)"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How the target answers the prompts that a drafter is trained on."""

    max_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0
    enable_thinking: bool = False
