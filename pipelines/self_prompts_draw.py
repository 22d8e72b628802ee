"""Draws of self-made prompts: by a pool of engines, into part files, read back in the order of their numbers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from domino_core.atomic_files import write_atomically
from pipelines.capture import TargetActor, chunk_dataset, on_engines
from pipelines.prompt_files import Chunk
from pipelines.regenerate import AnswerConfig
from pipelines.self_prompts_filters import Draw

if TYPE_CHECKING:
    from pipelines.self_prompts import PromptRun

# Makes the missing parts of a run in the order given, one for each item that it yields.
DrawParts = Callable[["PromptRun", list[Chunk]], Generator[Any]]


def draw_on_engines(run: PromptRun, missing: list[Chunk]) -> Generator[Any]:
    """Have a pool of engines draw the parts."""
    dataset = on_engines(chunk_dataset(missing, preserve_order=True), PromptActor, run.capture, run=run)
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")


class PromptActor:
    """One engine of the pool: ranges of draws in, part files out."""

    def __init__(self, run: PromptRun) -> None:
        self.run = run
        self.target = TargetActor(run.target, (), run.capture)

    def __call__(self, batch: pa.Table) -> pa.Table:
        config = self.run.config
        sampling = AnswerConfig(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
        )
        # It stops where a user's turn ends, which is not where every target's answers end.
        self.target.eos_token_ids = self.run.turn.stop_ids
        parts = [Chunk(**item) for item in batch.to_pylist()]
        for part in parts if not self.run.enough.exists() else ():
            indices = range(part.offset, part.offset + part.num_rows)
            prompts = [self.run.turn.prefix_ids] * len(indices)
            answers = self.target.answer(prompts, [str(index) for index in indices], sampling)
            lines = [
                json.dumps({"index": index, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason})
                + "\n"
                for index, answer in zip(indices, answers, strict=True)
            ]
            write_atomically(self.run.draws / f"{part.offset:09d}-{part.num_rows}.jsonl", "".join(lines).encode())
        return pa.table({"rows": [part.num_rows for part in parts]})


def draws_in_order(run: PromptRun, draw_parts: DrawParts) -> Generator[list[Draw]]:
    """All draws up to max_draws, a part at a time. Nothing is started before a part is missing.

    Engines are given twice as many draws as prompts are wanted, and started again for as many more if that is too few.
    Closed when there are enough, it lets them come to their end; otherwise they are stopped as they are.
    """
    run.enough.unlink(missing_ok=True)
    parts = _parts(run)
    missing: deque[Chunk] = deque()
    stream: Generator[Any] | None = None
    position = 0
    try:
        while position < run.max_draws:
            if position not in parts:
                if not missing:
                    if stream is not None:  # to its end, where its engines give back what the next ones need
                        deque(stream, maxlen=0)
                    missing.extend(_missing(run, parts, position))
                    stream = draw_parts(run, list(missing))
                part = missing.popleft()
                assert stream is not None
                assert next(stream, None) is not None, f"draw {position} was not made"
                assert part.offset == position, f"draw {part.offset} came before {position}"
                parts[position] = part.num_rows
            lines = (run.draws / f"{position:09d}-{parts[position]}.jsonl").read_text().splitlines()
            yield [Draw(**json.loads(line)) for line in lines[: run.max_draws - position]]
            position += parts[position]
    finally:
        if stream is not None:
            if run.enough.exists():
                # Ray complains of every actor that it has to kill at work.
                deque(stream, maxlen=0)
            stream.close()
        run.enough.unlink(missing_ok=True)


def _parts(run: PromptRun) -> dict[int, int]:
    """First draw and number of draws of each part that is there."""
    names = [path.stem.split("-") for path in run.draws.glob("*-*.jsonl")]
    return {int(first): int(count) for first, count in names}


def _missing(run: PromptRun, parts: dict[int, int], position: int) -> list[Chunk]:
    """Ranges of draws from `position` on that no part has, each at most a batch of an engine."""
    chunks: list[Chunk] = []
    end = min(run.max_draws, position + 2 * run.wanted)
    for first, count in [*sorted(parts.items()), (end, 0)]:
        while position < min(first, end):
            rows = min(run.capture.batch_size, min(first, end) - position)
            # A file of draws that is not there yet: its rows are known by their numbers alone.
            chunks.append(Chunk(path=str(run.draws), offset=position, first_line=position, num_rows=rows))
            position += rows
        position = max(position, first + count)
    return chunks
