"""Measures the finished embedded target and writes its folder: weights, tokenizer, prompts, card with the figures."""

import ast
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.tiny_target_data import (
    END_OF_TEXT,
    PAD,
    TURN_END,
    Module,
    Turn,
    render_prompt,
    write_prompts,
    write_tokenizer,
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the card states, all of it measured by the run that writes it."""

    command: str
    source: str
    train_modules: list[Module]
    held_out: list[Module]
    parameters: int
    num_turns: int
    stream_tokens: int
    steps: int
    trained_tokens: int
    seconds: float
    device: str
    bits_per_byte: float
    answers: dict[str, float]
    shown: tuple[Turn, str]


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def greedy_answers(model: Any, tokenizer: Any, turns: list[Turn], *, max_tokens: int = 192) -> list[list[int]]:
    """Token ids of the model's greedy answer to each prompt, its end token included, cut at `max_tokens`."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, padding_side="left")
    inputs = wrapped([render_prompt(turn) for turn in turns], return_tensors="pt", padding=True).to(model.device)
    output_BS = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    pad = tokenizer.token_to_id(PAD)
    return [[t for t in row if t != pad] for row in output_BS[:, inputs["input_ids"].shape[1] :].tolist()]


def measure_answers(answers: list[list[int]], turns: list[Turn], tokenizer: Any) -> dict[str, float]:
    """Share of answers that end by themselves, their mean length in tokens, share that is Python with its prompt."""
    ends = {tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)}
    ended = [bool(answer) and answer[-1] in ends for answer in answers]
    texts = [f"{turn.prompt}\n{tokenizer.decode(ids)}\n" for turn, ids in zip(turns, answers, strict=True)]
    parsed = [done and is_python(text) for done, text in zip(ended, texts, strict=True)]
    return {
        "ended": sum(ended) / len(answers),
        "mean_tokens": sum(len(answer) for answer in answers) / len(answers),
        "parsed": sum(parsed) / len(answers),
    }


def is_python(text: str) -> bool:
    try:  # The one way to ask whether text is Python.
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def card(facts: Facts, num_prompts: tuple[int, int]) -> str:
    """README.md of the model folder."""
    megabytes = [sum(len(m.text.encode()) for m in part) / 1e6 for part in (facts.train_modules, facts.held_out)]
    held_out = ", ".join(f"`{name}`" for name in sorted({module.group for module in facts.held_out}))
    turn, answer = facts.shown
    rows = [
        ("architecture", f"Qwen3 causal LM, {facts.parameters / 1e6:.2f} M parameters, bf16, tied embeddings"),
        ("data", f"{facts.source}: {len(facts.train_modules)} modules, {megabytes[0]:.1f} MB"),
        ("held out", f"{len(facts.held_out)} modules, {megabytes[1]:.1f} MB, whole, with their tests: {held_out}"),
        ("mix", f"half running text, half chat turns ({facts.num_turns:,}); {facts.stream_tokens / 1e6:.1f} M tokens"),
        ("steps", f"{facts.steps:,} ({facts.trained_tokens / 1e6:,.2f} M tokens, repeats included)"),
        ("time", f"{facts.seconds:,.0f} s"),
        ("device", facts.device),
        ("held-out loss", f"{facts.bits_per_byte:.3f} bits per byte"),
        ("greedy answers to the held-out prompts", f"{facts.answers['mean_tokens']:.0f} tokens on average"),
        ("… that end by themselves within 192 tokens", f"{facts.answers['ended']:.0%}"),
        ("… that are valid Python with their prompt", f"{facts.answers['parsed']:.0%}"),
        ("licence", "weights and tokenizer: Apache-2.0; text of the prompts: PSF License Version 2"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""# tiny-qwen3

A small language model of Python with the architecture of Qwen3, so that everything in this repository can run on a
CPU, offline, on real text. It completes code: the user's message is the head of a function or class, the answer is what
may follow it, up to a natural end. It is a target to speculate on, not a model to rely on.

| | |
|---|---|
{table}

Made by

    {facts.command}

## Files

- `model.safetensors`, `config.json`, `generation_config.json`: as `transformers` writes them.
- `tokenizer.json`, `tokenizer_config.json`: byte-level BPE of the training modules alone; ChatML template, in which
  `enable_thinking` has no effect. `<|im_end|>` ends a turn, `<|endoftext|>` a document. `<|mask|>`, the last entry, is
  what a drafter reads as "not known yet"; no text encodes to it, and the target was never trained on it.
- `prompts/train.jsonl` ({num_prompts[0]} rows) and `prompts/heldout.jsonl` ({num_prompts[1]} rows): `id` names module,
  function and line; held-out prompts come from held-out modules alone and do not occur in the training text.

The prompts are excerpts of the Python standard library, © Python Software Foundation, under the PSF License Version 2
(https://docs.python.org/3/license.html). They ship with the model because standard libraries differ between versions.

## Example

A held-out prompt (`{turn.id}`)

```python
{turn.prompt}
```

and the model's greedy answer to it

```python
{answer}
```
"""


def write_model(
    out: Path, model: Any, tokenizer: Any, prompts: tuple[list[Turn], list[Turn]], facts: Facts, *, max_positions: int
) -> None:
    """Writes the folder beside `out`, then renames it there: `out` is never half written. An old model is replaced."""
    temporary, previous = (out.with_name(f".{out.name}.{role}-{os.getpid()}") for role in ("new", "old"))
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary)
    write_tokenizer(tokenizer, temporary, max_length=max_positions)
    for turns, name in zip(prompts, ("train", "heldout"), strict=True):
        write_prompts(turns, temporary / "prompts" / f"{name}.jsonl")
    text = card(facts, (len(prompts[0]), len(prompts[1])))
    (temporary / "README.md").write_text(text, encoding="utf-8")
    if out.exists():
        out.rename(previous)
    temporary.rename(out)
    shutil.rmtree(previous, ignore_errors=True)


def check_out(out: Path) -> None:
    """ValueError, before any work, for an existing `out` that is not a model folder: it would be replaced."""
    if out.exists() and not (out / "config.json").is_file():
        raise ValueError(f"--out {out} exists and is not a model folder; name a new folder")
