"""The bodies of the two OpenAI routes.

A parameter that cannot be honoured exactly is refused by name. A parameter of the OpenAI or vLLM interface that we do
not have is accepted only with a value that asks for nothing (`NO_EFFECT`), and null always means "not given".
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from domino_core.sampling_params import LARGEST_BIAS

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 512
MAX_BIASES = 300  # OpenAI's limit
MAX_STOP_TOKENS = 256
MAX_MESSAGES = 2048
MAX_PARTS = 256  # of one message
MAX_FIELDS = 64  # of a message
MAX_NAME = 256  # characters of a model's, a user's


# Parameters of the OpenAI and vLLM interfaces that we do not have, with the values that ask for nothing.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "metadata": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def refuse(param: str, message: str) -> PydanticCustomError:
    """An error that keeps the name of the parameter, also when the whole body is being checked."""
    # A client's name for a parameter may hold half a surrogate pair, which no answer can be encoded with.
    param = param.encode(errors="backslashreplace").decode()
    return PydanticCustomError("invalid_parameter", "{message}", {"param": param, "message": message})


def _encodable(text: str) -> str:
    # JSON can spell half of a surrogate pair ("\\ud800"), which is no character and has no tokens.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text contains an unpaired surrogate")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list of a client's. Its first wrong item ends it: errors for a million of them would hold up all answers."""


def _short(value: Any) -> str:
    """What a client has sent, as an error repeats it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _at_most(param: str, items: Any, limit: int, what: str) -> None:
    """Called before items are looked at one by one; what is no list or object is told elsewhere."""
    if isinstance(items, list | dict) and len(items) > limit:
        raise refuse(param, f"{param} has {len(items)} {what}; at most {limit} are allowed")


class _Body(BaseModel):
    """JSON types are taken literally: true is not 1, and "5" is not 5."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False


class _GenerationBody(_Body):
    """What both routes share. Defaults are OpenAI's: temperature 1, top_p 1."""

    model: Annotated[str, Field(max_length=MAX_NAME)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1: all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    logit_bias: dict[str, Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]] = Field(default_factory=dict)
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Text | Listed[Text] = Field(default_factory=list)
    stop_token_ids: Listed[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    user: Annotated[str | None, Field(max_length=MAX_NAME)] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise refuse("", "the request body must be a JSON object")
        kept: dict[str, Any] = {}
        for name, value in body.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name not in NO_EFFECT:
                raise refuse(name[:80], f"unknown parameter {_short(name)}")
            elif value is not None and not any(_same(value, neutral) for neutral in NO_EFFECT[name]):
                raise refuse(name, f"{name}={_short(value)} is not supported and would change the answer; leave it out")
        if "stream_options" in kept and kept.get("stream") is not True:
            raise refuse("stream_options", "stream_options is only allowed with stream=true")
        _at_most("stop", kept.get("stop"), MAX_STOPS, "strings")
        _at_most("stop_token_ids", kept.get("stop_token_ids"), MAX_STOP_TOKENS, "ids")
        _at_most("logit_bias", kept.get("logit_bias"), MAX_BIASES, "entries")
        _at_most("messages", kept.get("messages"), MAX_MESSAGES, "messages")
        return kept

    @field_validator("stop")
    @classmethod
    def _usable_stops(cls, stop: str | list[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if max(map(len, stops), default=0) > MAX_STOP_LENGTH:
            raise refuse("stop", f"a stop string is longer than {MAX_STOP_LENGTH} characters")
        if "" in stops:
            raise refuse("stop", "stop contains an empty string, which would stop every answer at once")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float]) -> dict[str, float]:
        for key in bias:
            # One spelling per id, so that no token can be named twice; int() would also read "05", "5_0" and "٥".
            if not re.fullmatch("0|[1-9][0-9]{0,17}", key):
                raise refuse("logit_bias", f'logit_bias: {key[:40]!r} is no token id; keys are ids, as in {{"42": 5}}')
        return bias


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, and in JSON it is not; 0 and 0.0 are the same number.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class CompletionRequest(_GenerationBody):
    """POST /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: Text | Listed[Text] | Listed[int] | Listed[Listed[int]]
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [list(self.prompt)]  # type: ignore[arg-type]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def completion_limit(self) -> int:
        """Tokens asked for; OpenAI's default for this route is 16."""
        return self.max_tokens or 16


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    role: Literal["system", "user", "assistant"]
    content: Text | Listed[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, message: Any) -> Any:
        # The openai client's own message objects carry tool_calls=None, refusal=None, annotations=[] and the like.
        if isinstance(message, dict):
            _at_most("messages", message, MAX_FIELDS, "fields in one message")
            _at_most("messages", message.get("content"), MAX_PARTS, "parts in one message")
        empty = (None, [])
        return (
            {key: value for key, value in message.items() if value not in empty or key in ("role", "content")}
            if isinstance(message, dict)
            else message
        )

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TemplateOptions(_Body):
    enable_thinking: bool = False


class ChatRequest(_GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "top_logprobs is only allowed with logprobs=true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise refuse("max_tokens", f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ; send one")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def completion_limit(self) -> int | None:
        """Tokens asked for; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens
