"""The report page and what stands behind a figure: self-contained, true to the result, honest about the machine."""

from html.parser import HTMLParser

import pytest

from domino_core.checkpoint import provenance
from jobs.environment import PeakMemory, environment
from jobs.report import write_report


def result(**changes):
    steps = [
        {
            "step": step,
            "lambda_base": 1 - step / 20,
            "final_loss": 5 - step / 10,
            "base_loss": 5 - step / 12,
            "final_accuracy": step / 40,
            "base_accuracy": step / 50,
        }
        for step in (10, 20)
    ]
    arms = [
        {"name": "plain", "tau": 1.0, "tokens_per_s": 400.0, "speedup": 1.0},
        {"name": "Domino", "tau": 2.345, "tokens_per_s": 777.0, "speedup": 1.94, "acceptance_by_position": [0.8, 0.5]},
        {"name": "DFlash", "tau": 1.987, "tokens_per_s": 666.0, "speedup": 1.66, "acceptance_by_position": [0.7, 0.3]},
    ]
    return {
        "target_name": "tiny-qwen3",
        "registered_model": "domino-tiny-qwen3",
        "version": "7",
        "run_seconds": 421.0,
        "greedy_identical": True,
        "num_prompts": 32,
        "arms": arms,
        "history": {"Domino": steps, "DFlash": steps},
        "samples": ["def f(a, b):\n⟶\n    return a < b & 1"],
        "environment": environment(),
    } | changes


class Page(HTMLParser):
    """Collects the text, the addresses that a browser would fetch, and unclosed elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.fetched, self.open = "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        addresses = [value or "#" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.fetched += [address for address in addresses if address[0] != "#"]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        self.words += data


def test_page_is_self_contained_and_shows_the_figures(tmp_path):
    path = tmp_path / "new" / "index.html"
    write_report(path, result())
    text = path.read_text()
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert text.count("<svg") == 3
    for shown in ("2.35", "777", "1.94×", "domino-tiny-qwen3 version 7", "every output is", "return a < b & 1"):
        assert shown in page.words, shown
    assert "<td>1.99</td><td>666</td>" in text


def test_page_says_when_outputs_differ(tmp_path):
    write_report(tmp_path / "index.html", result(greedy_identical=False))
    assert "NOT every output is" in (tmp_path / "index.html").read_text()


def test_environment_names_machine_software_and_commit():
    found = environment()
    assert found["cores"] >= 1
    assert found["memory_gb"] > 0
    assert found["cpu"]
    assert {"python", "torch", "ray", "transformers", "mlflow"} <= found.keys()
    assert found["commit"] == provenance()["commit"]


def test_peak_memory_sees_what_was_there_in_between():
    memory = PeakMemory(period=0.02)
    memory.start()
    block = bytearray(b"x" * (300 << 20))
    while memory.peak_bytes < len(block):
        pass
    del block
    assert memory.stop() == pytest.approx(memory.peak_bytes / 1e9)
    assert memory.peak_bytes > 300 << 20
