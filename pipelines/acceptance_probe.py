"""Acceptance while training: the drafter of a step decodes held-out prompts, beside the teacher-forced estimate.

An actor of its own does it, with the engine that serves, while the workers go on: rank 0 leaves a snapshot, and takes
the figures when they are there. A measurement that takes longer than the steps between two delays the next one, and
never the training. One that fails is told, and ends measuring, not training.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from domino_core.checkpoint import load_drafter, save_drafter
from domino_core.drafter import Drafter
from domino_core.engine import Engine, Request
from domino_core.target import load_target, load_tokenizer
from pipelines.evaluate import EvalConfig, held_out_prompts, placement


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    """What is measured, how often and where. evaluate: of which the prompts, their length and the placement count."""

    target: str
    eval_data: str
    evaluate: EvalConfig
    folder: str  # of snapshots
    every: int  # steps
    gpus: float  # share of a card; 0: on the CPU


class ProbeActor:
    """The target, and the drafter of one step after the other."""

    def __init__(self, plan: ProbePlan) -> None:
        self.plan = plan
        config = plan.evaluate if plan.gpus else replace(plan.evaluate, device="cpu", dtype="auto")
        self.device, self.dtype = placement(config)
        self.target = load_target(plan.target, device=self.device, dtype=self.dtype)
        self.prompts = held_out_prompts(plan.eval_data, load_tokenizer(plan.target), config)

    def measure(self, snapshot: str) -> dict[str, float]:
        """τ, and the share of rounds that accept each draft, of greedy outputs."""
        target, config = self.target, self.plan.evaluate
        drafter = load_drafter(snapshot, target.embed_VD, target.lm_head_VD, device=self.device, dtype=self.dtype)
        length = max(map(len, self.prompts)) + config.max_tokens
        engine = Engine(target, drafter, max_rows=min(8, len(self.prompts)), max_length=length)
        stop = target.config.eos_token_ids
        engine.generate(
            [Request(prompt_ids=each, max_tokens=config.max_tokens, stop_token_ids=stop) for each in self.prompts]
        )
        counted = engine.acceptance
        shares = {
            f"measured_accepted_{draft + 1}": count / max(1, counted.rounds)
            for draft, count in enumerate(counted.accepted_at)
        }
        return {"measured_tau": counted.tau, **shares}


class AcceptanceProbe:
    """Rank 0's side."""

    def __init__(self, plan: ProbePlan, step: int) -> None:
        """step: where the run begins or goes on; nothing is measured there."""
        import ray

        self.plan, self.due = plan, step + plan.every
        self.actor: Any = ray.remote(ProbeActor).options(num_cpus=1, num_gpus=plan.gpus or None).remote(plan)
        self.pending: tuple[int, Any] | None = None
        shutil.rmtree(plan.folder, ignore_errors=True)  # of a run that was killed

    def poll(self) -> tuple[int, dict[str, float]] | None:
        """Figures that have come, with their step."""
        return self._collect(timeout=0)

    def wants(self, step: int) -> bool:
        """Whether it is time for a new snapshot, and nothing is measured now."""
        return self.actor is not None and self.pending is None and step >= self.due

    def measure(self, drafter: Drafter, step: int) -> None:
        """Leave a snapshot of a whole drafter, and go on."""
        self.due = step + self.plan.every
        snapshot = save_drafter(drafter, Path(self.plan.folder) / f"step-{step}", {})
        self.pending = (step, self.actor.measure.remote(str(snapshot)))

    def finish(self, drafter: Drafter, step: int) -> list[tuple[int, dict[str, float]]]:
        """Wait for what is measured, then measure the last step; the actor ends."""
        import ray

        last = self._collect(timeout=None)
        if self.actor is not None:
            self.measure(drafter, step)
        found = [each for each in (last, self._collect(timeout=None)) if each is not None]
        if self.actor is not None:
            ray.kill(self.actor)
        shutil.rmtree(self.plan.folder, ignore_errors=True)
        return found

    def _collect(self, timeout: float | None) -> tuple[int, dict[str, float]] | None:
        import ray
        import ray.exceptions

        if self.pending is None:
            return None
        step, figures = self.pending
        if not ray.wait([figures], timeout=timeout)[0]:
            return None
        self.pending = None
        shutil.rmtree(Path(self.plan.folder) / f"step-{step}", ignore_errors=True)
        try:  # the boundary to another process: what happens there must not end days of training
            return step, ray.get(figures)
        except ray.exceptions.RayError as error:
            print(f"acceptance is not measured any more: {error}", file=sys.stderr, flush=True)
            self.actor = None
            return None
