"""JobConfig, the one configuration of every job, and its presets as functions.

Each section is the dataclass of the module that reads it; a preset names only what differs from those defaults.
"""

import os
import re
from dataclasses import dataclass, field, replace

from pipelines.capture import CaptureConfig
from pipelines.evaluate import EvalConfig
from pipelines.gate import GateConfig
from pipelines.prepare import DrafterShape
from pipelines.regenerate import AnswerConfig
from pipelines.registry import target_slug
from pipelines.self_prompts import SelfPromptConfig
from pipelines.train_config import TrainConfig
from pipelines.verify_models import VerifyConfig
from serve.config import ServeConfig
from serve.verdict import CanaryConfig


def default_root() -> str:
    """Where runs, the tracking database and artifacts go: $DOMINO_HOME, or ./runs."""
    return os.environ.get("DOMINO_HOME") or "runs"


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What to work on and how."""

    target: str = ""  # model id or local folder
    data: str = ""  # prompt file: .jsonl, .json or .parquet
    num_rows: int | None = None  # the first rows of data; None: all
    features: str = ""  # captured features to train from (jobs.features); "": captured while training
    eval_data: str = ""  # prompt file, held out
    root: str = field(default_factory=default_root)
    tracking_uri: str | None = None  # None: $MLFLOW_TRACKING_URI, then SQLite below root
    name: str = ""  # of the run; "" derives it from target and drafter (run_name)

    drafter: DrafterShape = field(default_factory=DrafterShape)
    self_prompts: SelfPromptConfig = field(default_factory=SelfPromptConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)

    def __post_init__(self) -> None:
        if not self.root:
            raise ValueError("root= is empty: give the folder where runs go")
        if self.name and not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(f"name={self.name}: it names a folder below root; use letters, digits, dots and dashes")

    @property
    def run_name(self) -> str:
        """`name`, or for example qwen3-8b-domino-b16. The same name again resumes the run."""
        if self.name:
            return self.name
        kind = "domino" if self.drafter.head else "dflash"
        return f"{target_slug(self.target)}-{kind}-b{self.drafter.block_size}"


def tiny() -> JobConfig:
    """The embedded target on two CPU cores, offline: minutes.

    A few hundred steps are all there is, so the draft layers start as layers of the target, and blocks are short: what
    a drafter has not learnt to predict it need not draft.
    """
    return JobConfig(
        target="assets/tiny-qwen3",
        data="assets/tiny-qwen3/prompts/train.jsonl",
        eval_data="assets/tiny-qwen3/prompts/heldout.jsonl",
        drafter=DrafterShape(
            block_size=4, num_hidden_layers=3, target_layer_ids=(4, 8, 12), emb_dim=64, gru_hidden_dim=96
        ),
        self_prompts=SelfPromptConfig(max_tokens=192),
        answer=AnswerConfig(max_tokens=128, temperature=0.0),
        capture=CaptureConfig(max_length=512, batch_size=128),
        train=TrainConfig(
            epochs=4,
            batch_size=8,
            num_anchors=56,
            learning_rate=3e-3,
            warm_start_layers=(0, 1, 13),
            precision="float32",
            chunk_blocks=512,
            checkpoint_every=200,
            num_workers=2,
            use_gpu=False,
        ),
        evaluate=EvalConfig(num_prompts=32, max_tokens=128, num_threads=1, device="cpu", dtype="float32"),
        gate=GateConfig(min_tau=1.2, min_speedup=0.0),
    )


def tiny_gpu() -> JobConfig:
    """The embedded target on one GPU, which capture engine and training share: more prompts, more steps.

    The prompts are made first: python -m jobs.tiny_target --prompts 12000 --out runs/prompts.jsonl
    """
    job = tiny()
    return replace(
        job,
        data="runs/prompts.jsonl",
        drafter=replace(job.drafter, block_size=8, emb_dim=128, gru_hidden_dim=256),
        capture=replace(job.capture, batch_size=1024, max_num_seqs=512, gpus_per_actor=0.4, gpu_memory_utilization=0.4),
        train=replace(
            job.train,
            batch_size=32,
            num_anchors=64,
            learning_rate=2e-3,
            num_workers=1,
            use_gpu=True,
            gpus_per_worker=0.5,
        ),
        # float32, in which identity is exact; the figures of real targets are bfloat16's.
        evaluate=replace(job.evaluate, device="cuda", num_prompts=24),
        serve=replace(job.serve, gpus_per_replica=0.5, dtype="float32"),
    )


def qwen3_8b() -> JobConfig:
    """The published recipe for Qwen3-8B, blocks of 16, on one machine with 8 GPUs: one captures, seven train."""
    return JobConfig(
        drafter=DrafterShape(block_size=16, num_hidden_layers=5, mask_token_id=151669),
        capture=CaptureConfig(max_length=3072, gpus_per_actor=1),
        train=TrainConfig(epochs=3, batch_size=2, num_anchors=256, gamma=7.0, num_workers=7),
    )


def qwen3_4b() -> JobConfig:
    """The published recipe for Qwen3-4B: the same as for 8B, sizes follow from the target."""
    return replace(qwen3_8b())
