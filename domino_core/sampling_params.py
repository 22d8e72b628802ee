"""How one request turns logits into tokens: the settings, checked, and nothing that computes."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

# Below this temperature a request is greedy (the published implementation and vLLM draw the line at the same place).
GREEDY_TEMPERATURE = 1e-5
LARGEST_BIAS = 100.0  # OpenAI's limit

DraftRule = Literal["shared_noise", "greedy_draft", "rejection"]
"""How a sampled request drafts and accepts; all three leave the target's distribution as it is.

shared_noise: the drafter draws with the target's own noise, a draft is accepted when it is the target's token.
greedy_draft: the drafter proposes its most probable token, accepted when it is the target's token.
rejection: the drafter draws x from q with noise of its own, accepted with probability min(1, p(x) / q(x)); the first
    rejected one is replaced by a draw from the normalised max(p - q, 0) (Leviathan et al. 2023, theorem 1).

Under the first two the output for a seed is that of plain decoding; under the third it also depends on what is drafted.
"""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """`temperature=0` is greedy and ignores what truncates; `top_k=0`, `top_p=1`, `min_p=0` are off.

    Bias and penalties change the logits first, also of a greedy request, and as vLLM defines them: logit_bias adds
    (token, value) pairs; repetition_penalty divides positive and multiplies negative logits of tokens in prompt or
    output; frequency_penalty subtracts itself per earlier output of the token, presence_penalty once.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    rule: DraftRule = "shared_noise"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be a finite number ≥ 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1] (1 is off)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be ≥ 0 (0 is off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1] (0 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name}={getattr(self, name)} must be in [-2, 2] (0 is off)")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be a finite number > 0 (1 is off)")
        for token, value in self.logit_bias:
            if not (token >= 0 and -LARGEST_BIAS <= value <= LARGEST_BIAS):
                raise ValueError(
                    f"logit_bias of token {token} is {value}: ids are ≥ 0, values within ±{LARGEST_BIAS:g}"
                )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must fit in 64 signed bits")
        if self.rule not in get_args(DraftRule):
            raise ValueError(f"rule={self.rule!r} is not one of {', '.join(get_args(DraftRule))}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Does what was said before change the logits?"""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)
