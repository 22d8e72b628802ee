"""The target's own answers to a file of prompts: what a drafter learns from, written once for many runs.

Every batch that an engine has answered becomes a part file, so a run that was stopped goes on where it was. When all
prompts are done, the parts become one file in the order of the prompts, with what was asked for recorded beside it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from domino_core.atomic_files import write_atomically
from domino_core.json_files import read_json, read_object
from pipelines.answer_files import finish, prompt_hash, refused_before, reopen
from pipelines.capture import CaptureConfig, TargetActor, chunk_dataset, on_engines
from pipelines.feature_store import Events, digest, read_events, read_ledger, record, write_ledger
from pipelines.prompt_files import Chunk, prompt_chunks, read_chunk, read_prompts
from pipelines.prompt_rows import Row, is_conversation, tools
from pipelines.prompts import UnusableRow, answer_prompt, prompts_for_answering


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How the target answers the prompts that a drafter is trained on."""

    when: Literal["missing", "always", "never"] = "missing"  # rows that end with an answer are kept
    max_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0
    enable_thinking: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(
                f"answer.max_tokens={self.max_tokens}: a drafter learns from answers of two tokens or more"
            )
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            values = f"temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}"
            raise ValueError(f"answer: {values}; need temperature >= 0, 0 < top_p <= 1, top_k >= 0 (0 is off)")


@dataclass(frozen=True, kw_only=True)
class AnswerRun:
    """One file of prompts on its way to one file of answers."""

    data: str
    num_rows: int | None = None  # the first rows of data; None: all
    target: str
    output: str  # .jsonl or .parquet
    answer: AnswerConfig
    capture: CaptureConfig  # the engines; nothing is captured

    @property
    def parts(self) -> Path:
        """Where unfinished work is kept."""
        return Path(f"{self.output}.parts")

    @property
    def info(self) -> Path:
        """What was asked of whom, and what came of it."""
        return Path(f"{self.output}.info.json")

    @cached_property
    def asked(self) -> dict[str, Any]:
        """What decides an answer: the target, its chat template, whether it thinks, and the sampling settings."""
        from domino_core.target import load_tokenizer, target_hash, tokenizer_hash

        tokenizer, settings = load_tokenizer(self.target), asdict(self.answer)
        del settings["when"]  # every prompt is answered here
        identity = {"target_hash": target_hash(self.target), "tokenizer_hash": tokenizer_hash(tokenizer)}
        thinking = {"thinking": thinking_mode(tokenizer, self.answer.enable_thinking)}
        return {"target": self.target, **identity, "max_length": self.capture.max_length, **settings, **thinking}

    def summary(self) -> str:
        """Counts of a finished run, and the first rows that were not answered with their reasons."""
        info = read_json(self.info)
        reasons = [
            f"  {sample_id}: {reason}" for sample_id, reason in [*info["failed"].items(), *info["skipped"].items()]
        ]
        counts = ", ".join(f"{count} {name}" for name, count in info["counts"].items())
        return "\n".join([f"{counts}: {self.output}", *reasons[:5]])


def answer_run(
    *,
    data: str,
    target: str,
    output: str | Path,
    answer: AnswerConfig,
    capture: CaptureConfig,
    num_rows: int | None = None,
) -> AnswerRun:
    """Check before work starts. ValueError: unusable prompts, a bad output, or answers there to other settings."""
    from domino_core.target import load_tokenizer, read_target_config

    if Path(output).suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"output {output}: name it .jsonl or .parquet")
    asked = {"data": str(data), "num_rows": num_rows, "target": str(target), "output": str(output)}
    run = AnswerRun(**asked, answer=answer, capture=capture)
    limit = read_target_config(target).max_position_embeddings
    if capture.max_length >= limit:
        raise ValueError(f"capture.max_length={capture.max_length}: {target} takes {limit} positions; one stays free")
    tokenizer = load_tokenizer(target)
    for row in read_chunk(prompt_chunks(data, 16)[0]):
        answer_prompt(row, tokenizer, enable_thinking=answer.enable_thinking)
    _check_own(run)
    return run


def thinking_mode(tokenizer: Any, enable_thinking: bool) -> str:
    """What a target's prompts make of the setting: on, off, or what its chat template does whatever one asks for."""
    from domino_core.target import apply_chat_template

    if not getattr(tokenizer, "chat_template", None):
        return "none (no chat template)"
    asked = [{"role": "user", "content": "?"}]
    on, off = (
        apply_chat_template(tokenizer, asked, enable_thinking=mode, add_generation_prompt=True)
        for mode in (True, False)
    )
    if on != off:
        return "on" if enable_thinking else "off"
    opened = on.rstrip().endswith("<think>")
    return "always (by the chat template)" if opened else "none (the chat template has no such mode)"


def _check_own(run: AnswerRun) -> None:
    """ValueError if what stands in the place of the output was not begun by this command with these settings."""
    if Path(run.output).resolve() == Path(run.data).resolve():
        raise ValueError(f"data and output are both {run.output}; give another output")
    if not run.info.exists():
        if Path(run.output).exists():
            raise ValueError(f"{run.output} is there already, without {run.info.name}; give another output")
        return
    before = read_object(run.info).get("asked")
    if not isinstance(before, dict) or "enable_thinking" not in before:
        raise ValueError(f"{run.info} belongs to another job; give another output")
    # Its folder may move, and the mode of thinking follows from the rest; everything else decides what an answer is.
    changed = [
        key for key, value in run.asked.items() if key not in ("target", "thinking") and before.get(key) != value
    ]
    if changed:
        remedy = f"give another output, or remove {run.output}, {run.info.name} and {run.parts.name}"
        raise ValueError(f"{run.output} was begun with other settings ({', '.join(changed)}); {remedy}")
    refused_before(run)


def regenerate(run: AnswerRun) -> Iterator[int]:
    """Answer what is not answered yet; yields the number of rows done before, then of each batch; writes the output."""
    chunks = prompt_chunks(run.data, run.capture.batch_size, run.num_rows)
    answered = reopen(run)
    if not run.info.exists():
        write_atomically(run.info, json.dumps({"asked": run.asked}, indent=1).encode())
    done = _done(run, answered)
    write_ledger(run.parts / "done.json", done)
    yield len(done)
    chunks = [chunk for chunk in chunks if any(row["sample_id"] not in done for row in read_chunk(chunk))]
    if chunks:
        answers = on_engines(chunk_dataset(chunks), AnswerActor, run.capture, run=run)
        for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
            rows: Any = batch["rows"]
            yield sum(rows.to_pylist())
    finish(run)


def _done(run: AnswerRun, answered: Collection[str]) -> set[str]:
    """Rows of the run that need no engine: answered, or refused before and still so (one may have been repaired)."""
    from domino_core.target import load_tokenizer

    before = read_events(run.parts / "events")
    refused = {*before.failed, *before.skipped}.difference(answered)
    tokenizer = load_tokenizer(run.target)
    done: set[str] = set()
    for row in read_prompts(run.data, run.num_rows):
        sample_id = row["sample_id"]
        if sample_id in refused and isinstance(_prompt(row, tokenizer, run), list):
            continue
        if sample_id in refused or sample_id in answered:
            done.add(sample_id)
    return done


class AnswerActor:
    """One engine of the pool: chunks of prompts in, part files out."""

    def __init__(self, run: AnswerRun) -> None:
        from domino_core.target import load_tokenizer

        self.run = run
        self.tokenizer = load_tokenizer(run.target)
        self.target = TargetActor(run.target, (), run.capture)

    def __call__(self, batch: pa.Table) -> pa.Table:
        done = read_ledger(self.run.parts / "done.json")
        chunks = [Chunk(**item) for item in batch.to_pylist()]
        rows = [row for chunk in chunks for row in read_chunk(chunk) if row["sample_id"] not in done]
        events = Events()
        asked: list[tuple[dict[str, Any], list[int]]] = []
        for row in rows:
            prompt = _prompt(row, self.tokenizer, self.run)
            if isinstance(prompt, list):
                asked.append((row, prompt))
            elif prompt.failed:
                events.failed[row["sample_id"]] = prompt.reason
            else:
                events.skipped[row["sample_id"]] = prompt.reason
        keys = [row["sample_id"] for row, _ in asked]
        answers = self.target.answer([prompt for _, prompt in asked], keys, self.run.answer)
        lines = [
            json.dumps(answered_row(row, prompt, answer.token_ids, answer.finish_reason, self.tokenizer)) + "\n"
            for (row, prompt), answer in zip(asked, answers, strict=True)
        ]
        if lines:
            # Before the record: an answer that is recorded must be there.
            write_atomically(self.run.parts / f"{digest(keys)}.jsonl", "".join(lines).encode())
        events.answered.update(keys)
        record(self.run.parts / "events", events)
        return pa.table({"rows": [len(rows)]})


def _prompt(row: Row, tokenizer: Any, run: AnswerRun) -> list[int] | UnusableRow:
    """The tokens to go on from, or why there are none."""
    sample_id = row["sample_id"]
    try:  # the boundary to a user's data: one bad row must not end a run of days
        prompt = answer_prompt(row, tokenizer, enable_thinking=run.answer.enable_thinking)
    except ValueError as error:
        return UnusableRow(sample_id=sample_id, reason=str(error), failed=True)
    room = run.capture.max_length - 2
    if len(prompt) > room:
        reason = f"prompt of {len(prompt)} tokens, capture.max_length leaves {room}"
        return UnusableRow(sample_id=sample_id, reason=reason, failed=False)
    return prompt


def answered_row(
    row: Mapping[str, Any], prompt: list[int], tokens: list[int], finish_reason: str, tokenizer: Any
) -> dict[str, Any]:
    """A training row: the very tokens that the target saw and drew, and the conversation for people to read."""
    found: dict[str, Any] = {"id": row["sample_id"]}
    if is_conversation(dict(row)):
        ended = finish_reason == "stop"
        text = tokenizer.decode(tokens[:-1] if ended else tokens)
        found["messages"] = [*prompts_for_answering(dict(row)), {"role": "assistant", "content": text}]
        # As JSON text, which fits into a table however different the tools are.
        for message in found["messages"]:
            if "tool_calls" in message:
                message["tool_calls"] = json.dumps(message["tool_calls"])
        if defined := tools(dict(row)):
            found["tools"] = json.dumps(defined)
    return found | {
        "input_ids": prompt + tokens,
        "loss_mask": [0] * len(prompt) + [1] * len(tokens),
        "finish_reason": finish_reason,
        "prompt_hash": prompt_hash(dict(row)),
    }
