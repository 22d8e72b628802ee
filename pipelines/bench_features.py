"""What becomes of an engine's tokens on their way to a training worker, on random weights of real shapes.

Three arms on the same rows: the stock engine, which throws its states away; our engine, whose states reach memory; and
the stream of a training run, through Ray Data to tensors on the worker's device. The last two share one engine start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from domino_core import features
from domino_core.features import FeatureMeta
from domino_core.target_model import TargetConfig
from pipelines.build_features import FeatureActor, FeatureSource, captured, slices
from pipelines.capture import CaptureConfig, TargetActor, placement
from pipelines.capture_stream import EngineClock
from pipelines.memory_watch import MemoryWatch, memory_figures
from pipelines.regenerate import AnswerConfig
from pipelines.supply import SupplyFile, read_supply

WARM_ROWS = 48
MIN_ROWS = 32  # that a rate is taken from
CONSUMER_GPUS = 0.2  # of the card that it shares with the engine
ALONE_FILE, CALLS_FOLDER = "alone.json", "calls"


@dataclass(frozen=True, kw_only=True)
class FeaturePlan:
    """What is measured. `folder`: config.json of the target; `scratch`: where workers leave figures."""

    folder: str
    layer_ids: tuple[int, ...]
    target: TargetConfig
    capture: CaptureConfig
    row_tokens: int
    seconds: float  # of every arm, about
    train_batch: int  # rows of a batch of the training worker
    scratch: str

    @property
    def source(self) -> FeatureSource:
        """A stream without a prompt file: its rows are made where they are needed."""
        meta = FeatureMeta(
            target=self.folder,
            target_hash="random",
            layer_ids=self.layer_ids,
            hidden_size=self.target.hidden_size,
            tokenizer_hash="none",
            dtype=self.capture.features_dtype,
        )
        events = str(Path(self.scratch) / "events")
        return FeatureSource(data="", meta=meta, answer=AnswerConfig(), capture=self.capture, events=events)

    @property
    def row_bytes(self) -> int:
        return self.row_tokens * self.source.meta.bytes_per_token

    def rows_for(self, tokens_per_s: float) -> int:
        """Rows that keep an engine of this speed busy for `seconds`."""
        return max(MIN_ROWS, round(tokens_per_s * self.seconds / self.row_tokens))


def write_config(folder: Path, target: TargetConfig) -> None:
    """A model folder without weights."""
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    values = {name: getattr(target, name) for name in kept}
    values |= {"architectures": [target.architecture], "model_type": "qwen3", "hidden_act": "silu"}
    values |= {"attention_bias": False, "dtype": "bfloat16"}
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": target.rope_theta}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))


def random_rows(plan: FeaturePlan, first: int, count: int) -> list[list[int]]:
    """Rows `first` to `first + count` of an endless sequence of random tokens."""
    generator = torch.Generator().manual_seed(first)
    return torch.randint(0, plan.target.vocab_size, (count, plan.row_tokens), generator=generator).tolist()


def timed(work: Callable[[], Any]) -> float:
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def engine_arm(plan: FeaturePlan) -> dict[str, float]:
    """The stock engine alone: prefills of one token, nothing extracted, scheduled as vLLM does it by itself."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    started, config = time.perf_counter(), plan.capture
    llm = vllm.LLM(
        model=plan.folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_length + 1,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enforce_eager=config.enforce_eager,
        enable_prefix_caching=False,
        **placement(config),
    )
    parameters = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def prefill(rows: Sequence[list[int]]) -> None:
        requests: list[Any] = [{"prompt_token_ids": row} for row in rows]
        llm.generate(requests, parameters, use_tqdm=False)

    ready = time.perf_counter() - started
    return {"start_seconds": ready} | _measure(plan, prefill)


def _measure(plan: FeaturePlan, work: Callable[[Sequence[list[int]]], None]) -> dict[str, float]:
    """tokens/s of `work` on rows for about plan.seconds, after a warm-up that tells how many those are."""
    warm = random_rows(plan, 0, WARM_ROWS)
    work(warm[: WARM_ROWS // 2])
    rate = WARM_ROWS * plan.row_tokens / timed(lambda: work(warm))
    rows = random_rows(plan, 1, plan.rows_for(rate))
    seconds = timed(lambda: work(rows))
    return {"rows": len(rows), "seconds": seconds, "tokens_per_s": len(rows) * plan.row_tokens / seconds}


class BenchActor(FeatureActor):
    """The actor of the stream on random weights. Before its first rows it measures itself without Ray Data."""

    def __init__(self, source: FeatureSource, plan: FeaturePlan) -> None:
        started = time.perf_counter()
        self.source, self.seed, self.plan = source, None, plan
        self.target = TargetActor(source.meta.target, source.meta.layer_ids, source.capture)
        self.supply = SupplyFile(source.events)
        ready = time.perf_counter() - started
        found = {"capture": {"start_seconds": ready} | _measure(plan, self._capture), "alone": self._alone()}
        found["clock"] = asdict(self.target.clock)
        (Path(plan.scratch) / ALONE_FILE).write_text(json.dumps(found))

    def _parts(self, rows: Sequence[list[int]]) -> list[list[list[int]]]:
        size = self.source.capture.slice_bytes // self.source.meta.bytes_per_token
        return [[row["input_ids"] for row in part] for part in slices(({"input_ids": row} for row in rows), size)]

    def _capture(self, rows: Sequence[list[int]]) -> None:
        """Until the states are in memory; there they are dropped."""
        for done in self.target.stream(self._parts(rows), getattr(torch, self.source.meta.dtype)):
            assert all(done.wait())

    def _alone(self) -> dict[str, float]:
        """Seconds per GB of steps that have the machine for themselves, the best of three."""
        import ray

        part = self._parts(random_rows(self.plan, 0, WARM_ROWS))[0]
        (done,) = self.target.stream([part], getattr(torch, self.source.meta.dtype))
        done.wait()
        rows = [{"sample_id": str(i), "input_ids": row, "loss_mask": [1] * len(row)} for i, row in enumerate(part)]
        tables: list[pa.Table] = []
        references: list[Any] = []

        def to_arrow() -> None:
            tables.append(features.packed_table(self.source.meta, rows, done.values_TLD, done.scales_TL))

        steps = {
            "to_arrow": to_arrow,
            "put": lambda: references.append(ray.put(tables[0])),
            "get": lambda: ray.get(references[-1]),
        }
        size = done.values_TLD.nbytes / 1e9
        return {name: min(timed(step) for _ in range(3)) / size for name, step in steps.items()}

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        times = {"began": time.time(), "taken": 0.0, "capturing": 0.0}
        since = time.perf_counter()
        for table in super().__call__(batch):
            times["capturing"] += time.perf_counter() - since
            since = time.perf_counter()
            yield table
            del table
            times["taken"] += time.perf_counter() - since
            since = time.perf_counter()
        times["capturing"] += time.perf_counter() - since
        path = Path(self.plan.scratch) / CALLS_FOLDER / f"{time.monotonic_ns()}.json"
        path.write_text(json.dumps(times | {"ended": time.time()}))


def make_rows(batch: pa.Table, plan: FeaturePlan) -> pa.Table:
    """In place of reading and tokenising a chunk of a prompt file."""
    made: list[dict[str, Any]] = []
    for item in batch.to_pylist():
        rows = random_rows(plan, item["first"], item["count"])
        mask = [0] * (plan.row_tokens // 2) + [1] * (plan.row_tokens - plan.row_tokens // 2)
        ids = [f"row-{item['first'] + number}" for number in range(len(rows))]
        made += [
            {"sample_id": name, "input_ids": row, "loss_mask": mask, "needs_answer": False}
            for name, row in zip(ids, rows, strict=True)
        ]
    return pa.Table.from_pylist(made)


def consume(plan: FeaturePlan, shard: Any) -> dict[str, Any]:
    """What a training worker does with its shard, without the training: each batch ends as a tensor on its device."""
    from ray.data.collate_fn import ArrowBatchCollateFn

    from pipelines.batches import Batch, stream_collate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inner = stream_collate(pin_memory=device.type == "cuda")
    collated: list[float] = []

    class Timed(ArrowBatchCollateFn):
        def __call__(self, batch: pa.Table) -> Batch:
            since = time.perf_counter()
            found = inner(batch)
            collated.append(time.perf_counter() - since)
            return found

    marks: list[tuple[float, int, int]] = []  # when a batch was on the device, its tokens, its bytes
    copying = 0.0
    batches = shard.iter_torch_batches(batch_size=plan.train_batch, collate_fn=Timed(), prefetch_batches=2)
    for batch in batches:
        since = time.perf_counter()
        batch.features_on(device, torch.bfloat16)
        if device.type == "cuda":
            torch.cuda.synchronize()
        copying += time.perf_counter() - since
        size = batch.features_TC.nbytes + (0 if batch.scales_TL is None else batch.scales_TL.nbytes)
        marks.append((time.time(), batch.input_ids_T.numel(), size))
    return {"marks": marks, "collate": sum(collated), "copy": copying}


def stream_arm(plan: FeaturePlan, tokens_per_s: float) -> dict[str, Any]:
    """Our engine, alone and at the head of a stream: figures of both, by stage, and of memory."""
    import ray

    (Path(plan.scratch) / CALLS_FOLDER).mkdir(parents=True)
    count, size = plan.rows_for(tokens_per_s), plan.capture.batch_size
    chunks = [{"first": first, "count": min(size, count - first)} for first in range(0, count, size)]
    rows = ray.data.from_items(chunks, override_num_blocks=len(chunks))
    rows.context.enable_progress_bars = False
    rows = rows.map_batches(partial(make_rows, plan=plan), batch_size=None, batch_format="pyarrow")
    stream = captured(rows, BenchActor, plan.source, preserve_order=False, rows_per_call=size, plan=plan)
    (shard,) = stream.streaming_split(1, equal=True)  # as Ray Train does it
    watch = MemoryWatch()
    watch.start()
    try:  # the watch asks a Ray that may be gone
        gpus = CONSUMER_GPUS if plan.capture.gpus_per_actor else 0
        found = ray.get(ray.remote(num_cpus=1, num_gpus=gpus)(consume).remote(plan, shard))
    finally:
        samples = watch.stop()
    alone = json.loads((Path(plan.scratch) / ALONE_FILE).read_text())
    calls = [json.loads(path.read_text()) for path in (Path(plan.scratch) / CALLS_FOLDER).glob("*.json")]
    now = read_supply(plan.source.events)
    clock = {name: value - alone["clock"][name] for name, value in asdict(now).items()}
    figures = stream_figures(found, calls, EngineClock(**clock))
    marks = found["marks"]
    return alone | {"stream": figures, "memory": memory_figures(samples, marks[0][0], marks[-1][0])}


def stream_figures(found: dict[str, Any], calls: list[dict[str, float]], clock: EngineClock) -> dict[str, Any]:
    """Rates from the first call of the actor to the last batch, and what each stage did in that time.

    The steady rate is of the batches from the end of the first tenth, until which the pipeline fills, to the end of
    the last call, after which it empties.
    """
    marks, began = found["marks"], min(call["began"] for call in calls)
    seconds = marks[-1][0] - began
    total = sum(mark[2] for mark in marks) / 1e9
    last_end = max(call["ended"] for call in calls)
    steady = [mark for mark in marks[len(marks) // 10 :] if mark[0] <= last_end] or marks[-2:]
    busy = {
        "engine": clock.working,
        "engine_blocked": clock.blocked,
        "taken": sum(call["taken"] for call in calls),
        "collate": found["collate"],
        "copy": found["copy"],
    }
    return {
        "rows": clock.rows,
        "batches": len(marks),
        "seconds": seconds,
        "seconds_to_first_batch": marks[0][0] - began,
        "tokens_per_s": sum(mark[1] for mark in marks) / seconds,
        "steady_tokens_per_s": sum(mark[1] for mark in steady[1:]) / max(steady[-1][0] - steady[0][0], 1e-9),
        "gb_per_s": total / seconds,
        "busy_seconds": busy,
        "busy_seconds_per_gb": {name: value / total for name, value in busy.items()},
        "busy_share": {name: value / seconds for name, value in busy.items()},
    }
