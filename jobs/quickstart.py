"""From nothing to a served drafter on one machine: answers, features, training, measurement, gate, endpoint, report.

    python -m jobs.quickstart               the embedded target on two CPU cores, in minutes
    python -m jobs.quickstart --small       the same road with a few steps, as CI walks it

Three arms are measured on held-out prompts by the engine that serves: Domino, the same drafter with its head off, and a
plain DFlash drafter trained for the same steps on the same features with the same seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_core.redact import redacted
from jobs.overrides import describe, job_parser, load, run_job, writable

if TYPE_CHECKING:
    from domino_core.drafter import Drafter
    from jobs.presets import JobConfig
    from pipelines.fit import FitResult
    from pipelines.measurement import Measurement

DOMINO, HEAD_OFF, DFLASH = "Domino", "head off", "DFlash"


def main(argv: Sequence[str]) -> int:
    parser = job_parser(__doc__)
    parser.add_argument("--small", action="store_true", help="few prompts and steps: does everything run?")
    parser.add_argument("--result", default="report/quickstart.json", help="where the figures go (JSON)")
    parser.add_argument("--report", default="report/index.html", help="where the page goes")
    args = parser.parse_intermixed_args(argv)
    job = load(args, required=("target", "data", "eval_data"))
    job = small(job) if args.small else job
    if args.plan:
        print(describe(job))
        return 0
    from jobs.report import write_report

    figures_file, page = writable(args.result), writable(args.report)
    result = run(job, figures_file)
    write_report(page, result)
    print(closing_words(job, result, args.result, args.report))
    return 0 if result["greedy_identical"] else 1


def small(job: JobConfig) -> JobConfig:
    """Enough to walk every stage; its τ means nothing."""
    return replace(
        job,
        num_rows=48,
        train=replace(job.train, epochs=2),
        evaluate=replace(job.evaluate, num_prompts=6, max_tokens=48, repeats=1),
        gate=replace(job.gate, min_tau=1.0, min_speedup=0.0),
    )


@dataclass(kw_only=True)
class Stages:
    """Says what each stage does, and keeps how long it took."""

    total: int
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, title: str, explanation: str) -> Iterator[None]:
        print(f"\n[{len(self.seconds) + 1}/{self.total}] {title}: {explanation}", flush=True)
        started = time.perf_counter()
        yield
        self.seconds[title] = round(time.perf_counter() - started, 1)
        print(f"      {self.seconds[title]:.0f} s", flush=True)


def run(job: JobConfig, result_file: Path) -> dict[str, Any]:
    """Walk all stages, stop everything that was started, write the figures and return them, ready for JSON."""
    from jobs.deploy import serve_config
    from jobs.environment import PeakMemory, environment
    from jobs.ray_session import ray_session
    from pipelines.tracking import connect
    from serve.deployment import check_port, deploy, undeploy

    os.environ.setdefault("RAY_ADDRESS", "local")  # not somebody else's Ray that happens to run on this machine
    serving = serve_config(job)
    check_port(serving)
    started, memory, stage = time.perf_counter(), PeakMemory(), Stages(total=7)
    memory.start()
    with contextlib.ExitStack() as session:
        with stage("Ray and MLflow", f"a local Ray, and MLflow in {redacted(serving.tracking_uri)}"):
            session.enter_context(ray_session(dashboard=True))
            client = connect(serving.tracking_uri)
        with stage(DOMINO, "the target answers the prompts, its hidden states stream into the training of the drafter"):
            domino = train_arm(job, "domino")
        with stage(DFLASH, "the baseline: the same data, steps and seed without head and curriculum"):
            dflash = train_arm(without_curriculum(job, domino), "dflash")
        with stage("Measurement", "held-out prompts, greedy, all arms and plain decoding in turns, by the same engine"):
            measured = measure(job, domino, dflash)
            result = figures(job, domino, dflash, measured) | {"environment": environment()}
            write_result(result_file, result)  # should a later stage fail, hours of training are not lost to it
        with stage("Registry", "the version is registered, reloaded by the gate, and becomes champion if it holds"):
            version = register_and_promote(job, client, domino)
        with stage("Endpoint", "Ray Serve deploys the champion; the openai client asks it, streaming and not"):
            url = deploy(serving)
            session.callback(undeploy, serving)
            samples = ask(url, serving.served_name, job)
        with stage("Shutdown", "everything that was started is stopped"):
            session.close()
    result |= {
        "run_seconds": round(time.perf_counter() - started, 1),
        "stage_seconds": stage.seconds,
        "peak_rss_gb": round(memory.stop(), 2),
        "samples": samples,
        **version,
    }
    write_result(result_file, result)
    return result


def write_result(file: Path, result: dict[str, Any]) -> None:
    file.write_text(json.dumps(result, indent=1) + "\n")


def train_arm(job: JobConfig, name: str) -> FitResult:
    """Train one arm from nothing: an earlier quickstart's run of the same name is removed, not resumed."""
    from jobs.train import fit_request
    from pipelines.fit import fit

    request = fit_request(replace(job, name=f"quickstart-{name}"))
    shutil.rmtree(request.run_dir, ignore_errors=True)
    return fit(request)


def without_curriculum(job: JobConfig, domino: FitResult) -> JobConfig:
    """The DFlash arm, on the features that the Domino arm left: without a head λ mixes the base loss with itself."""
    return replace(
        job,
        features=str(domino.drafter.parent / "features"),
        drafter=replace(job.drafter, head=False),
        train=replace(job.train, steps=domino.steps),
    )


def measure(job: JobConfig, domino: FitResult, dflash: FitResult) -> dict[str, Measurement]:
    """All arms and plain decoding in turns, on the same prompts."""
    from domino_core.checkpoint import load_drafter
    from domino_core.target import load_target, load_tokenizer
    from pipelines.evaluate import held_out_prompts, measure_arms, placement, without_head

    device, dtype = placement(job.evaluate)
    target = load_target(job.target, device=device, dtype=dtype)

    def loaded(arm: FitResult) -> Drafter:
        return load_drafter(arm.drafter, target.embed_VD, target.lm_head_VD, device=device, dtype=dtype)

    trained = loaded(domino)
    drafters = {DOMINO: trained, HEAD_OFF: without_head(trained), DFLASH: loaded(dflash)}
    prompts = held_out_prompts(job.eval_data, load_tokenizer(job.target), job.evaluate)
    return measure_arms(target, drafters, prompts, job.evaluate)


def register_and_promote(job: JobConfig, client: Any, domino: FitResult) -> dict[str, Any]:
    """Register, gate, promote. Where the gate refuses, the champion of an earlier run stays, and that one is served."""
    from pipelines import gate, registry

    name = registry.registered_name(job.target)
    number = registry.register(client, domino.drafter, job.target, job.root, domino.run_id)
    version = registry.find_version(client, name, version=number)
    outcome = gate.examine(client, version, job.target, job.eval_data, job.evaluate, job.gate)
    gate.record(client, version, outcome, Path(job.eval_data).stem)
    print(gate.verdict(name, outcome))
    if outcome.passed:
        registry.promote(client, version)
    champion = registry.find_version(client, name, alias=registry.CHAMPION)
    return {
        "registered_model": name,
        "version": number,
        "champion": str(champion.version),
        "gate_failures": outcome.failures,
    }


def ask(url: str, model: str, job: JobConfig) -> list[str]:
    """Ask the endpoint the first held-out prompts through the openai client; each answer streamed and not, compared."""
    from openai import OpenAI

    from pipelines.prompts import read_prompts

    client = OpenAI(base_url=url, api_key=os.environ.get("DOMINO_API_KEY", "not needed"))
    samples: list[str] = []
    for _, row in zip(range(2), read_prompts(job.eval_data), strict=False):
        request: dict[str, Any] = {"model": model, "messages": row["messages"], "max_tokens": 96, "temperature": 0}
        whole = client.chat.completions.create(**request).choices[0].message.content or ""
        chunks = client.chat.completions.create(**request, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        if streamed != whole:
            raise RuntimeError(f"the streamed answer differs from the whole one:\n{streamed!r}\n{whole!r}")
        samples.append(f"{row['messages'][-1]['content']}\n⟶\n{whole}")
    return samples


def figures(job: JobConfig, domino: FitResult, dflash: FitResult, measured: dict[str, Measurement]) -> dict[str, Any]:
    """The measured numbers, flat for a reader and by arm for the report."""
    ours = measured[DOMINO]
    plain = {"name": "plain", "tau": 1.0, "tokens_per_s": ours.plain_tokens_per_s, "speedup": 1.0}
    arms = [
        {
            "name": name,
            "tau": each.tau,
            "tokens_per_s": each.tokens_per_s,
            "speedup": each.speedup,
            "acceptance_by_position": each.acceptance_by_position,
        }
        for name, each in measured.items()
    ]
    return {
        "target_name": Path(job.target).name,
        "tau_domino": ours.tau,
        "tau_head_off": measured[HEAD_OFF].tau,
        "tau_dflash": measured[DFLASH].tau,
        "speedup": ours.speedup,
        "plain_tokens_per_s": ours.plain_tokens_per_s,
        "domino_tokens_per_s": ours.tokens_per_s,
        "greedy_identical": all(each.identical for each in measured.values()),
        "num_prompts": ours.num_prompts,
        "num_tokens": ours.num_tokens,
        "optimiser_steps": domino.steps,
        "arms": [plain, *arms],
        "history": {DOMINO: domino.history, DFLASH: dflash.history},
    }


def closing_words(job: JobConfig, result: dict[str, Any], result_file: str, report: str) -> str:
    """The table, and where to look."""
    rows = "\n".join(
        f"  {arm['name']:10} τ {arm['tau']:5.2f}   {arm['tokens_per_s']:7.0f} tokens/s   {arm['speedup']:5.2f}× plain"
        for arm in result["arms"]
    )
    identical = "every output is" if result["greedy_identical"] else "NOT every output is"
    return f"""
{rows}
  {result["num_prompts"]} held-out prompts, greedy: {identical} token for token the target's own
  {result["run_seconds"]:.0f} s, at most {result["peak_rss_gb"]:.1f} GB of memory
  champion of {result["registered_model"]}: version {result["champion"]}

  report     {report}
  figures    {result_file}
  make serve brings the champion up again with its endpoint, the MLflow UI and the Ray dashboard"""


if __name__ == "__main__":
    sys.exit(run_job(main))
