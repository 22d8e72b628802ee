"""Train a drafter: prompts are answered and captured while they are trained on, or captured features are read.

    python -m jobs.train --preset qwen3_8b target=Qwen/Qwen3-8B data=prompts.jsonl root=/data/runs
    python -m jobs.train --preset tiny train.steps=40                   the embedded target, on a CPU
    python -m jobs.train --preset tiny features=runs/features drafter.head=false    from features, without an engine

The drafter comes out at ROOT/NAME/drafter. The same command again goes on where it was interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from domino_core.redact import redacted
from jobs.overrides import describe, resolve, run_job

if TYPE_CHECKING:
    from jobs.presets import JobConfig
    from pipelines.prepare import FitRequest, Prepared


def main(argv: Sequence[str]) -> None:
    from_features = any(argument.startswith("features=") for argument in argv)
    job, plan_only = resolve(argv, __doc__, required=("target",) if from_features else ("target", "data"))
    from jobs.ray_session import ray_session
    from pipelines.feature_store import read_events
    from pipelines.fit import fit
    from pipelines.prepare import prepare
    from pipelines.supply import Balance
    from pipelines.train_state import EVENTS_FOLDER

    request = fit_request(job)
    print(describe(job))
    print(will_do(request, prepare(request)), flush=True)
    if plan_only:
        return
    with ray_session():
        result = fit(request)
    if not job.features:
        print(read_events(request.run_dir / EVENTS_FOLDER).summary())
    balance = Balance.of(result.history)
    if balance is not None:
        print(balance.advice(job.capture.num_actors, job.train.num_workers))
    last = result.history[-1]
    a_round = f"{last['final_accepted']:.2f} tokens a round (teacher-forced)"
    print(f"{result.steps} steps, loss {last['final_loss']:.3f}, {a_round}")
    print(f"drafter   {result.drafter}\ntracking  {result.tracking_uri} run {result.run_id}")


def fit_request(job: JobConfig) -> FitRequest:
    """What pipelines.fit needs of a job."""
    from pipelines.prepare import FitRequest

    return FitRequest(
        target=job.target,
        data=job.data,
        num_rows=job.num_rows,
        root=job.root,
        name=job.run_name,
        tracking_uri=job.tracking_uri,
        features=job.features,
        eval_data=job.eval_data,
        evaluate=job.evaluate,
        drafter=job.drafter,
        answer=job.answer,
        capture=job.capture,
        train=job.train,
    )


def will_do(request: FitRequest, prepared: Prepared) -> str:
    """What follows from the configuration, in words."""
    plan, train = prepared.plan, request.train
    start = (
        f"features of {request.features}" if request.features else f"features of {request.data}, captured on the way"
    )
    return (
        f"\nwill train {plan.drafter.num_hidden_layers} layers on {prepared.num_rows} rows, {start}\n"
        f"{plan.total_steps} steps of {train.global_batch} rows ({train.num_workers} workers x {train.batch_size} rows "
        f"x {train.accumulation} micro-batches), target layers {list(plan.drafter.target_layer_ids)}, "
        f"mask token {plan.drafter.mask_token_id}\nto {plan.run_dir}, tracked in {redacted(plan.tracking_uri)}"
    )


if __name__ == "__main__":
    sys.exit(run_job(main))
