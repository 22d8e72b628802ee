"""A training run before it starts: what is asked for, what follows from the target, and everything that can be wrong.

Nothing here needs Ray, except for the look at the cluster; nothing is written.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from domino_core.checkpoint import provenance
from domino_core.config import DrafterConfig, default_target_layer_ids
from domino_core.features import check_fits
from domino_core.json_files import read_json
from domino_core.target import load_tokenizer, read_target_config, target_hash
from domino_core.target_model import TargetConfig
from domino_core.warm_start import check_warm_start
from pipelines.acceptance_probe import ProbePlan
from pipelines.batches import CachedFeatures
from pipelines.build_features import FeatureSource, feature_source
from pipelines.capture import CaptureConfig
from pipelines.evaluate import EvalConfig, held_out_prompts
from pipelines.prompt_files import prompt_chunks
from pipelines.regenerate import AnswerConfig
from pipelines.tracking import check_store, tracking_uri
from pipelines.train_config import TrainConfig
from pipelines.train_state import (
    EVENTS_FOLDER,
    FEATURES_FOLDER,
    LEDGER_FILE,
    RUN_FILE,
    SNAPSHOTS_FOLDER,
    changed,
)
from pipelines.train_worker import WorkerPlan

# May differ when a run goes on: they change how fast and safely it goes, or are held by total_steps and global_batch.
FREE_TO_CHANGE = {"steps", "epochs", "batch_size", "accumulation", "num_workers", "cpus_per_worker", "gpus_per_worker"}
FREE_TO_CHANGE |= {
    "shard",
    "use_gpu",
    "chunk_blocks",
    "compile",
    "checkpoint_every",
    "keep_checkpoints",
    "log_every",
    "max_nonfinite",
    "max_failures",
    "acceptance_every",
    "acceptance_prompts",
    "acceptance_gpus",
}


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """The drafter's own choices; the rest of its shape is the target's. The defaults are the published ones."""

    block_size: int = 16
    num_hidden_layers: int = 5
    num_taps: int | None = None  # tapped target layers; None: as many as the drafter has layers
    target_layer_ids: tuple[int, ...] | None = None  # None: the published formula for num_taps
    intermediate_size: int | None = None  # None: the target's, as for the three below
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    mask_token_id: int | None = None  # None: the tokenizer's <|mask|>, else the first id after its vocabulary
    head: bool = True  # False: a plain DFlash drafter
    emb_dim: int = 256  # low rank of the head
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 1
    shift_label: bool = True
    dtype: str = "bfloat16"  # of the exported checkpoint

    def layer_ids(self, target: TargetConfig) -> tuple[int, ...]:
        """The target's layers to tap, 0-based, ascending."""
        if self.target_layer_ids is not None:
            return self.target_layer_ids
        return default_target_layer_ids(target.num_hidden_layers, self.num_taps or self.num_hidden_layers)


def drafter_config(shape: DrafterShape, target: TargetConfig, tokenizer: Any) -> DrafterConfig:
    """The complete configuration of a drafter for a target. ValueError for sizes that cannot work."""
    mask = shape.mask_token_id
    if mask is None:
        mask = tokenizer.get_vocab().get("<|mask|>", len(tokenizer))
        if mask >= target.vocab_size:
            raise ValueError(
                f"the tokenizer uses all {target.vocab_size} embedding rows, so none is left for the mask token: "
                "name one that no text uses with drafter.mask_token_id="
            )
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size or target.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads or target.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads or target.num_key_value_heads,
        head_dim=shape.head_dim or target.head_dim,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=shape.layer_ids(target),
        mask_token_id=mask,
        block_size=shape.block_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        head=shape.head,
        emb_dim=shape.emb_dim,
        gru_hidden_dim=shape.gru_hidden_dim,
        pure_draft_prefix_len=shape.pure_draft_prefix_len,
        shift_label=shape.shift_label,
        dtype=shape.dtype,
    )


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """What to train. features: a folder of captured features to train from; "" captures those of `data` on the way."""

    target: str
    data: str
    num_rows: int | None = None  # the first rows of `data`; None: all
    root: str
    name: str
    tracking_uri: str | None = None
    features: str = ""
    eval_data: str = ""  # held-out prompts, of which train.acceptance_every measures τ
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    drafter: DrafterShape
    answer: AnswerConfig
    capture: CaptureConfig
    train: TrainConfig

    @property
    def run_dir(self) -> Path:
        return Path(self.root) / self.name


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that was checked: the workers' plan (without a run id yet) and the stream (None: from a cache)."""

    plan: WorkerPlan
    source: FeatureSource | None
    num_rows: int


def prepare(request: FitRequest) -> Prepared:
    """Check everything that needs no cluster. ValueError naming what is wrong and what to do."""
    target = read_target_config(request.target)
    tokenizer = load_tokenizer(request.target)
    config = drafter_config(request.drafter, target, tokenizer)
    config.check_fits(target)
    if request.train.warm_start_layers:
        check_warm_start(config, target, request.train.warm_start_layers)
    source = None
    if request.features:
        cache = CachedFeatures(request.features, batch_size=1, seed=0, epoch=0)
        meta, num_rows, data_hash = cache.meta, len(cache.sample_ids), cache_digest(cache)
        check_fits(meta, config, target_hash(request.target))
    else:
        source = feature_source(
            data=request.data,
            num_rows=request.num_rows,
            target=request.target,
            layer_ids=config.target_layer_ids,
            answer=request.answer,
            capture=request.capture,
            events=request.run_dir / EVENTS_FOLDER,
            cache=request.run_dir / FEATURES_FOLDER,
            ledger=request.run_dir / LEDGER_FILE,
        )
        meta, data_hash = source.meta, file_digest(request.data)
        num_rows = sum(chunk.num_rows for chunk in prompt_chunks(request.data, num_rows=request.num_rows))
        data_hash += f"[:{num_rows}]" if request.num_rows is not None else ""
    least = request.train.batch_size * request.train.num_workers
    if num_rows < least:
        raise ValueError(
            f"{request.features or request.data} has {num_rows} rows, fewer than one batch for every worker "
            f"(train.batch_size {request.train.batch_size} x train.num_workers {request.train.num_workers})"
        )
    total_steps = request.train.total_steps(num_rows)
    uri = tracking_uri(request.tracking_uri, request.root)
    check_store(uri)
    curve = {key: value for key, value in asdict(request.train).items() if key not in FREE_TO_CHANGE}
    started_with = json.loads(
        json.dumps(
            {"target_hash": meta.target_hash, "data_hash": data_hash, "total_steps": total_steps}
            | {"global_batch": request.train.global_batch}
            | {f"drafter.{key}": value for key, value in asdict(config).items()}
            | {f"train.{key}": value for key, value in curve.items()}
        )
    )
    plan = WorkerPlan(
        probe=probe_plan(request, tokenizer),
        target=request.target,
        drafter=config,
        train=request.train,
        total_steps=total_steps,
        run_dir=str(request.run_dir),
        features=request.features or str(request.run_dir / FEATURES_FOLDER),
        stream_first_epoch=not request.features,
        tracking_uri=uri,
        run_id="",
        started_with=started_with,
        provenance=provenance(
            target=request.target,
            target_hash=meta.target_hash,
            tokenizer_hash=meta.tokenizer_hash,
            data=request.features or request.data,
            data_hash=data_hash,
            config={name: asdict(getattr(request, name)) for name in ("drafter", "answer", "capture", "train")},
        ),
    )
    run_file = request.run_dir / RUN_FILE
    if run_file.exists() and (differences := changed(read_json(run_file)["started_with"], started_with)):
        raise ValueError(
            f"run {request.name} was started with other settings ({'; '.join(differences)}): "
            f"give this one another name=, or remove {request.run_dir}"
        )
    return Prepared(plan=plan, source=source, num_rows=num_rows)


def probe_plan(request: FitRequest, tokenizer: Any) -> ProbePlan | None:
    """How acceptance is measured while training, if it is. ValueError: there are no prompts to measure it with."""
    train = request.train
    if train.acceptance_every is None:
        return None
    if not request.eval_data:
        raise ValueError("train.acceptance_every measures on held-out prompts: give them by eval_data=")
    evaluate = replace(request.evaluate, num_prompts=train.acceptance_prompts)
    held_out_prompts(request.eval_data, tokenizer, evaluate)
    return ProbePlan(
        target=request.target,
        eval_data=request.eval_data,
        evaluate=evaluate,
        folder=str((request.run_dir / SNAPSHOTS_FOLDER).resolve()),
        every=train.acceptance_every,
        gpus=train.acceptance_gpus,
    )


def check_cluster(request: FitRequest, patience: float = 30.0) -> None:
    """ValueError if the connected cluster has not enough free CPUs and GPUs: the run would wait for them for ever.

    patience: seconds for whatever ended just now to give back what it held.
    """
    import ray

    train, capture = request.train, request.capture
    cpus = train.num_workers * train.cpus_per_worker
    gpus = train.num_workers * train.gpus_per_worker if train.use_gpu else 0.0
    parts = f"{train.num_workers} train workers x {train.cpus_per_worker:g} CPUs"
    if not request.features:
        # Reading, cutting and writing need one CPU beside workers and engines, or nothing ever arrives.
        cpus += capture.num_actors * capture.cpus_per_actor + 1
        gpus += capture.num_actors * capture.gpus_per_actor * capture.tensor_parallel_size
        parts += f", {capture.num_actors} capture engines x {capture.cpus_per_actor:g}, 1 for reading"
    if train.acceptance_every is not None:
        cpus, gpus = cpus + 1, gpus + train.acceptance_gpus
        parts += ", 1 for train.acceptance_every"

    def suffices(resources: Mapping[str, float]) -> bool:
        return resources.get("CPU", 0) >= cpus and resources.get("GPU", 0) >= gpus

    until = time.monotonic() + patience
    free = ray.available_resources()
    while not suffices(free) and suffices(ray.cluster_resources()) and time.monotonic() < until:
        time.sleep(0.5)
        free = ray.available_resources()
    if not suffices(free):
        raise ValueError(
            f"training needs {cpus:g} CPUs and {gpus:g} GPUs ({parts}), the cluster has {free.get('CPU', 0):g} CPUs "
            f"and {free.get('GPU', 0):g} GPUs free: start Ray with more (logical) CPUs, use fewer train.num_workers "
            "or less train.cpus_per_worker, or RAY_ADDRESS=local for a Ray of its own; training from captured features "
            "(features=) needs no capture engine"
        )


def cache_digest(cache: CachedFeatures) -> str:
    """16 hex digits over what a cache holds: target, layers, tokenizer and the ids of its rows."""
    described = json.dumps([cache.meta.to_dict(), sorted(cache.sample_ids)])
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def file_digest(path: str | Path) -> str:
    """16 hex digits of the sha256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
