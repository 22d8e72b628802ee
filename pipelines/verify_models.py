"""What the losslessness checks share: how much to check, what a check says, and decoding with and without a drafter."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from domino_core.drafter import Drafter
from domino_core.engine import Completion, Engine, Request
from domino_core.fused import on_card
from domino_core.sampling_params import SamplingParams
from domino_core.target_model import Target
from pipelines.evaluate import Prompt


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """How much is checked."""

    num_prompts: int = 64
    max_tokens: int = 64
    concurrency: int = 8  # rows decoded at once under speculation; plain decoding goes one by one
    draws: int = 1_000_000  # per rule
    samples: int = 10_000  # outputs of a whole block, of rejection sampling and of plain decoding each
    draw_rows: int = 64  # decoded at once when drawing
    significance: float = 1e-4  # a corrected p-value below it is a defect
    max_tie_gap: float = 0.5  # in nats, between the scores of two tokens, where bfloat16 may choose either
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # that is served

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "concurrency", "draws", "samples", "draw_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"verify.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.max_tie_gap <= 2:
            raise ValueError(f"verify.max_tie_gap must be between 0 and 2 nats, got {self.max_tie_gap}")
        if not 0 < self.significance < 1:
            raise ValueError(f"verify.significance must be between 0 and 1, got {self.significance}")


@dataclass(kw_only=True)
class Check:
    """One statement and what was found: it holds if there are no defects. untested: what there was no chance to see."""

    name: str
    statement: str
    defects: list[str] = field(default_factory=list[str])
    untested: list[str] = field(default_factory=list[str])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Models:
    """Target and drafter in one type."""

    target: Target
    drafter: Drafter
    _engines: dict[tuple[bool, int], Engine] = field(default_factory=dict[tuple[bool, int], Engine], repr=False)
    """By drafter or none, and rows."""

    @property
    def exact(self) -> bool:
        """Whether rounding cannot tell plain from speculative decoding (docs/exactness.md)."""
        return self.target.dtype == torch.float32 or on_card(self.target.embed_VD)

    def plain(self, requests: Sequence[Request], rows: int = 1) -> list[Completion]:
        """Without a drafter."""
        return self._run(None, requests, rows)

    def speculative(self, requests: Sequence[Request], rows: int, num_verify: int | None = None) -> list[Completion]:
        return self._run(self.drafter, requests, rows, num_verify)

    def _run(
        self, drafter: Drafter | None, requests: Sequence[Request], rows: int, num_verify: int | None = None
    ) -> list[Completion]:
        length = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        engine = self._engines.get((drafter is not None, rows))
        if engine is None or engine.max_length < length:  # kept for the graphs that it has captured on a card
            engine = Engine(self.target, drafter, max_rows=rows, max_length=length)
            self._engines[drafter is not None, rows] = engine
        engine.num_verify = num_verify
        return engine.generate(requests)


def requests_for(
    models: Models, prompts: Sequence[Prompt], config: VerifyConfig, settings: Sequence[SamplingParams]
) -> list[Request]:
    """A request per prompt, the settings in turn, each with a seed of its own; prompts come again until all were in."""
    return [
        Request(
            prompt_ids=prompts[number % len(prompts)],
            max_tokens=config.max_tokens,
            sampling=replace(settings[number % len(settings)], seed=1000 + number),
            stop_token_ids=models.target.config.eos_token_ids,
        )
        for number in range(max(len(prompts), len(settings)))
    ]
