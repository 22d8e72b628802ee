"""What the server is told at its start: one served model, its engine, its address and its scaling."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from domino_core.sampling_params import DraftRule


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """One served model: target, drafter, engine sizes, HTTP address and scaling. ValueError for what cannot work."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    target: str = ""  # model id or local folder
    model_name: str = ""  # id under /v1/models; empty: the folder's name, or the model id
    drafter: str = ""  # models:/NAME@ALIAS (followed while serving), a local folder, or "none" for plain decoding
    tracking_uri: str = ""  # MLflow, where the alias is looked up
    cache_dir: str = "~/.cache/domino/drafters"  # downloaded versions, one folder each
    poll_seconds: float = 5.0  # how often the alias is looked up

    canary_share: float = 0.1  # of the requests, for a version that is tried out (jobs.promote --canary); 0: none is

    engine: Literal["torch", "vllm"] = "torch"  # what decodes: domino_core's, or vLLM with Domino drafting in it
    vllm_args: str = ""  # engine=vllm: further flags of `vllm serve`; they win over those that follow from this section

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda when gpus_per_replica is set
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on a CPU, bfloat16 on a GPU
    max_rows: int | Literal["auto"] | None = "auto"  # requests decoded together, more wait; auto, none: as many as fit
    max_length: int = 2048  # prompt and completion tokens of one request together
    num_verify: int | Literal["auto"] | None = None  # drafts verified a round; None: all; auto: what pays
    unseeded_rule: DraftRule = "shared_noise"  # how sampled requests without a seed draft; see docs/serving.md
    max_choices: int = 64  # prompts x n of one HTTP request
    max_body_bytes: int = 2 << 20  # of one HTTP request; larger ones get a 413
    api_key_file: str = ""  # keys that clients may send, one a line; empty: $DOMINO_API_KEY, and without that no key

    host: str = "127.0.0.1"
    port: int = 8000
    app_name: str = "domino"
    min_replicas: int = 1
    max_replicas: int = 2
    target_ongoing_requests: float = 16.0  # per replica, what the autoscaler aims at
    target_first_token_s: float | None = None  # later first tokens ask for a replica more; None: not looked at
    max_ongoing_requests: int = 32  # per replica; above it requests queue in the proxy
    max_queued_requests: int = 128  # above it the proxy answers 503
    retry_after_s: int = 2  # what a 503 tells clients to wait
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    cpus_per_replica: float = 1.0
    gpus_per_replica: float = 0.0

    def __post_init__(self) -> None:
        positive = (
            "poll_seconds",
            "max_choices",
            "max_body_bytes",
            "retry_after_s",
            "max_replicas",
            "max_ongoing_requests",
        )
        for field in (*positive, "target_ongoing_requests", "max_queued_requests"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field}={getattr(self, field)}: expected more than 0")
        if isinstance(self.max_rows, int) and self.max_rows < 1:
            raise ValueError(f"max_rows={self.max_rows}: expected at least 1, or auto for as many as fit")
        if self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: expected at least 2 (one prompt token, one answer token)")
        if self.num_verify != "auto" and self.num_verify is not None and self.num_verify < 1:
            raise ValueError(f"num_verify={self.num_verify}: expected at least 1, auto, or None for all drafts")
        if self.target_first_token_s is not None and not self.target_first_token_s > 0:  # nor "nan"
            raise ValueError(f"target_first_token_s={self.target_first_token_s}: expected more than 0, or none")
        if not 0 <= self.canary_share < 1:  # nor "nan"
            raise ValueError(
                f"canary_share={self.canary_share}: expected 0 (no canary) to less than 1 (the champion needs requests "
                "to be compared by)"
            )
        self._check_engine()
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

    def _check_engine(self) -> None:
        """ValueError for what the other engine has and the chosen one has not."""
        if self.engine == "torch":
            if self.vllm_args:
                raise ValueError("vllm_args needs engine=vllm")
            return
        split_flags(self.vllm_args)
        if self.num_verify == "auto":
            raise ValueError(
                "num_verify=auto is the torch engine's: with engine=vllm give a number, or vLLM's own "
                "num_speculative_tokens_per_batch_size to fewer drafts under load (docs/vllm.md)"
            )
        if self.canary_share not in (0, ServeConfig.canary_share):
            raise ValueError(
                f"canary_share={self.canary_share} is the torch engine's: with engine=vllm an engine has one drafter, "
                "and no share of its requests can go to another; leave it out"
            )
        if self.unseeded_rule != "shared_noise":
            raise ValueError(f"unseeded_rule={self.unseeded_rule} is the torch engine's: leave it out with engine=vllm")
        if self.gpus_per_replica > 1 and self.gpus_per_replica != int(self.gpus_per_replica):
            raise ValueError(f"gpus_per_replica={self.gpus_per_replica}: expected a whole number above 1")

    @property
    def served_name(self) -> str:
        """The model id that clients send."""
        return self.model_name or (os.path.basename(self.target.rstrip("/")) if _is_path(self.target) else self.target)

    @property
    def fixed_rows(self) -> int | None:
        """max_rows where it is a number; None: the engine plans it."""
        return self.max_rows if isinstance(self.max_rows, int) else None

    @property
    def resolved_device(self) -> str:
        return ("cuda" if self.gpus_per_replica > 0 else "cpu") if self.device == "auto" else self.device

    @property
    def resolved_dtype(self) -> str:
        return ("bfloat16" if self.resolved_device == "cuda" else "float32") if self.dtype == "auto" else self.dtype


def split_flags(vllm_args: str) -> list[str]:
    """As a shell would. ValueError for quotes that do not match."""
    try:
        return shlex.split(vllm_args)
    except ValueError as error:
        raise ValueError(f"serve.vllm_args: {error}") from error


def _is_path(target: str) -> bool:
    return os.path.isdir(os.path.expanduser(target)) or target.startswith(("/", ".", "~"))


def read_config(args: dict[str, Any]) -> ServeConfig:
    """ServeConfig from `serve run key=value` (all strings) or the `args` of a Serve config file. Unknown keys fail."""
    from pydantic import TypeAdapter, ValidationError  # other commands read settings without a server's packages

    words = {key: None for key in ("max_rows", "num_verify", "target_first_token_s") if args.get(key) == "none"}
    try:
        return TypeAdapter(ServeConfig).validate_python(args | words)
    except ValidationError as error:  # what a user wrote, told in one line
        told = [f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}" for each in error.errors()]
        raise ValueError("; ".join(told)) from error
