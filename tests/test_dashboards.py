"""Board and alerts: every metric that they name is one that we or Ray export, and operations.md knows every alert.

tests/test_serve_cluster.py compares the same names, and the labels that select them, with a node's metrics port.
"""

import inspect
import re
from pathlib import Path

import pytest

from pipelines import acceptance_probe
from pipelines.supply import SupplyWindow
from pipelines.train_gauges import PREFIX, TrainGauges
from pipelines.train_loop import Progress, new_optimizer, train
from serve.metrics import Metrics
from tests import training
from tests.dashboards import alerts, board, expressions, panels, scraped, used
from tests.serving import wait_until

ROOT = Path(__file__).resolve().parent.parent


def served() -> set[str]:
    """What a replica's counters and histograms are called on Ray's metrics port."""
    names = set()
    for family in Metrics("name", "hash", with_ray=False).registry.collect():
        name = f"ray_{family.name.replace(':', '_')}"
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [])
        names |= {name + ending for ending in endings}
    return names


def logged(folder: Path) -> set[str]:
    """What a run logs, from a run of one step, with what the stream adds to it."""
    model, settings = training.drafter(), training.config(steps=1)
    rows = training.source(training.dataset(4), settings.batch_size)
    lines: list[dict[str, float]] = []
    train(
        model,
        new_optimizer(model, settings),
        settings,
        Progress(),
        total_steps=1,
        batches_of=rows,
        on_log=lines.append,
    )
    assert '"measured_tau"' in inspect.getsource(acceptance_probe)
    return {*lines[-1], *SupplyWindow(folder).reduce(), "measured_tau"}


def test_every_metric_is_one_that_is_exported(tmp_path):
    trained = {f"ray_{PREFIX}{name}" for name in logged(tmp_path)}
    for name in used():
        if name.startswith("ray_vllm_"):
            assert name in served()
        elif name.startswith("ray_domino_"):
            assert name in trained
        else:
            assert name.startswith(("ray_serve_", "ray_node_")), name


def test_counters_are_read_as_rates():
    for expression in expressions():
        for name in re.findall(r"ray_\w+_(?:total|bucket|sum)\b", expression):
            # ray_node_mem_total: bytes that a node has
            assert name == "ray_node_mem_total" or re.search(rf"rate\({name}\b", expression), expression


def test_the_board_shows_what_it_promises():
    titles = [panel["title"] for panel in panels()]
    for wanted in ("by position and version", "Speed-up", "Verified", "Queue", "Time to first token", "Supply and dem"):
        assert [title for title in titles if wanted in title], wanted
    everything = board()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken = [
        (panel["gridPos"]["x"] + across, panel["gridPos"]["y"] + down)
        for panel in everything
        for across in range(panel["gridPos"]["w"])
        for down in range(panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken), "panels overlap"
    assert max(x for x, _ in taken) == 23
    known = {f"${variable['name']}" for variable in board()["templating"]["list"]} | {"$__rate_interval"}
    for expression in expressions():
        assert set(re.findall(r"\$\w+", expression)) <= known


def test_alerts_are_whole_and_operations_explains_each():
    page = (ROOT / "docs" / "operations.md").read_text()
    explained = re.findall(r"^\| `(Domino\w+)` \|", page, re.M)
    assert explained == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))


@pytest.mark.cluster
def test_a_runs_metrics_are_on_rays_metrics_port(local_ray):
    class Worker:
        def __init__(self) -> None:
            self.gauges = TrainGauges("some-run")

        def log(self, step: int) -> None:
            self.gauges.set({"step": step, "final_loss": 2.5})

    worker = local_ray.remote(num_cpus=0)(Worker).remote()
    local_ray.get(worker.log.remote(10))
    local_ray.get(worker.log.remote(20))
    wait_until(lambda: "run" in scraped(local_ray).get(f"ray_{PREFIX}final_loss", ()), 60, every=0.5)
    nodes = {name for name in used() if name.startswith("ray_node_")}
    wait_until(lambda: nodes <= scraped(local_ray).keys(), 60, every=0.5)
    local_ray.kill(worker)
