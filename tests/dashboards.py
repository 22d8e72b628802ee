"""What the board and the alerts ask Prometheus for, and what a node's metrics port has."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import yaml

CLUSTER = Path(__file__).resolve().parent.parent / "jobs" / "cluster"
METRIC = re.compile(r"\b(ray_\w+)(?:\{([^}]*)\})?")


def board() -> dict[str, Any]:
    return json.loads((CLUSTER / "grafana.json").read_text())


def alerts() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((CLUSTER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in alerts()]


def selectors(text: str) -> dict[str, set[str]]:
    """Every metric in an expression, with the labels that it is selected by."""
    found: dict[str, set[str]] = {}
    for name, labels in METRIC.findall(text):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", labels))
    return found


def used() -> dict[str, set[str]]:
    """All metrics of board and alerts, with the labels that they are selected by anywhere."""
    together: dict[str, set[str]] = {}
    for expression in expressions():
        for name, labels in selectors(expression).items():
            together.setdefault(name, set()).update(labels)
    return together


def scraped(ray: Any) -> dict[str, set[str]]:
    """Names and labels of the samples on the metrics ports of a Ray that is running."""
    found: dict[str, set[str]] = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            for line in page.read().decode().splitlines():
                if not line.startswith("#"):
                    name, _, labels = line.rpartition(" ")[0].partition("{")
                    found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found
