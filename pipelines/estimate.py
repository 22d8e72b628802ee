"""What a drafter will cost, before anything runs: bytes, gigabytes a second, hours and disk, for a target and its data.

Needs the target's config.json and tokenizer, not its weights. Rates are measured ones scaled by arithmetic; every
default says where it comes from, and each can be replaced by a measurement of one's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from domino_core import features
from domino_core.config import DrafterConfig
from domino_core.target_model import TargetConfig
from pipelines.capture import CaptureConfig
from pipelines.prompts import UnusableRow, prepare_row
from pipelines.regenerate import AnswerConfig
from pipelines.supply import Balance
from pipelines.train_loop import TrainConfig

ROW_BYTES = 1_100  # of Parquet around a row: page headers, and in the footer the columns of its row group (measured)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device does in a second."""

    prefill_flops: float
    train_flops: float
    step_seconds_per_byte: float  # of weights, of one decoding step
    step_seconds_per_row: float  # added to the step by every sequence in flight
    source: str


# Prefill and decoding: vLLM 0.26.0, Qwen3-8B shapes, bfloat16, an H100 80GB: 41,100 tokens/s with five layers captured,
# and 6.80 ms a step for 1 sequence, 7.83 ms for 32, over 15.1 GB of weights (beyond 32 a straight line through these).
# Training: 45 TFLOP a row at 44 % of the peak of an H200 (SpecForge, published benchmark for this drafter).
GPU_RATES = Rates(
    prefill_flops=571e12,
    train_flops=435e12,
    step_seconds_per_byte=6.77e-3 / 15.1e9,
    step_seconds_per_row=0.033e-3,
    source="measured on one H100 (vLLM 0.26.0); training as published for H200",
)
# assets/tiny-qwen3 in float32 on one busy core of a 2.5 GHz Xeon with AVX-512: 5,700 tokens/s captured, 1,000 tokens/s
# answered by 128 sequences at a time.
CPU_RATES = Rates(
    prefill_flops=50e9,
    train_flops=30e9,
    step_seconds_per_byte=0.0,
    step_seconds_per_row=1.0e-3,
    source="measured with the embedded target on one core of a 2.5 GHz Xeon",
)


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """A prompt file in tokens, after cuts. `answer_tokens`: assumed, of rows that the target still has to answer."""

    rows: int
    to_answer: int
    unusable: int
    tokens: float
    answer_tokens: float
    longest: int
    sampled: int  # rows that were tokenised; the rest is assumed to be like them


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes and seconds of one pass over the data, and of training."""

    bytes_per_token: int
    feature_bytes: float
    free_bytes: int
    answer_seconds: float
    capture_seconds: float
    train_seconds: float
    capture_gb_per_s: float  # produced while engines do nothing but capture
    train_gb_per_s: float  # consumed by all training workers together
    balance: Balance  # of an epoch that is streamed
    advice: str  # which side to scale for it


def measure_data(
    rows: Iterable[dict[str, Any]],
    total_rows: int,
    tokenizer: Any,
    answer: AnswerConfig,
    capture: CaptureConfig,
    *,
    mean_answer: float,
    sample: int = 20_000,
) -> DataSize:
    """Tokenise up to `sample` rows and scale up to `total_rows`. mean_answer: tokens assumed for an answer to come."""
    counted = to_answer = unusable = longest = 0
    tokens = answers = 0.0
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
            length += expected
        tokens += length
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
        sampled=counted,
    )


def target_flops_per_token(target: TargetConfig) -> float:
    """Of one forward pass without the output matrix, which a prefill applies to one token of a sequence only."""
    return 2.0 * target.num_hidden_layers * layer_weights(target)


def layer_weights(target: TargetConfig) -> float:
    """Weights of one decoder layer of the target, or of a drafter of the same width."""
    heads = target.num_attention_heads + target.num_key_value_heads
    return target.hidden_size * (2 * heads * target.head_dim + 3 * target.intermediate_size)


def train_flops_per_row(target: TargetConfig, drafter: DrafterConfig, tokens: float, num_anchors: int) -> float:
    """Forward and backward of one row: backbone three times its forward, logits four times (they are recomputed).

    Reproduces the published 45 TFLOP of Qwen3-8B with 256 anchors and blocks of 16.
    """
    slots = num_anchors * drafter.block_size
    backbone = slots * drafter.num_hidden_layers * layer_weights(target)
    context = tokens * target.hidden_size * drafter.feature_width
    width = target.hidden_size + (drafter.emb_dim if drafter.head else 0)
    return 2.0 * (3 * (backbone + context) + 4 * slots * target.vocab_size * width)


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
    epochs, num_anchors, num_workers = train.epochs, train.num_anchors, train.num_workers
    bytes_per_token = features.bytes_per_token(
        len(drafter.target_layer_ids), drafter.hidden_size, capture.features_dtype
    )
    usable = max(1, data.rows - data.unusable)
    engines = capture.num_actors * max(1, capture.tensor_parallel_size)
    flops = target_flops_per_token(target)
    itemsize = 2 if capture.gpus_per_actor else 4
    weights = itemsize * (flops / 2 + target.vocab_size * target.hidden_size)
    in_flight = min(capture.max_num_seqs, capture.batch_size)
    step = rates.step_seconds_per_byte * weights + rates.step_seconds_per_row * in_flight
    row_seconds = train_flops_per_row(target, drafter, data.tokens / usable, num_anchors) / rates.train_flops
    train_seconds = epochs * usable * row_seconds / num_workers
    capture_rate = engines * rates.prefill_flops / flops
    answer_seconds = data.answer_tokens / in_flight * step / engines
    balance = Balance.between(answer_seconds + data.tokens / capture_rate, train_seconds / epochs)
    existing = next(path for path in [Path(folder).resolve(), *Path(folder).resolve().parents] if path.exists())
    return Estimate(
        bytes_per_token=bytes_per_token,
        feature_bytes=data.tokens * (bytes_per_token + 5) + usable * ROW_BYTES,
        free_bytes=shutil.disk_usage(existing).free,
        answer_seconds=answer_seconds,
        capture_seconds=data.tokens / capture_rate,
        train_seconds=train_seconds,
        capture_gb_per_s=capture_rate * bytes_per_token / 1e9,
        train_gb_per_s=epochs * data.tokens * bytes_per_token / train_seconds / 1e9,
        balance=balance,
        advice=balance.advice(capture.num_actors, num_workers),
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
        f"training    {human_time(found.train_seconds)}, {found.train_gb_per_s:.3g} GB/s consumed",
        f"streaming   {found.advice}",
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
