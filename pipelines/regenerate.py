"""The target's own answers to a file of prompts: what a drafter learns from, written once for many runs.

Every batch that an engine has answered becomes a part file, so a run that was stopped goes on where it was. When all
prompts are done, the parts become one file in the order of the prompts, with what was asked for recorded beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.capture import CaptureConfig, TargetActor, chunk_dataset, on_engines
from pipelines.feature_store import Events, digest, read_events, read_ledger, record, write_atomically, write_ledger
from pipelines.prompt_files import Chunk, prompt_chunks, read_chunk, read_prompts
from pipelines.prompt_rows import is_conversation, tools
from pipelines.prompts import answer_prompt, prompts_for_answering

# Named, because the first thousand answers need not have every key that a later one has.
_TURN = pa.struct(
    [(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")]
)
_ANSWERED = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(_TURN)),
        ("tools", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("finish_reason", pa.string()),
    ]
)


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

    def summary(self) -> str:
        """Counts of a finished run, and the first rows that were not answered with their reasons."""
        info = json.loads(self.info.read_text())
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
    if run.info.exists():
        before = json.loads(run.info.read_text())["asked"]
        # Its folder may move, and `when` is not about answers; everything else decides what an answer is.
        changed = [key for key, value in _asked(run).items() if key not in ("target", "when") and before[key] != value]
        if changed:
            raise ValueError(f"{output} was begun with other settings ({', '.join(changed)}); give another output")
    return run


def regenerate(run: AnswerRun) -> Iterator[int]:
    """Answer what is not answered yet; yields the number of rows done before, then of each batch; writes the output."""
    chunks = prompt_chunks(run.data, run.capture.batch_size, run.num_rows)
    done = set(_reopen(run))
    before = read_events(run.parts / "events")
    done |= before.skipped.keys() | before.failed.keys()
    if not run.info.exists():
        write_atomically(run.info, json.dumps({"asked": _asked(run)}, indent=1).encode())
    write_ledger(run.parts / "done.json", done)
    yield len(done)
    chunks = [chunk for chunk in chunks if any(row["sample_id"] not in done for row in read_chunk(chunk))]
    if chunks:
        answers = on_engines(chunk_dataset(chunks), AnswerActor, run.capture, run=run)
        for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
            rows: Any = batch["rows"]
            yield sum(rows.to_pylist())
    finish(run)


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
        room = self.run.capture.max_length - 2
        for row in rows:
            try:  # the boundary to a user's data: one bad row must not end a run of days
                prompt = answer_prompt(row, self.tokenizer, enable_thinking=self.run.answer.enable_thinking)
            except ValueError as error:
                events.failed[row["sample_id"]] = str(error)
                continue
            if len(prompt) > room:
                events.skipped[row["sample_id"]] = f"prompt of {len(prompt)} tokens, capture.max_length leaves {room}"
            else:
                asked.append((row, prompt))
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
    }


def finish(run: AnswerRun) -> None:
    """Put the answers into one file in the order of the prompts, counts and reasons beside it; remove the parts."""
    events = read_events(run.parts / "events")
    places = _answered(run)
    reasons: dict[str, int] = {}

    def lines() -> Iterator[str]:
        for row in read_prompts(run.data, run.num_rows):
            if row["sample_id"] in places:
                path, offset = places[row["sample_id"]]
                with path.open() as file:
                    file.seek(offset)
                    line = file.readline()
                reason = json.loads(line)["finish_reason"]
                reasons[reason] = reasons.get(reason, 0) + 1
                yield line

    beside = Path(f"{run.output}.tmp")
    if Path(run.output).suffix == ".jsonl":
        with beside.open("w") as file:
            file.writelines(lines())
    else:
        write_parquet(beside, lines())
    beside.replace(run.output)
    counts = {"answered": sum(reasons.values()), "skipped": len(events.skipped), "failed": len(events.failed)}
    counts |= {f"finish_{reason}": count for reason, count in sorted(reasons.items())}
    info = {"asked": _asked(run), "counts": counts, "skipped": events.skipped, "failed": events.failed}
    write_atomically(run.info, json.dumps(info, indent=1).encode())
    shutil.rmtree(run.parts)


def _reopen(run: AnswerRun) -> dict[str, tuple[Path, int]]:
    """Turn a finished output back into parts, and its record into events, so that new prompts can join it."""
    if Path(run.output).exists() and not (run.parts / "finished.jsonl").exists():
        run.parts.mkdir(parents=True, exist_ok=True)
        beside = run.parts / "finished.jsonl.tmp"
        with beside.open("w") as file:
            for row in read_prompts(run.output):
                kept = {key: value for key, value in row.items() if key not in ("sample_id", "source")}
                file.write(json.dumps(kept) + "\n")
        beside.rename(run.parts / "finished.jsonl")
        info = json.loads(run.info.read_text()) if run.info.exists() else {}
        record(run.parts / "events", Events(skipped=info.get("skipped", {}), failed=info.get("failed", {})))
    return _answered(run)


def _answered(run: AnswerRun) -> dict[str, tuple[Path, int]]:
    """Where the answer to each prompt is: part file and offset. Answers do not stay in memory."""
    places: dict[str, tuple[Path, int]] = {}
    for path in sorted(run.parts.glob("*.jsonl")):
        with path.open("rb") as file:
            offset = 0
            for line in file:
                places.setdefault(json.loads(line)["id"], (path, offset))
                offset += len(line)
    return places


def write_parquet(path: Path, lines: Iterator[str]) -> None:
    """JSON lines as Parquet, a thousand rows at a time."""
    first = next(lines, None)
    if first is None:
        raise ValueError(f"no prompt could be answered, so there is nothing to write to {path}")
    every = chain([first], lines)
    with pq.ParquetWriter(path, _ANSWERED) as writer:
        while rows := [json.loads(line) for line in islice(every, 1000)]:
            writer.write_table(pa.Table.from_pylist(rows, schema=_ANSWERED))


def _asked(run: AnswerRun) -> dict[str, Any]:
    """What decides an answer: the target, its chat template and the sampling settings."""
    from domino_core.target import load_tokenizer, target_hash, tokenizer_hash

    identity = {"target_hash": target_hash(run.target), "tokenizer_hash": tokenizer_hash(load_tokenizer(run.target))}
    return {"target": run.target, **identity, "max_length": run.capture.max_length, **asdict(run.answer)}
