"""Whole training runs on random weights of real shapes, beside what the estimate says of them.

The runs are the ones that `jobs.train` starts (`pipelines.fit`): engine, Ray Data, Ray Train, cache, checkpoint. Only
the target is made up: its vocabulary is on disk, the rest of its weights are drawn by the engine, and so are the rows.

L tokens of a row
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from domino_core.config import DrafterConfig
from domino_core.target import load_tokenizer, read_target_config
from domino_core.target_model import TargetConfig
from pipelines.bench_features import write_config
from pipelines.capture import CaptureConfig
from pipelines.estimate import DataSize, Estimate, estimate
from pipelines.fit import fit
from pipelines.memory_watch import MemoryWatch, memory_curve, memory_figures
from pipelines.prepare import DrafterShape, FitRequest, drafter_config
from pipelines.rates import Rates
from pipelines.regenerate import AnswerConfig
from pipelines.supply import WORTH_MENTIONING, Balance
from pipelines.train_config import TrainConfig
from pipelines.train_state import FEATURES_FOLDER, LIVE_FILE
from pipelines.training_work import num_parameters

PROMPT = 32  # tokens at the head of a row that are not supervised
MIN_STEPS, LOG_LINES = 8, 20
STREAM = "stream"
STATE_BYTES = 14  # of a parameter in a checkpoint: master, two moments, and the drafter in bfloat16


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """What is measured. train: of every arm, but for the number of workers and how the drafter lies on them."""

    root: str  # target, prompts and runs lie here
    tokenizer: str  # folder that one is taken from
    shape: DrafterShape
    target: TargetConfig
    capture: CaptureConfig
    train: TrainConfig
    row_tokens: int
    minutes: float  # of every arm, about, by the estimate
    rates: Rates

    @property
    def model(self) -> Path:
        return Path(self.root) / "target"

    @property
    def cache(self) -> Path:
        return Path(self.root) / STREAM / FEATURES_FOLDER

    def drafter(self) -> DrafterConfig:
        return drafter_config(self.shape, self.target, load_tokenizer(self.model))

    def predicted(self, train: TrainConfig, rows: int = 1000) -> Estimate:
        """The estimate of a run over so many rows, which are all alike."""
        blocks = float(rows * min(train.num_anchors, self.row_tokens - PROMPT - 1))
        data = DataSize(
            rows=rows,
            to_answer=0,
            unusable=0,
            tokens=float(rows * self.row_tokens),
            answer_tokens=0.0,
            longest=self.row_tokens,
            blocks=blocks,
            context=blocks * (PROMPT + self.row_tokens) / 2,
            sampled=rows,
        )
        return estimate(
            self.target, self.drafter(), data, self.capture, rates=self.rates, train=train, folder=self.root
        )

    def disk_bytes(self) -> float:
        """That the arms need at most: the stream's features, those on their way among them, and two checkpoints."""
        found = self.predicted(self.train)
        seconds = 60 * self.minutes
        features = seconds * min(found.trained_rows_per_s, found.extracted_rows_per_s) * self.row_tokens
        vocabulary = 4 * self.target.vocab_size * self.target.hidden_size
        return 1.3 * features * found.bytes_per_token + 2 * STATE_BYTES * num_parameters(self.drafter()) + vocabulary


def write_target(plan: PipelinePlan) -> None:
    """A model folder with a tokenizer, a vocabulary of random numbers and no layers."""
    write_config(plan.model, plan.target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(plan.tokenizer) / name, plan.model / name)
    generator = torch.Generator().manual_seed(0)
    names = ["model.embed_tokens.weight"] + ([] if plan.target.tie_word_embeddings else ["lm_head.weight"])
    size = plan.target.vocab_size, plan.target.hidden_size
    tensors = {name: (0.02 * torch.randn(*size, generator=generator)).bfloat16() for name in names}
    save_file(tensors, plan.model / "model.safetensors", metadata={"format": "pt"})


def write_prompts(plan: PipelinePlan, rows: int) -> Path:
    """Rows of random tokens, tokenised already: the tokenizer's words, whatever the target's vocabulary holds."""
    words = min(len(load_tokenizer(plan.model)), read_target_config(plan.model).vocab_size)
    generator, path = torch.Generator().manual_seed(1), Path(plan.root) / "prompts.jsonl"
    mask = [0] * PROMPT + [1] * (plan.row_tokens - PROMPT)
    with path.open("w") as file:
        for row in range(rows):
            ids_L = torch.randint(words, (plan.row_tokens,), generator=generator)
            file.write(json.dumps({"id": f"row-{row}", "input_ids": ids_L.tolist(), "loss_mask": mask}) + "\n")
    return path


def run_arm(
    plan: PipelinePlan, name: str, *, num_workers: int, shard: bool, steps: int | None = None
) -> dict[str, Any]:
    """One run and its figures. The stream leaves a cache, which the other arms read as often as they need.

    steps: None takes as many as fill `minutes` by the estimate.
    """
    train = replace(plan.train, num_workers=num_workers, shard=shard)
    predicted = plan.predicted(train)
    streamed, run_dir = name == STREAM, Path(plan.root) / name
    rate = predicted.trained_rows_per_s
    if streamed:
        rate = min(rate, predicted.extracted_rows_per_s)
    steps = steps or max(MIN_STEPS, round(60 * plan.minutes * rate / train.global_batch))
    train = replace(train, steps=steps, log_every=max(1, steps // LOG_LINES), checkpoint_every=steps)
    shutil.rmtree(run_dir, ignore_errors=True)  # the same name would go on where it ended
    request = FitRequest(
        target=str(plan.model),
        # More rows than the run takes: until its end the engine has something to do.
        data=str(write_prompts(plan, 2 * steps * train.global_batch + 2 * plan.capture.batch_size)) if streamed else "",
        root=plan.root,
        name=name,
        features="" if streamed else str(plan.cache),
        drafter=plan.shape,
        answer=AnswerConfig(),
        capture=plan.capture,
        train=train,
    )
    watch = MemoryWatch()
    watch.start()
    try:  # the watch asks a Ray that may be gone
        result = fit(request)
    finally:
        samples = watch.stop()
    ended = (run_dir / LIVE_FILE).stat().st_mtime  # written with the last log line, before the checkpoint
    for checkpoint in run_dir.glob("checkpoint_*/"):  # gigabytes each
        shutil.rmtree(checkpoint)
    return arm_figures(result.history, predicted, plan.row_tokens) | {
        "workers": num_workers,
        "shard": shard,
        "steps": steps,
        "memory": memory_figures(samples, ended - sum(line["window_s"] for line in steady(result.history)), ended),
        "memory_curve": memory_curve(samples, samples[0]["time"]),
        "history": result.history,
    }


def steady(history: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Log lines after the first quarter: engines start there, layers are compiled, and the pipeline fills."""
    return history[max(1, len(history) // 4) :] or history[-1:]


def arm_figures(history: Sequence[Mapping[str, float]], predicted: Estimate, row_tokens: int) -> dict[str, Any]:
    """Rates of the steady part: what came out, what each side does while it works, and the ratio to the estimate."""
    lines = steady(history)

    def total(name: str, by: str | None = None) -> float:
        return sum(line[name] * (line[by] if by else 1.0) for line in lines)

    seconds, waited = total("window_s"), total("data_wait_s")
    rows = total("samples_per_s", by="window_s")
    found: dict[str, Any] = {
        "seconds": seconds,
        "samples_per_s": rows / seconds,
        "tokens_per_s": total("tokens_per_s", by="window_s") / seconds,
        "trainer_waited_share": waited / seconds,
        "trained_samples_per_s": rows / max(seconds - waited, 1e-6),
    }
    if "peak_gb" in lines[-1]:
        found["peak_gb"] = lines[-1]["peak_gb"]
    expected = {"trained_samples_per_s": predicted.trained_rows_per_s, "samples_per_s": predicted.trained_rows_per_s}
    if "engine_work_s" in lines[-1]:
        worked, blocked = total("engine_work_s"), total("engine_blocked_s")
        offered = total("offered_tokens_per_s", by="window_s")
        balance = Balance.of(history)
        found |= {
            "offered_tokens_per_s": offered / seconds,
            "engine_blocked_share": blocked / max(worked + blocked, 1e-6),
            "advice": balance.advice(1, 1) if balance else None,
        }
        if worked and offered:  # it may have been ahead all the time, in a short run
            found["extracted_tokens_per_s"] = offered / worked
            expected["extracted_tokens_per_s"] = predicted.extracted_rows_per_s * row_tokens
        expected["samples_per_s"] = min(predicted.trained_rows_per_s, predicted.extracted_rows_per_s)
        waits = {"extraction": found["trainer_waited_share"], "training": found["engine_blocked_share"]}
        found["bound"] = max(waits, key=lambda side: waits[side]) if max(waits.values()) > WORTH_MENTIONING else None
    ratios = {name: found[name] / value for name, value in expected.items()}
    return found | {"estimate": expected | {"bound": predicted.bound, "step": asdict(predicted.step)}, "ratios": ratios}
