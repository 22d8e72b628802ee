"""What an engine is asked for and what it gives: requests, the outputs of their rounds, and all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from domino_core.decode import Acceptance
from domino_core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """stop_token_ids: every id that ends the output; the model's end-of-text ids are the caller's to include.

    logprobs: None, or how many alternatives to report beside each token's own log-probability (0 is fine).
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def check(self, vocabulary: int, max_length: int) -> None:
        """ValueError if an engine of this max_length could never run it."""
        prompt = self.prompt_ids
        if not prompt:
            raise ValueError("the prompt is empty; it needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ValueError(f"prompt token ids {min(prompt)}..{max(prompt)} must be in 0..{vocabulary - 1}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if len(prompt) + self.max_tokens > max_length:
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_tokens={self.max_tokens} exceed max_length={max_length}; "
                "shorten the prompt or ask for fewer tokens"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= vocabulary:
            raise ValueError(f"logprobs={self.logprobs} must be in 0..{vocabulary}")
        outside = [token for token, _ in self.sampling.logit_bias if token >= vocabulary]
        if outside:
            raise ValueError(f"logit_bias names token {outside[0]}; ids are in 0..{vocabulary - 1}")


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities under the target's unprocessed logits, as OpenAI and vLLM report them; top: (id, value)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Output:
    """New tokens of a request. A stop token is emitted, nothing behind it is. acceptance: of this request so far."""

    request_id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    acceptance: Acceptance


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All output of a request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    acceptance: Acceptance


def read_logprobs(logits_TV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """Of tokens that were drawn at the first slots of a block, with num_top alternatives each."""
    logprobs_TV = logits_TV[: len(tokens)].float().log_softmax(-1)
    own: list[float] = logprobs_TV.gather(1, torch.tensor(tokens, device=logits_TV.device)[:, None])[:, 0].tolist()
    top = logprobs_TV.topk(num_top, dim=-1)
    pairs = [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return [TokenLogprobs(token=t, logprob=v, top=p) for t, v, p in zip(tokens, own, pairs, strict=True)]


def join_outputs(outputs: Sequence[Output]) -> Completion:
    """The outputs of one request, the last one included."""
    reason = outputs[-1].finish_reason
    assert reason is not None
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    return Completion(
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=logprobs if outputs[-1].logprobs is not None else None,
        finish_reason=reason,
        acceptance=outputs[-1].acceptance,
    )
