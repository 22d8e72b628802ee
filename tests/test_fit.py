"""A training run on Ray: what is refused before it starts, what comes out, and what a killed worker costs (nothing)."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from domino_core import features
from domino_core.checkpoint import load_drafter, read_config, read_provenance
from domino_core.features import FeatureMeta
from domino_core.json_files import read_json
from domino_core.target import load_tokenizer, load_vocabulary, read_target_config, target_hash, tokenizer_hash
from jobs.presets import tiny
from jobs.status import training
from pipelines.capture import CaptureConfig
from pipelines.evaluate import EvalConfig, load_arms, measure
from pipelines.feature_store import write_manifest, write_table
from pipelines.fit import finished, fit
from pipelines.prepare import DrafterShape, FitRequest, check_cluster, prepare
from pipelines.regenerate import AnswerConfig
from pipelines.tracking import connect, experiment_id
from pipelines.train_config import TrainConfig
from pipelines.train_state import LIVE_FILE, SNAPSHOTS_FOLDER
from tests.serving import wait_until

SHAPE = DrafterShape(
    block_size=4, num_hidden_layers=1, target_layer_ids=(1, 6), emb_dim=8, gru_hidden_dim=16, dtype="float32"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory, embedded_target) -> Path:
    """24 rows of made-up tokens and states for the embedded target, as the capture writes them."""
    folder = tmp_path_factory.mktemp("cache") / "features"
    config = read_target_config(embedded_target)
    meta = FeatureMeta(
        target=str(embedded_target),
        target_hash=target_hash(embedded_target),
        layer_ids=(1, 6),
        hidden_size=config.hidden_size,
        tokenizer_hash=tokenizer_hash(load_tokenizer(embedded_target)),
    )
    write_manifest(folder, meta)
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(64, 2, config.hidden_size, generator=generator)
    for start in range(0, 24, 6):
        rows = []
        for number in range(start, start + 6):
            ids = [(7 * number + 3 * i) % 64 for i in range(12 + number % 4)]
            rows.append({"sample_id": f"row-{number}", "input_ids": ids, "loss_mask": [0, 0] + [1] * (len(ids) - 2),
                         "features": states[ids]})  # fmt: skip
        write_table(folder, features.table(meta, rows))
    return folder


@pytest.fixture
def request_for(cache, embedded_target, tmp_path):
    def make(**train) -> FitRequest:
        values = {"steps": 6, "batch_size": 2, "num_anchors": 4, "learning_rate": 5e-3, "precision": "float32",
                  "use_gpu": False, "num_workers": 2, "cpus_per_worker": 0.5, "log_every": 1, "checkpoint_every": 2,
                  "max_failures": 2}  # fmt: skip
        return FitRequest(
            target=str(embedded_target), data="", root=str(tmp_path), name="run", features=str(cache), drafter=SHAPE,
            answer=AnswerConfig(), capture=CaptureConfig(max_length=256), train=TrainConfig(**(values | train)),
        )  # fmt: skip

    return make


def test_plan_follows_from_data_and_target(request_for, tmp_path):
    prepared = prepare(replace(request_for(steps=None, epochs=3, accumulation=2)))
    assert prepared.num_rows == 24
    assert prepared.plan.total_steps == 3 * 3
    assert prepared.source is None
    assert prepared.plan.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert prepared.plan.provenance["target_hash"] == prepared.plan.started_with["target_hash"]
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind


def test_what_cannot_work_is_refused_before_anything_starts(request_for, tmp_path, cache, embedded_target):
    request = request_for()
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"id": "a", "messages": [{"role": "user", "content": "def f(x):"}]}\n')
    few = replace(request, features="", data=str(prompts))
    for wrong, said in [
        (replace(request, target=str(tmp_path / "nothing")), "nothing does not exist"),
        (replace(request, features=str(tmp_path)), r"has no manifest\.json"),
        (replace(request, features="", data=str(tmp_path / "no.jsonl")), "no such prompt file"),
        (few, "has 1 rows, fewer than one batch for every worker"),
        (request_for(batch_size=16), "has 24 rows, fewer than one batch"),
        (replace(request, drafter=replace(SHAPE, target_layer_ids=(1, 2))), r"layers \[1, 6\] were captured"),
        (replace(request, drafter=replace(SHAPE, mask_token_id=10**6)), "mask_token_id=1000000 has no embedding row"),
        (replace(request, drafter=replace(SHAPE, target_layer_ids=(1, 99))), r"target_layer_ids=\[1, 99\]"),
        (replace(request, tracking_uri="http://127.0.0.1:9"), "does not answer"),
        (request_for(acceptance_every=5), "give them by eval_data="),
        (replace(request_for(acceptance_every=5), eval_data=str(tmp_path / "no.jsonl")), "no such prompt file"),
    ]:
        with pytest.raises(ValueError, match=said):
            prepare(wrong)


def test_features_of_a_changed_target_are_refused(request_for, cache, embedded_target, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(cache, other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"target_hash": "0" * 16}))
    with pytest.raises(ValueError, match="target"):
        prepare(replace(request_for(), features=str(other)))


@pytest.mark.cluster
def test_a_cluster_that_is_too_small_is_refused(local_ray, request_for):
    with pytest.raises(ValueError, match=r"needs 9 CPUs and 0 GPUs .*the cluster has \d CPUs.*start Ray with more"):
        check_cluster(request_for(num_workers=9, cpus_per_worker=1))
    with pytest.raises(ValueError, match="needs 2 CPUs and 2 GPUs"):
        check_cluster(request_for(use_gpu=True, cpus_per_worker=1))
    with pytest.raises(ValueError, match=r"needs 2 CPUs and 0\.8 GPUs"):
        check_cluster(request_for(use_gpu=True, cpus_per_worker=1, gpus_per_worker=0.4))
    streaming = replace(request_for(cpus_per_worker=1), features="", capture=CaptureConfig(num_actors=2))
    with pytest.raises(ValueError, match=r"needs 5 CPUs.*2 capture engines x 1, 1 for reading"):
        check_cluster(streaming)
    check_cluster(request_for())

    # What is held now and given back soon is waited for; what is not given back is not.
    @local_ray.remote(num_cpus=4)
    def hold(seconds: float) -> None:
        time.sleep(seconds)

    held = hold.remote(6)
    while local_ray.available_resources().get("CPU", 0) >= 1:
        time.sleep(0.1)
    with pytest.raises(ValueError, match="the cluster has 0 CPUs"):
        check_cluster(request_for(), patience=0)
    check_cluster(request_for())
    local_ray.get(held)


def kill_a_worker_after(run_dir: Path, step: int, killed: list[int]) -> threading.Thread:
    """SIGKILL one train worker of ours once the run has passed `step` and Ray has a checkpoint in its books."""
    live, books = run_dir / LIVE_FILE, run_dir / "checkpoint_manager_snapshot.json"

    def watch() -> None:
        while not live.exists() or read_json(live)["metrics"]["step"] < step or not books.exists():
            time.sleep(0.02)
        for process in psutil.Process().children(recursive=True):
            if "RayTrainWorker" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.cluster
@pytest.mark.slow
def test_fit_and_fit_again_after_a_kill(local_ray, request_for, embedded_target, monkeypatch):
    request = request_for(steps=120, checkpoint_every=20)
    probed = replace(request.train, acceptance_every=50, acceptance_prompts=3)
    evaluate, prompts = EvalConfig(max_tokens=12), str(embedded_target / "prompts" / "heldout.jsonl")
    whole = fit(replace(request, name="whole", train=probed, eval_data=prompts, evaluate=evaluate))
    assert whole.steps == 120
    assert [line["step"] for line in whole.history] == list(range(1, 121))
    assert whole.history[-1]["final_loss"] < 0.7 * whole.history[0]["final_loss"]
    assert whole.history[-1]["lambda_base"] == pytest.approx(1 / 120)

    # What comes out is a drafter in the published layout that says where it is from.
    assert read_config(whole.drafter).target_layer_ids == (1, 6)
    load_drafter(whole.drafter, *load_vocabulary(embedded_target))
    made = read_provenance(whole.drafter)
    assert made["target_hash"] == target_hash(embedded_target)
    assert made["training"]["steps"] == 120
    assert made["config"]["train"]["learning_rate"] == 5e-3
    client = connect(whole.tracking_uri)
    assert client.get_run(whole.run_id).info.status == "FINISHED"
    assert client.get_run(whole.run_id).data.params["train.seed"] == "42"

    # Acceptance was measured beside the training, which it changes nothing of: the run below has none.
    measured = client.get_metric_history(whole.run_id, "measured_tau")
    assert [metric.step for metric in measured][-1] == 120
    assert len(measured) >= 2
    few = replace(evaluate, num_prompts=3, device="cpu")
    target, drafter, texts = load_arms(whole.drafter, str(embedded_target), prompts, few)
    assert measured[-1].value == measure(target, drafter, texts, replace(few, repeats=1)).tau
    assert not (request.run_dir.parent / "whole" / SNAPSHOTS_FOLDER).exists()

    found = training(replace(tiny(), root=request.root))
    assert (found.name, found.state, found.total_steps, found.tau) == ("whole", "finished", 120, None)
    assert found.metrics["step"] == 120

    # A worker that is killed costs the steps since the last checkpoint, and changes no number.
    killed: list[int] = []
    watcher = kill_a_worker_after(request.run_dir.parent / "killed", 45, killed)
    again = fit(replace(request, name="killed"))
    watcher.join()
    assert killed
    assert curve(again.history) == curve(whole.history)
    steps = [metric.step for metric in client.get_metric_history(again.run_id, "final_loss")]
    assert sorted(steps) == list(range(1, 121))  # repeated steps are stored once

    # The same name again: nothing is left to do, for which no cluster is needed.
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.fit.check_cluster", lambda request: pytest.fail("workers were wanted"))
        assert fit(replace(request, name="killed")) == again
    plan = prepare(replace(request, name="killed")).plan
    assert finished(replace(request, name="killed"), replace(plan, tracking_uri="sqlite:///elsewhere.db")) is None
    config = again.drafter / "config.json"
    config.write_text(config.read_text() + "\n")
    assert finished(replace(request, name="killed"), plan) is None
    # A driver that was killed before it had exported the drafter goes on from the last checkpoint.
    weights = (again.drafter / "model.safetensors").read_bytes()
    shutil.rmtree(again.drafter)
    assert fit(replace(request, name="killed")) == again
    assert (again.drafter / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match=r"started with other settings \(train.learning_rate: 0.005 -> 0.1\)"):
        fit(replace(request, name="killed", train=replace(request.train, learning_rate=0.1)))
    # Another number of workers at the same global batch is the same run.
    fewer = replace(request.train, num_workers=1, accumulation=2)
    assert prepare(replace(request, name="killed", train=fewer)).plan.total_steps == 120


def curve(history: list[dict[str, float]]) -> list[tuple[float, ...]]:
    keys = ("step", "epoch", "final_loss", "base_loss", "grad_norm", "learning_rate", "lambda_base")
    return [tuple(line[key] for key in keys) for line in history]


def slow_stream(cache: Path):
    """In place of the capture: rows of a cache, two a second, treating ledger and cache as the real stream does."""
    from pipelines.feature_store import read_ledger

    def rows_of(batch: pa.Table, source) -> Iterator[pa.Table]:
        for path in batch["path"].to_pylist():
            for row in range(pq.read_metadata(path).num_row_groups):
                table = pq.ParquetFile(path).read_row_group(row)
                (sample_id,) = table["sample_id"].to_pylist()
                if sample_id in read_ledger(source.ledger):
                    continue
                time.sleep(0.5)
                write_table(source.cache, table)
                with open(f"{source.events}.log", "a") as log:
                    log.write(f"{os.getppid()} {time.time()} {sample_id}\n")
                yield table

    def feature_dataset(source, *, seed=None):
        import ray

        write_manifest(source.cache, source.meta)
        files = ray.data.from_items([{"path": str(path)} for path in sorted(cache.glob("*.parquet"))])
        return files.map_batches(
            rows_of,  # pyright: ignore[reportArgumentType]
            fn_kwargs={"source": source},
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.TaskPoolStrategy(size=1),
        )

    return feature_dataset


@pytest.mark.cluster
@pytest.mark.slow
def test_a_kill_in_the_streamed_epoch_repeats_no_row_that_counted(
    local_ray, request_for, cache, embedded_target, tmp_path, monkeypatch
):
    prompts = tmp_path / "prompts.jsonl"
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "def f(x): return x"}]}
    prompts.write_text("".join(json.dumps({"id": f"row-{i}", **row}) + "\n" for i in range(24)))
    monkeypatch.setattr("pipelines.fit.feature_dataset", slow_stream(cache))
    request = request_for(steps=None, epochs=2, checkpoint_every=2, max_failures=3)
    request = replace(request, features="", data=str(prompts))
    killed: list[int] = []
    watcher = kill_a_worker_after(request.run_dir, 3, killed)
    done = fit(request)
    watcher.join()
    assert killed
    assert [line["step"] for line in done.history] == list(range(1, 13))  # 24 rows at 4 a step, twice
    assert [line["epoch"] for line in done.history] == [0] * 6 + [1] * 6
    assert read_provenance(done.drafter)["training"]["samples"] == 48  # each row once an epoch, none twice, none lost

    # The ledger was written at the restart; what it names was not captured again.
    ledger = request.run_dir / "resume_ledger.json"
    counted = set(read_json(ledger))
    assert len(counted) in (8, 12, 16, 20)
    events = [line.split() for line in Path(f"{request.run_dir}/events.log").read_text().splitlines()]
    before = {sample_id for _, moment, sample_id in events if float(moment) < ledger.stat().st_mtime}
    after = [sample_id for _, moment, sample_id in events if float(moment) > ledger.stat().st_mtime]
    assert counted <= before
    assert sorted(after) == sorted({f"row-{i}" for i in range(24)} - counted)


@pytest.mark.cluster
@pytest.mark.slow
def test_ctrl_c_ends_a_run_as_an_interrupt_and_not_as_a_failure(local_ray, request_for, tmp_path):
    """Ray Train takes the signal while it runs, and ends in an error or an exit of its own."""
    request, handler = request_for(steps=400), signal.getsignal(signal.SIGINT)

    def press() -> None:
        wait_until(lambda: any((tmp_path / "run").glob("checkpoint_*")), 90)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fit(request)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([experiment_id(client, "domino", tmp_path)])
    assert run.info.status == "KILLED"
    assert training(replace(tiny(), root=request.root)).state == "stopped: interrupted"
    assert finished(request, prepare(request).plan) is None


@pytest.mark.cluster
@pytest.mark.slow
def test_a_run_that_gives_up_says_why_and_is_not_repeated(local_ray, request_for, cache, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(cache, broken)
    for path in broken.glob("*.parquet"):
        table = pq.read_table(path)
        nan = [b"\xc0\x7f" * (len(value.as_py()) // 2) for value in table["features"]]
        index = table.schema.get_field_index("features")
        table = table.set_column(index, table.schema.field(index), pa.array(nan, pa.large_binary()))
        pq.write_table(table, path, row_group_size=1)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"gradient not finite.*row-\d+.*max_nonfinite=1"):
        fit(replace(request_for(max_nonfinite=1, max_failures=3), features=str(broken)))
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([experiment_id(client, "domino", tmp_path)])
    assert run.info.status == "FAILED"
    assert time.monotonic() - started < 120
