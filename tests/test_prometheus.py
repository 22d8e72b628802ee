"""Board and alerts before a real Prometheus, which scrapes a Ray with an endpoint that answers and a run that trains.

Skipped where no `prometheus` is on the PATH (Debian has a package of that name). tests/test_dashboards.py compares
names everywhere; here the expressions are computed.
"""

import json
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from domino_core.checkpoint import save_drafter
from domino_core.drafter import Drafter
from domino_core.target import load_vocabulary, target_hash
from jobs.drill_ground import free_port
from pipelines.supply import SupplyWindow
from pipelines.train_gauges import TrainGauges
from pipelines.train_loop import Progress, new_optimizer, train
from serve.config import ServeConfig
from tests import training
from tests.dashboards import CLUSTER, alerts, panels
from tests.serving import HTTP, drafter_config, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on the PATH"),
]
# Expressions without a result here, and why that is right.
EMPTY = {
    "DominoErrors": "no request has failed, and Ray shows no counter before something is counted",
    "DominoOverloaded": "no request was refused, as above",
    "Speed-up over plain decoding": "no application with drafter: none beside this one",
}
BODY = {"model": "tiny-qwen3", "prompt": ["x"] * 4, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Trainer:
    """An actor that trains a tiny drafter with the run's own loop, and logs as a run's worker does."""

    def __init__(self) -> None:
        self.gauges = TrainGauges("some-run")

    def work(self, folder: str) -> None:
        """Some steps; what the stream and the measuring actor add to a line is added by hand."""
        model, settings = training.drafter(), training.config(steps=20, log_every=1)
        more = {**SupplyWindow(Path(folder)).reduce(), "measured_tau": 2.0}
        train(
            model,
            new_optimizer(model, settings),
            settings,
            Progress(),
            total_steps=20,
            batches_of=training.source(training.dataset(4), settings.batch_size),
            on_log=lambda line: self.gauges.set({**line, **more}),
        )


@contextmanager
def prometheus(folder: Path, targets: list[str]):
    """The URL of a Prometheus that scrapes `targets` every second and has the alert rules."""
    port = free_port()
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(CLUSTER / "alerts.yaml")],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or is_ready(url), 60, every=0.2)
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(30)


def is_ready(url: str) -> bool:
    try:  # nobody may listen yet
        urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
    except OSError:
        return False
    return True


def asked(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as response:
        return json.load(response)["data"]


def questions() -> dict[str, list[str]]:
    """What board and alerts compute, by title: variables as Grafana's "All", ranges of minutes instead of days.

    An alert's comparisons are asked for their truth (`bool`), which has a value whether or not it fires.
    """
    found: dict[str, list[str]] = {}
    for panel in panels():
        for target in panel["targets"]:
            asks = re.sub(r"\$(target|version|run)\b", ".*", target["expr"].replace("$__rate_interval", "2m"))
            found.setdefault(panel["title"], []).append(asks)
    for rule in alerts():
        soon = re.sub(r"offset \d+[mhd]", "", re.sub(r"\[\d+[mhd]\]", "[2m]", rule["expr"]))
        found[rule["alert"]] = [re.sub(r" (<|>|==) ", r" \1 bool ", soon)]
    return found


@pytest.fixture
def endpoint(local_ray, embedded_target, tmp_path):
    from ray import serve as ray_serve

    from jobs.deploy import deploy

    drafter = Drafter(drafter_config(embedded_target, block_size=4), *load_vocabulary(embedded_target))
    folder = save_drafter(drafter, tmp_path / "drafter", {"target_hash": target_hash(embedded_target)})
    yield deploy(ServeConfig(target=str(embedded_target), drafter=str(folder), port=free_port(), max_length=512))
    ray_serve.shutdown()


def test_every_expression_has_a_value_or_a_reason_to_have_none(local_ray, endpoint, tmp_path):
    made: Any = local_ray.remote(num_cpus=0)(Trainer)
    trainer, done = made.remote(), threading.Event()

    def load() -> None:
        while not done.is_set():
            HTTP.post(f"{endpoint}/completions", json=BODY, timeout=120)
            local_ray.get(trainer.work.remote(str(tmp_path)))

    def valueless(url: str) -> set[str]:
        return {
            title
            for title, asks in questions().items()
            for each in asks
            if not asked(url, "query", query=each)["result"]
        }

    nodes = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in local_ray.nodes()]
    loading = threading.Thread(target=load)
    loading.start()
    try:
        with prometheus(tmp_path, nodes) as url:
            try:
                wait_until(lambda: valueless(url) <= EMPTY.keys(), 240, every=5)
            finally:
                print(f"without a value: {sorted(valueless(url))}")
            assert valueless(url) == EMPTY.keys()
            rules = [rule for group in asked(url, "rules")["groups"] for rule in group["rules"]]
            assert sorted(rule["name"] for rule in rules) == sorted(rule["alert"] for rule in alerts())
            assert {rule["health"] for rule in rules} == {"ok"}, rules
            for variable in ("target", "drafter_version"):
                assert asked(url, f"label/{variable}/values")
            assert asked(url, "label/run/values") == ["some-run"]
    finally:
        done.set()
        loading.join()
        local_ray.kill(trainer)
