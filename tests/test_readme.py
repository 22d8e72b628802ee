"""The README against the repository: its figures are those of the stored results, its commands and files exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_table_is_the_stored_result():
    result = json.loads((ROOT / "docs" / "results" / "quickstart.json").read_text())
    for arm in result["arms"]:
        line = f"| {arm['name']} | {arm['tau']:.2f} | {arm['tokens_per_s']:.0f} | {arm['speedup']:.2f}× |"
        assert line in README, line
    assert f"{result['num_prompts']} held-out prompts" in README
    assert f"{result['run_seconds'] / 60:.1f} minutes" in README
    assert f"{result['peak_rss_gb']:.1f} GB" in README
    assert result["environment"]["cpu"] in README
    assert result["greedy_identical"] is True


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_links_exist(document):
    text = document.read_text()
    for module in set(re.findall(r"python -m (jobs\.\w+)", text)):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    for target in set(re.findall(r"\]\((?!https?://)([^)#]+)\)", text)):
        assert (document.parent / target).exists(), target
    # Files named in code font with their folder, such as `pipelines/fit.py`.
    for named in set(re.findall(r"`((?:domino_core|pipelines|serve|jobs|docs|assets|requirements)/[\w./-]+)`", text)):
        assert (ROOT / named).exists() or named.startswith("docs/results"), named
