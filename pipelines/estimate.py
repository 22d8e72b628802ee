"""What a drafter will cost, before anything runs: bytes, gigabytes a second, hours and disk, for a target and its data.

Needs the target's config.json and tokenizer, not its weights. Rates are measured ones scaled by arithmetic; every
default says where it comes from, and each can be replaced by a measurement of one's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

from domino_core import features
from domino_core.config import DrafterConfig
from domino_core.target_model import TargetConfig
from pipelines.bench_shapes import pass_weights
from pipelines.capture import CaptureConfig
from pipelines.prompts import UnusableRow, prepare_row
from pipelines.rates import Rates, StepTime, prefill_operations, step_time
from pipelines.regenerate import AnswerConfig
from pipelines.supply import Balance
from pipelines.train_config import TrainConfig

ROW_BYTES = 1_100  # of Parquet around a row: page headers, and in the footer the columns of its row group (measured)


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """A prompt file in tokens, after cuts. `answer_tokens`: assumed, of rows that the target still has to answer."""

    rows: int
    to_answer: int
    unusable: int
    tokens: float
    answer_tokens: float
    longest: int
    blocks: float  # that an epoch draws: train.num_anchors a row, or fewer where a row has no more places for them
    context: float  # tokens before the anchors, summed over the blocks
    sampled: int  # rows that were tokenised; the rest is assumed to be like them

    @property
    def usable(self) -> int:
        return max(1, self.rows - self.unusable)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes and seconds of one pass over the data, and of training."""

    bytes_per_token: int
    feature_bytes: float
    free_bytes: int
    answer_seconds: float
    capture_seconds: float
    train_seconds: float
    step: StepTime
    extracted_rows_per_s: float  # by all engines, answers included
    trained_rows_per_s: float  # by all workers
    bound: Literal["extraction", "training"]  # the slower side of an epoch that is streamed
    stream_seconds: float  # of that epoch
    capture_gb_per_s: float  # produced while engines do nothing but capture
    train_gb_per_s: float  # consumed by all training workers together
    balance: Balance
    advice: str  # which side to scale


def measure_data(
    rows: Iterable[dict[str, Any]],
    total_rows: int,
    tokenizer: Any,
    answer: AnswerConfig,
    capture: CaptureConfig,
    *,
    mean_answer: float,
    num_anchors: int,
    sample: int = 20_000,
) -> DataSize:
    """Tokenise up to `sample` rows and scale up to `total_rows`. mean_answer: tokens assumed for an answer to come."""
    counted = to_answer = unusable = longest = 0
    tokens = answers = blocks = context = 0.0
    for row in islice(rows, sample):
        counted += 1
        found = prepare_row(row, tokenizer, answer, capture)
        if isinstance(found, UnusableRow):
            unusable += 1
            continue
        length = float(len(found.input_ids))
        if found.needs_answer:
            to_answer += 1
            expected = min(mean_answer, answer.max_tokens, capture.max_length - length)
            answers += expected
            places, mean_place = max(0.0, expected - 1), length + expected / 2
            length += expected
        else:
            anchors = [place for place, pair in enumerate(pairwise(found.loss_mask)) if all(pair)]
            places, mean_place = len(anchors), sum(anchors) / max(1, len(anchors))
        tokens += length
        blocks += min(num_anchors, places)
        context += min(num_anchors, places) * mean_place
        longest = max(longest, int(length))
    assert counted, "prompt_chunks refuses an empty file"
    scale = total_rows / counted
    return DataSize(
        rows=total_rows,
        to_answer=round(to_answer * scale),
        unusable=round(unusable * scale),
        tokens=tokens * scale,
        answer_tokens=answers * scale,
        longest=longest,
        blocks=blocks * scale,
        context=context * scale,
        sampled=counted,
    )


def estimate(
    target: TargetConfig,
    drafter: DrafterConfig,
    data: DataSize,
    capture: CaptureConfig,
    *,
    rates: Rates,
    train: TrainConfig,
    folder: str | Path,
) -> Estimate:
    """Put sizes and rates together. `folder`: where features would be written; its nearest existing parent counts."""
    bytes_per_token = features.bytes_per_token(
        len(drafter.target_layer_ids), drafter.hidden_size, capture.features_dtype
    )
    usable, length = data.usable, data.tokens / data.usable
    engines = capture.num_actors * max(1, capture.tensor_parallel_size)
    weights = (2 if capture.gpus_per_actor else 4) * pass_weights(target)
    in_flight = min(capture.max_num_seqs, capture.batch_size)
    decode_step = rates.decode_seconds_per_byte * weights + rates.decode_seconds_per_row * in_flight
    capture_rate = engines * rates.prefill_flops / prefill_operations(target, length)
    answer_seconds = data.answer_tokens / in_flight * decode_step / engines
    engine_seconds = answer_seconds + data.tokens / capture_rate
    blocks, context = data.blocks / usable, data.context / usable
    step = step_time(drafter, train, rates, tokens=length, blocks=blocks, context=context, token_bytes=bytes_per_token)
    trained_rate = train.global_batch / step.total
    epoch_seconds = usable / trained_rate
    balance = Balance.between(engine_seconds, epoch_seconds)
    existing = next(path for path in [Path(folder).resolve(), *Path(folder).resolve().parents] if path.exists())
    return Estimate(
        bytes_per_token=bytes_per_token,
        feature_bytes=data.tokens * (bytes_per_token + 5) + usable * ROW_BYTES,
        free_bytes=shutil.disk_usage(existing).free,
        answer_seconds=answer_seconds,
        capture_seconds=data.tokens / capture_rate,
        train_seconds=train.total_steps(usable) * step.total,
        step=step,
        extracted_rows_per_s=usable / max(engine_seconds, 1e-9),
        trained_rows_per_s=trained_rate,
        bound="extraction" if engine_seconds > epoch_seconds else "training",
        stream_seconds=max(engine_seconds, epoch_seconds),
        capture_gb_per_s=capture_rate * bytes_per_token / 1e9,
        train_gb_per_s=trained_rate * length * bytes_per_token / 1e9,
        balance=balance,
        advice=balance.advice(capture.num_actors, train.num_workers),
    )


def describe_estimate(found: Estimate, data: DataSize) -> str:
    """The estimate for people."""
    scaled = "" if data.sampled == data.rows else f" (from the first {data.sampled:,})"
    disk = "fits" if found.feature_bytes < found.free_bytes else "DOES NOT FIT"
    answers = (
        f"{data.to_answer:,} rows to answer, {data.answer_tokens / max(1, data.to_answer):,.0f} tokens each assumed"
    )
    lines = [
        f"rows        {data.rows:,}{scaled}, {data.unusable:,} unusable, longest {data.longest:,} tokens; {answers}",
        f"tokens      {data.tokens:,.0f}",
        f"features    {found.bytes_per_token:,} bytes a token, {human_bytes(found.feature_bytes)} in all",
        f"disk        {human_bytes(found.free_bytes)} free: a cache {disk} (streaming one epoch needs none)",
        f"answering   {human_time(found.answer_seconds)}",
        f"capturing   {human_time(found.capture_seconds)} a pass, {found.capture_gb_per_s:.3g} GB/s produced",
        f"training    {human_time(found.train_seconds)}, {found.train_gb_per_s:.3g} GB/s consumed; a step "
        f"{found.step.total:.3g} s, of which between workers {found.step.exchange:.2g} s",
        f"streaming   {found.bound} is the slower side: {found.extracted_rows_per_s:.3g} rows/s extracted, "
        f"{found.trained_rows_per_s:.3g} trained, an epoch in {human_time(found.stream_seconds)}",
        f"balance     {found.advice}",
    ]
    return "\n".join(lines)


def human_bytes(count: float) -> str:
    """1234567 → "1.2 MB", in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} PB"


def human_time(seconds: float) -> str:
    """Seconds as s, min or h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
