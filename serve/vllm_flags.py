"""The flags of `vllm serve` that our settings mean, with `serve.vllm_args` last, and those that may not be given."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from domino_core.checkpoint import read_config
from domino_core.vllm.plugin import base_version
from domino_core.vllm.reload import WORKER_EXTENSION
from serve.config import ServeConfig, split_flags

CPU_CACHE_BYTES = 256 << 20  # of keys and values; without a number vLLM wants nearly all of the machine's memory
GRAPH_TOKENS = {"0.26.0": 2048}
"""The largest step that has a CUDA graph where there is a drafter, by vLLM's version: 64 requests with their drafts,
and a new prompt, are more than its own 512. Where no number was measured it is vLLM's."""
LISTENS = "Ray Serve listens, not vLLM (serve.host, serve.port)"
LISTENERS = ("host", "port", "uds", "headless", "api-server-count", "grpc", "grpc-port")
TLS = ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "enable-ssl-refresh", "ssl-cert-reqs", "ssl-ciphers")
REFUSED = {  # flags of vLLM that other settings decide, or that would do nothing here
    "model": "target decides it",
    "served-model-name": "serve.model_name decides it",
    "max-model-len": "serve.max_length decides it",
    "dtype": "serve.dtype decides it",
    "spec-model": "serve.drafter decides it",
    "spec-method": "serve.drafter decides it",
    "spec-tokens": "serve.num_verify decides it",
    "worker-extension-cls": "new drafters are loaded by ours",
    "config": "give the flags themselves",
    "api-key": "DOMINO_API_KEY or serve.api_key_file has it, for either engine",
    "hf-token": "set HF_TOKEN in the environment, where no command or page shows it",
    "help": "vllm serve --help tells what there is",
    **dict.fromkeys((*LISTENERS, *TLS), LISTENS),
}


def parse_flags(config: ServeConfig, folder: Path | None) -> Namespace:
    """What `vllm serve` would make of the settings, `vllm_args` last. ValueError for flags that it does not know.

    No message repeats all that was given: an API key may be in it.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(f"serve.vllm_args: {message}")

        def exit(self, status: int = 0, message: str | None = None) -> Any:  # of flags that only tell something
            self.error(message or "it would end the replica")

    parser = cli_module().make_arg_parser(Parser(allow_abbrev=False))  # whole names, which can be compared
    given = split_flags(config.vllm_args)
    names = {option: action.dest.replace("_", "-") for option, action in parser._option_string_actions.items()}
    for word in given:
        option = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if (name := names.get(option, "")) in REFUSED:
            raise ValueError(f"serve.vllm_args: --{name} is not for it: {REFUSED[name]}")
    try:
        args = parser.parse_args([*flags(config), *given])
        cli_module().validate_parsed_serve_args(args)
    except (TypeError, IndexError, VLLMValidationError) as error:  # IndexError: of --flag.key as the last word
        raise ValueError(f"serve.vllm_args: {error}") from error
    if args.model_tag is not None:
        raise ValueError(f"serve.vllm_args: {args.model_tag} belongs to no flag, and the model is target's to decide")
    if not isinstance(args.speculative_config or {}, dict):
        raise ValueError(f"serve.vllm_args: --speculative-config {args.speculative_config}: expected a JSON object")
    if folder is not None:
        most = read_config(folder).num_drafts
        args.speculative_config = {
            "num_speculative_tokens": min(config.num_verify, most) if isinstance(config.num_verify, int) else most,
            **(args.speculative_config or {}),
            "method": "dflash",
            "model": str(folder),
        }
        args.worker_extension_cls = WORKER_EXTENSION
        if not asks_for_graphs(args):
            args.max_cudagraph_capture_size = GRAPH_TOKENS.get(installed_version())
        args.per_request_spec_decode_metrics = "summary"  # in every answer's `metrics`; 0.26.0 has no such thing
    return args


def asks_for_graphs(args: Namespace) -> bool:
    """Whether the flags say themselves which steps have CUDA graphs."""
    return any(
        getattr(place, name) is not None
        for place in (args, args.compilation_config)
        for name in ("max_cudagraph_capture_size", "cudagraph_capture_sizes")
    )


def installed_version() -> str:
    """Of vLLM, which is not imported for it: its settings in the environment come first. "" if there is none."""
    found = packages_distributions().get("vllm")  # its CPU build has another name
    return base_version(version(found[0])) if found else ""


def flags(config: ServeConfig) -> list[str]:
    """The flags that follow from the settings: the same requests as the torch engine takes mean the same here."""
    chosen: dict[str, Any] = {
        "model": os.path.expanduser(config.target),
        "served-model-name": config.served_name,
        "dtype": config.resolved_dtype,
        "max-model-len": config.max_length,
        "generation-config": "vllm",  # OpenAI's defaults, not the model's
        "default-chat-template-kwargs": json.dumps({"enable_thinking": False}),  # as drafters are trained
    }
    if config.fixed_rows is not None:
        chosen["max-num-seqs"] = config.fixed_rows
    if config.resolved_device == "cpu":
        chosen["kv-cache-memory-bytes"] = CPU_CACHE_BYTES
    elif config.gpus_per_replica < 1:
        chosen["gpu-memory-utilization"] = 0.9 * config.gpus_per_replica
    else:
        chosen["tensor-parallel-size"] = int(config.gpus_per_replica)
    eager = ["--enforce-eager"] if config.resolved_device == "cpu" else []
    return [*(f"--{name}={value}" for name, value in chosen.items()), *eager]


def cli_module() -> Any:
    """Where vLLM keeps the flags of `vllm serve`."""
    try:
        from vllm.entrypoints.launchers import cli_args  # 0.32.0
    except ImportError:
        from vllm.entrypoints.openai import cli_args  # 0.26.0  # pyright: ignore[reportAttributeAccessIssue]
    return cli_args
