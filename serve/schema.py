"""What the server is told: its configuration (`ServeConfig`) and the bodies of the two OpenAI routes.

A parameter that cannot be honoured exactly is refused by name. A parameter of the OpenAI or vLLM interface that we do
not have is accepted only with a value that asks for nothing (`NO_EFFECT`), and null always means "not given".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """One served model: target, drafter, engine sizes, HTTP address and scaling. ValueError for what cannot work."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    target: str = ""  # model id or local folder
    model_name: str = ""  # id under /v1/models; empty: the folder's name, or the model id
    drafter: str = ""  # models:/NAME@ALIAS (followed while serving), a local folder, or "none" for plain decoding
    tracking_uri: str = ""  # MLflow, where the alias is looked up
    cache_dir: str = "~/.cache/domino/drafters"  # downloaded versions, one folder each
    poll_seconds: float = 5.0  # how often the alias is looked up

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda when gpus_per_replica is set
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on a CPU, bfloat16 on a GPU
    max_rows: int = 16  # requests decoded together; more of them wait
    max_length: int = 2048  # prompt and completion tokens of one request together
    num_verify: int | None = None  # drafts verified in a round; None: all that the drafter makes
    max_choices: int = 64  # prompts x n of one HTTP request

    host: str = "127.0.0.1"
    port: int = 8000
    app_name: str = "domino"
    min_replicas: int = 1
    max_replicas: int = 2
    target_ongoing_requests: float = 16.0  # per replica, what the autoscaler aims at
    max_ongoing_requests: int = 32  # per replica; above it requests queue in the proxy
    max_queued_requests: int = 128  # above it the proxy answers 503
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    cpus_per_replica: float = 1.0
    gpus_per_replica: float = 0.0

    def __post_init__(self) -> None:
        positive = ("poll_seconds", "max_rows", "max_choices", "max_replicas", "max_ongoing_requests")
        for field in (*positive, "target_ongoing_requests", "max_queued_requests"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field}={getattr(self, field)}: expected more than 0")
        if self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: expected at least 2 (one prompt token, one answer token)")
        if self.num_verify is not None and self.num_verify < 1:
            raise ValueError(f"num_verify={self.num_verify}: expected at least 1, or None for all drafts")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port={self.port}: expected 1 to 65535")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas}: expected 1 to max_replicas={self.max_replicas} "
                "(loading a target takes too long to start from zero)"
            )
        if self.max_ongoing_requests < self.target_ongoing_requests:
            raise ValueError(
                f"max_ongoing_requests={self.max_ongoing_requests} is below "
                f"target_ongoing_requests={self.target_ongoing_requests}: the autoscaler would never add a replica"
            )
        if self.device == "cuda" and self.gpus_per_replica <= 0:
            raise ValueError("device=cuda needs gpus_per_replica=1 (or a fraction), or Ray hides the GPU")

    @property
    def served_name(self) -> str:
        """The model id that clients send."""
        return self.model_name or (os.path.basename(self.target.rstrip("/")) if _is_path(self.target) else self.target)

    @property
    def resolved_device(self) -> str:
        return ("cuda" if self.gpus_per_replica > 0 else "cpu") if self.device == "auto" else self.device

    @property
    def resolved_dtype(self) -> str:
        return ("bfloat16" if self.resolved_device == "cuda" else "float32") if self.dtype == "auto" else self.dtype


def _is_path(target: str) -> bool:
    return os.path.isdir(os.path.expanduser(target)) or target.startswith(("/", ".", "~"))


def read_config(args: dict[str, Any]) -> ServeConfig:
    """ServeConfig from `serve run key=value` (all strings) or the `args` of a Serve config file. Unknown keys fail."""
    return TypeAdapter(ServeConfig).validate_python(args)


# Parameters of the OpenAI and vLLM interfaces that we do not have, with the values that ask for nothing.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
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


class _Body(BaseModel):
    """JSON types are taken literally: true is not 1, and "5" is not 5."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False


class _GenerationBody(_Body):
    """What both routes share. Defaults are OpenAI's: temperature 1, top_p 1."""

    model: str
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1: all tokens
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Text | list[Text] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    user: str | None = None

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
                raise refuse(name, f"unknown parameter {name!r}")
            elif value is not None and not any(_same(value, neutral) for neutral in NO_EFFECT[name]):
                raise refuse(name, f"{name}={value!r} is not supported and would change the answer; leave it out")
        if "stream_options" in kept and kept.get("stream") is not True:
            raise refuse("stream_options", "stream_options is only allowed with stream=true")
        return kept

    @field_validator("stop")
    @classmethod
    def _usable_stops(cls, stop: str | list[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > MAX_STOPS:
            raise refuse("stop", f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed")
        if max(map(len, stops), default=0) > MAX_STOP_LENGTH:
            raise refuse("stop", f"a stop string is longer than {MAX_STOP_LENGTH} characters")
        if "" in stops:
            raise refuse("stop", "stop contains an empty string, which would stop every answer at once")
        return stops


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, and in JSON it is not; 0 and 0.0 are the same number.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class CompletionRequest(_GenerationBody):
    """POST /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
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
    content: Text | list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, message: Any) -> Any:
        # The openai client's own message objects carry tool_calls=None, refusal=None, annotations=[] and the like.
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

    messages: Annotated[list[Message], Field(min_length=1)]
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
