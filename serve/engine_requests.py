"""What a body of the OpenAI routes asks the engine for, and what is refused before the engine sees it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from domino_core.request import Request as EngineRequest
from domino_core.sampling_params import SamplingParams
from serve.config import ServeConfig
from serve.generation import Generation
from serve.schema import ChatRequest, CompletionRequest
from serve.text import Vocabulary

CHARACTERS_PER_TOKEN = 32  # of a prompt at most; English has four, deep indentation eight


class Service(Protocol):
    """What the routes need to know about the loaded model (serve/server.py has the real one)."""

    config: ServeConfig
    vocabulary: Vocabulary
    created: int

    def generation(self, requests: list[EngineRequest], stops: Sequence[str], request_id: str) -> Generation: ...
    def render_chat(self, messages: list[dict[str, str]], enable_thinking: bool) -> list[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def vocab_size(self) -> int: ...
    def fingerprint(self, version: str) -> str: ...
    def health(self) -> dict[str, Any]: ...
    def metrics_page(self) -> bytes: ...
    async def canary_reports(self) -> list[dict[str, Any]]: ...


class ApiError(Exception):
    """An answer other than 200, with the parameter that caused it where there is one."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def check_model(service: Service, model: str) -> None:
    if model != service.config.served_name:
        message = f"the model {model!r} does not exist; this server has {service.config.served_name!r}"
        raise ApiError(404, message, "model", "model_not_found")


def check_choices(service: Service, num_prompts: int, n: int) -> None:
    if num_prompts * n > (most := service.config.max_choices):
        message = f"{num_prompts} prompts x n={n} exceed {most} answers per request (serve.max_choices)"
        raise ApiError(400, message, "n")


def check_characters(service: Service, count: int, param: str) -> None:
    """Before text is made tokens, which takes a second a megabyte and holds up everyone's answers."""
    if count > (most := CHARACTERS_PER_TOKEN * service.config.max_length):
        message = (
            f"{param} has {count} characters; at most {most} are allowed, "
            f"{CHARACTERS_PER_TOKEN} for each of this model's {service.config.max_length} tokens"
        )
        raise ApiError(400, message, param, "context_length_exceeded")


def check_token_ids(service: Service, prompt: list[int]) -> list[int]:
    for token in prompt:
        if not 0 <= token < service.vocab_size():
            raise ApiError(400, f"prompt: token id {token} is outside 0..{service.vocab_size() - 1}", "prompt")
    return prompt


def engine_requests(
    service: Service, body: CompletionRequest | ChatRequest, prompts: list[list[int]]
) -> list[EngineRequest]:
    """One engine request for each prompt and each of its n answers; the i-th answer to a prompt has seed + i.

    Without a seed every prompt gets one of its own, so that the same prompt twice has two answers.
    """
    param = "messages" if isinstance(body, ChatRequest) else "prompt"
    limit = service.config.max_length
    sampling = sampling_params(service, body)
    requests: list[EngineRequest] = []
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", param)
        max_tokens = body.completion_limit or max(limit - len(prompt), 1)
        if len(prompt) + max_tokens > limit:
            message = (
                f"this model's context length is {limit} tokens; {len(prompt)} in the prompt and "
                f"{max_tokens} in the completion make {len(prompt) + max_tokens}"
            )
            raise ApiError(400, message, param, "context_length_exceeded")
        seed = secrets.randbits(53) if body.seed is None else body.seed
        for index in range(body.n):
            requests.append(
                EngineRequest(
                    prompt_ids=tuple(prompt),
                    max_tokens=max_tokens,
                    # Wraps around in 64 signed bits.
                    sampling=replace(sampling, seed=(seed + index + 2**63) % 2**64 - 2**63),
                    stop_token_ids=(*body.stop_token_ids, *(() if body.ignore_eos else service.eos_token_ids())),
                    logprobs=body.num_logprobs,
                )
            )
    return requests


def sampling_params(service: Service, body: CompletionRequest | ChatRequest) -> SamplingParams:
    """What a body asks for, but for the seed. With a seed the answer has to be plain decoding's, so the rule is too."""
    vocabulary = service.vocab_size()
    bias = tuple((int(token), value) for token, value in body.logit_bias.items())
    for token, _ in bias:
        if token >= vocabulary:
            raise ApiError(400, f"logit_bias: token id {token} is outside 0..{vocabulary - 1}", "logit_bias")
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=bias,
        rule=service.config.unseeded_rule if body.seed is None else "shared_noise",
    )
