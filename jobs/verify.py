"""Prove that a drafter changes nothing: a losslessness report for it and its target.

    python -m jobs.verify --preset tiny                                    the drafter of the preset's run
    python -m jobs.verify --target Qwen/Qwen3-8B --drafter FOLDER --preset qwen3_8b eval_data=heldout.jsonl
    python -m jobs.verify --drafter FOLDER --small                         a few minutes on two cores; for CI

Greedy and seeded identity in float32 and in the served type, ends, log-probabilities, reproducibility, batch
invariance, and a distribution test of every draft rule. Exit code 1 on a defect.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from domino_core.redact import redacted
from jobs.overrides import describe, job_parser, load, run_job, writable

if TYPE_CHECKING:
    import torch

    from jobs.presets import JobConfig
    from pipelines.verify_models import Check, Models, VerifyConfig


def main(argv: Sequence[str]) -> int:
    parser = job_parser(__doc__)
    parser.add_argument("--target", help="the same as target=")
    parser.add_argument("--drafter", help="drafter folder (default: the one of the run, ROOT/NAME/drafter)")
    parser.add_argument("--result", type=Path, default=Path("report/verify.json"), help="where the figures go (JSON)")
    parser.add_argument("--report", type=Path, default=Path("report/verify.html"), help="where the page goes")
    parser.add_argument("--small", action="store_true", help="few prompts and draws: does it hold at first sight?")
    args = parser.parse_intermixed_args(argv)
    if args.target:
        args.overrides.append(f"target={args.target}")
    job = load(args, required=("target", "eval_data"))
    folder = Path(args.drafter or Path(job.root) / job.run_name / "drafter")
    config = small(job.verify) if args.small else job.verify
    if args.plan:
        print(f"{describe(replace(job, verify=config))}\n\nwill verify {folder}, to {args.result} and {args.report}")
        return 0
    from jobs.verify_report import write_page

    writable(args.result)
    writable(args.report)
    result = run(job, config, folder, args.result)
    write_page(args.report, result)
    print(
        f"{result['defects']} defects, {result['untested']} things untested; written to {args.result} and {args.report}"
    )
    return 1 if result["defects"] else 0


def small(config: VerifyConfig) -> VerifyConfig:
    """Few prompts and draws where the user has said nothing else; enough to see a broken rule."""
    few = {"num_prompts": 12, "max_tokens": 24, "draws": 2_000, "samples": 400}
    given = {field.name: field.default for field in fields(config)}
    return replace(config, **{name: n for name, n in few.items() if getattr(config, name) == given[name]})


def run(job: JobConfig, config: VerifyConfig, folder: Path, out: Path) -> dict[str, Any]:
    """All checks, told and written to `out` as they are done: a run that is killed keeps what it has found."""
    from tqdm import tqdm

    from domino_core.checkpoint import load_drafter, read_config
    from domino_core.sampling_params import DraftRule
    from domino_core.target import load_target, load_tokenizer, read_target_config
    from pipelines.evaluate import held_out_prompts, placement
    from pipelines.verify import verify
    from pipelines.verify_models import Models

    read_config(folder).check_fits(read_target_config(job.target))
    device, _ = placement(replace(job.evaluate, device=config.device))
    prompts = held_out_prompts(
        job.eval_data, load_tokenizer(job.target), replace(job.evaluate, num_prompts=config.num_prompts)
    )

    if len(prompts) < config.num_prompts:
        print(f"{job.eval_data} has {len(prompts)} prompts, verify.num_prompts={config.num_prompts}: all are used")

    def models(dtype: torch.dtype) -> Models:
        target = load_target(job.target, device=device, dtype=dtype)
        drafter = load_drafter(folder, target.embed_VD, target.lm_head_VD, device=device, dtype=dtype)
        return Models(target=target, drafter=drafter)

    started = time.perf_counter()
    done: list[Check] = []

    def write(*, complete: bool) -> dict[str, Any]:
        result = summary(job, folder, done) | {"complete": complete, "seconds": round(time.perf_counter() - started, 1)}
        out.write_text(json.dumps(result, indent=1) + "\n")
        return result

    with tqdm(
        total=len(get_args(DraftRule)) * config.draws, unit="draw", desc="checks begin, draws", mininterval=5
    ) as bar:

        def tell(check: Check) -> None:
            bar.write(f"{'ok     ' if not check.defects else 'DEFECT '} {check.name}: {check.statement}")
            for line in check.defects[:5] + [f"untested: {each}" for each in check.untested]:
                bar.write(f"         {line}")
            done.append(check)
            bar.set_description(f"{len(done)} checks done, draws")
            write(complete=False)

        verify(models, prompts, config, tell, bar.update)
    return write(complete=True)


def summary(job: JobConfig, folder: Path, checks: Sequence[Check]) -> dict[str, Any]:
    """The report as a JSON-ready dictionary; None: not checked."""
    from domino_core.checkpoint import folder_digest
    from domino_core.target import target_hash
    from jobs.environment import environment

    figures = {check.name: check.figures for check in checks}
    corrected = [each["min_corrected_p"] for each in figures.values() if "min_corrected_p" in each]
    return {
        "target": Path(job.target).name,
        "target_hash": target_hash(job.target),
        "drafter": folder.name,
        "drafter_digest": folder_digest(folder),
        "defects": sum(len(check.defects) for check in checks),
        "untested": sum(len(check.untested) for check in checks),
        "greedy_prompts": figures.get("greedy identity, float32", {}).get("prompts"),
        "sampling_draws": figures.get("distribution", {}).get("draws"),
        "min_corrected_p": min(corrected, default=None),
        "near_ties": sum(each.get("near_ties", 0) for each in figures.values()),
        "checks": [vars(check) for check in checks],
        "command": ["jobs.verify", *map(redacted, sys.argv[1:])],
        "environment": environment(),
    }


if __name__ == "__main__":
    sys.exit(run_job(main))
