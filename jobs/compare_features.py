"""What features in half the bytes cost: the same drafters trained from bfloat16 and from float8, measured in turns.

    python -m jobs.compare_features --preset tiny num_rows=512 train.num_workers=1 train.steps=160 root=runs/compare

Features are captured once and converted, so that both arms see the same tokens; each seed trains one drafter of either
kind with the same steps. Reported are τ on held-out prompts, and the error of the states by tapped layer, for the
format's scale per token and layer and for one scale per token.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.overrides import describe, job_parser, load, run_job, writable

if TYPE_CHECKING:
    from torch import Tensor

    from domino_core.drafter import Drafter
    from jobs.presets import JobConfig

DTYPES = ("bfloat16", "float8_e4m3fn")


def main(argv: Sequence[str]) -> None:
    parser = job_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="drafters trained of either kind (2)")
    parser.add_argument("--out", type=Path, help="where the figures go (ROOT/fp8_features.json)")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=("target", "data", "eval_data"))
    if args.plan:
        print(describe(job))
        return
    from jobs import convert_features, features
    from jobs.environment import environment
    from jobs.ray_session import ray_session

    out = writable(args.out or Path(job.root) / "fp8_features.json")
    folders = {dtype: Path(job.root) / f"features-{dtype}" for dtype in DTYPES}
    recipe = ["--preset", args.preset, *args.overrides]
    said = [part for part in recipe if not part.startswith("root=")]  # where it was written is of no interest
    with ray_session():
        features.main([*recipe, f"features={folders['bfloat16']}"])
        if not folders["float8_e4m3fn"].exists():
            route = ["--from", "domino", "--to", "domino", "--preset", args.preset]
            half = [str(folders["bfloat16"]), str(folders["float8_e4m3fn"])]
            convert_features.main([*half, *route, "capture.features_dtype=float8_e4m3fn"])
        arms = train_arms(job, folders, args.seeds)
    found = {
        "command": shlex.join(["python", "-m", "jobs.compare_features", *said, "--seeds", str(args.seeds)]),
        "bytes": {dtype: sum(p.stat().st_size for p in folder.glob("*.parquet")) for dtype, folder in folders.items()},
        "relative_error": relative_errors(folders["bfloat16"]),
        "arms": measured(job, arms),
        "environment": environment(),
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    for arm in found["arms"]:
        print(f"{arm['features']:14} seed {arm['seed']}  tau {arm['tau']:.3f}  final loss {arm['final_loss']:.4f}")
    print(f"written to {out}")


def train_arms(job: JobConfig, folders: dict[str, Path], seeds: int) -> list[dict[str, Any]]:
    """One drafter a seed and kind of features; a finished one is taken as it is."""
    from jobs.train import fit_request
    from pipelines.fit import fit

    arms: list[dict[str, Any]] = []
    for seed in range(job.train.seed, job.train.seed + seeds):
        for dtype, folder in folders.items():
            train = replace(job.train, seed=seed)
            arm = replace(job, features=str(folder), name=f"compare-{dtype}-{seed}", train=train)
            result = fit(fit_request(arm))
            last = {key: result.history[-1][key] for key in ("final_loss", "final_accepted")}
            arms.append({"features": dtype, "seed": seed, "steps": result.steps, "drafter": result.drafter} | last)
    return arms


def measured(job: JobConfig, arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arms with τ and its counters, all decoded in turns on the same prompts."""
    from domino_core.checkpoint import load_drafter
    from domino_core.target import load_target, load_tokenizer
    from pipelines.evaluate import held_out_prompts, measure_arms, placement

    device, dtype = placement(job.evaluate)
    target = load_target(job.target, device=device, dtype=dtype)

    def loaded(folder: Path) -> Drafter:
        return load_drafter(folder, target.embed_VD, target.lm_head_VD, device=device, dtype=dtype)

    drafters = {f"{arm['features']} {arm['seed']}": loaded(arm.pop("drafter")) for arm in arms}
    prompts = held_out_prompts(job.eval_data, load_tokenizer(job.target), job.evaluate)
    found = measure_arms(target, drafters, prompts, job.evaluate).values()
    kept = ("tau", "acceptance", "acceptance_by_position", "identical", "num_prompts", "num_tokens")
    return [arm | {key: getattr(each, key) for key in kept} for arm, each in zip(arms, found, strict=True)]


def relative_errors(folder: Path, rows: int = 64) -> dict[str, Any]:
    """‖restored - stored‖ / ‖stored‖ of each token's bfloat16 states, mean and largest, by tapped layer.

    Also with the deepest layer made larger. Small targets have no such tokens; large ones have a few whose norm grows
    so between two tapped layers, and their shallow states must not vanish beside the deep ones.
    """
    import torch

    from domino_core.features import quantize
    from pipelines.feature_files import open_source
    from pipelines.feature_store import read_manifest

    meta = read_manifest(folder)
    source = open_source("domino", folder, meta, None)
    picked = range(0, len(source), max(1, len(source) // rows))
    states_SLD = torch.cat([source.read(index)["features"] for index in picked])

    def error(states_SLD: Tensor, groups: int) -> dict[str, list[float]]:
        """groups: scales per token."""
        values, scales = quantize(states_SLD.view(len(states_SLD), groups, -1))
        restored_SLD = (values.float() * scales[..., None]).view_as(states_SLD)
        error_SL = (restored_SLD - states_SLD).norm(dim=-1) / states_SLD.norm(dim=-1)
        return {"mean": error_SL.mean(0).tolist(), "largest": error_SL.amax(0).tolist()}

    def errors(factor: float) -> dict[str, Any]:
        grown_SLD = states_SLD.clone()
        grown_SLD[:, -1] *= factor
        layers = len(meta.layer_ids)
        return {"scale_per_token_and_layer": error(grown_SLD, layers), "scale_per_token": error(grown_SLD, 1)}

    grown = {f"deepest_layer_times_{factor}": errors(factor) for factor in (1_000, 100_000)}
    return {"layer_ids": list(meta.layer_ids), "tokens": len(states_SLD), **errors(1), **grown}


if __name__ == "__main__":
    sys.exit(run_job(main))
