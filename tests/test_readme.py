"""The README against the repository: its figures are those of the stored results, its commands and files exist."""

import json
import re
from pathlib import Path

import pytest

from jobs import smollm2
from jobs.smollm2_tables import tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ("quickstart.json", "quickstart_h100.json")
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_table_is_the_stored_results():
    demo, longer = (json.loads((ROOT / "docs" / "results" / name).read_text()) for name in RESULTS)
    for arms in zip(demo["arms"], longer["arms"], strict=True):
        cells = [f"{arm['tau']:.2f} | {arm['tokens_per_s']:.0f} | {arm['speedup']:.2f}×" for arm in arms]
        assert arms[0]["name"] == arms[1]["name"]
        line = f"| {arms[0]['name']} | {cells[0]} | {cells[1]} |"
        assert line in README, line
    for result in (demo, longer):
        assert f"{result['num_prompts']} held-out prompts, {result['optimiser_steps']:,} steps" in README
        assert result["greedy_identical"] is True
    assert f"{demo['run_seconds'] / 60:.1f} minutes" in README
    assert f"{demo['peak_rss_gb']:.1f} GB" in README
    assert demo["environment"]["cpu"] in README


def speedups(points: dict, taus: list[str]) -> str:
    return " | ".join(f"{points[tau]['speedup']:.2f}×" for tau in taus)


def test_decoding_tells_the_stored_benchmark():
    result = json.loads((ROOT / "docs" / "results" / "decode_h100.json").read_text())
    page, taus = (ROOT / "docs" / "decoding.md").read_text(), ["3.87", "5.18", "7.17", "10.03"]
    lines = [
        f"| {name} | {part['ms']:.2f} | {part['floor_ms']:.2f} |"
        for name, part in result["parts"]["qwen3_8b"].items()
        if not name.startswith("verify") or name == "verify, 17 tokens"
    ]
    for context, point in result["single"].items():
        lines.append(f"| {int(context):,} | {point['plain']['tokens_per_s']:.0f} | {speedups(point['domino'], taus)} |")
    for rows, point in result["load"].items():
        lines.append(f"| {rows} | {point['plain']['tokens_per_s']:.0f} | {speedups(point['auto'], taus)} |")
    for line in lines:
        assert line in page, line
    first = result["single"]["128"]
    rates = " | ".join(f"{first['domino'][tau]['tokens_per_s']:.0f}" for tau in taus)
    assert f"| tokens/s | {first['plain']['tokens_per_s']:.0f} | {rates} |" in README
    assert f"| against plain | 1.00× | {speedups(first['domino'], taus)} |" in README


def test_training_tells_the_stored_benchmark():
    result = json.loads((ROOT / "docs" / "results" / "training_h100.json").read_text())
    page, table = (ROOT / "docs" / "training.md").read_text(), result["training"]["qwen3_8b"]
    for name, line in table.items():
        if name == "parts":
            for part in ("backbone, both ways", "losses, both ways", "clip and optimiser"):
                assert f"{line[part]['ms']:.1f} | {line[part]['floor_ms']:.1f} |" in page, part
            continue
        cells = [f"{line[key]:.1f}" for key in ("ms_per_sample", "floor_ms_per_sample", "samples_per_s")]
        cells += [f"{line['tflop_per_s']:.0f}", f"{line['mfu']:.1%}".replace("%", " %"), f"{line['peak_gb']:.1f}"]
        assert f" | {' | '.join(cells)} |" in page, name


def test_serving_tells_the_stored_benchmarks():
    page = (ROOT / "docs" / "vllm.md").read_text()
    for size in ("8b", "smollm2"):
        result = json.loads((ROOT / "docs" / "results" / f"serving_{size}_h200.json").read_text())
        for name, points in result["arms"].items():
            if name in result["errors"]:
                continue
            ratios = [point.get("speedup") for point in points.values()]
            rates = [f"{point['tokens_per_s']:,.0f}" for point in points.values()]
            both = [f"{rate} (×{ratio:.2f})" for rate, ratio in zip(rates, ratios, strict=True) if ratio]
            imposed = " imposed" if "τ" in name else ""
            line = f"| {name}{imposed} | {' | '.join(both or rates)} |"
            assert line in page, line
            waits = [f"{point['ttft_p50_ms']:.0f} / {point['itl_p99_ms']:.1f}" for point in points.values()]
            title = {"8b": "8B", "smollm2": "SmolLM2"}[size]
            line = f"| {title}, {name}{imposed} | {' | '.join(waits)} |"
            assert line in page or name.startswith("dflash"), line
            if size == "8b" and name == "plain":
                assert f"| plain vLLM, tokens/s | {' | '.join(rates)} |" in README
            elif name.startswith("domino, τ"):
                line = f"| {name.capitalize()} | {' | '.join(f'{ratio:.2f}×' for ratio in ratios)} |"
                assert line in README, line


def test_training_tells_the_stored_whole_runs():
    result = json.loads((ROOT / "docs" / "results" / "pipeline_h200.json").read_text())
    page = (ROOT / "docs" / "training.md").read_text()
    for arm in ("stream", "whole", "sharded"):
        found = result[arm]
        told = (
            f"{found['samples_per_s']:.2f} | {found['tokens_per_s']:,.0f} | {found['estimate']['samples_per_s']:.2f} | "
        )
        assert told + f"{found['ratios']['samples_per_s']:.2f} | {found['peak_gb']:.1f} |" in page, arm
        assert all(0.8 <= ratio <= 1.2 for ratio in found["ratios"].values()), "the page says that the estimate holds"


def test_exactness_tells_the_stored_report():
    report = json.loads((ROOT / "docs" / "results" / "verify_tiny.json").read_text())
    gap = max(check["figures"].get("largest_gap", 0.0) for check in report["checks"])
    told = f"{report['sampling_draws']:,} draws, {report['defects']} defects, smallest corrected p "
    told += f"{report['min_corrected_p']:.2g}, {report['near_ties']} near-ties in bfloat16 of at most {gap:.2f} nats"
    page = (ROOT / "docs" / "exactness.md").read_text()
    assert told in page
    report = json.loads((ROOT / "docs" / "results" / "verify_h200.json").read_text())
    assert report["complete"]
    assert report["untested"] == 0
    assert f"{report['sampling_draws']:,} draws, {report['defects']} defects, nothing untested" in page


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


def test_the_experiments_page_has_the_tables_of_its_result():
    result = json.loads((ROOT / "docs" / "results" / "smollm2.json").read_text())
    page = (ROOT / "docs" / "experiment.md").read_text()
    for name, lines in tables(result).items():
        assert lines in page, name
    arms = result["arms"]
    means = [f"{arms[name]['tau']['mean']:.2f}" for name in ("dflash", "domino", "domino_muon_8")]
    gains = [f"{arms[name]['gain_over_dflash']['mean']:+.1%}" for name in ("domino", "domino_muon_8")]
    over_twin = arms["domino_muon_8"]["gain_over_twin"]
    twin = f"{over_twin['mean']:+.1%} ± {over_twin['interval']:.1%}"
    assert f"τ {means[0]} for DFlash, {means[1]} for Domino ({gains[0]}), {means[2]} with" in README
    assert f"({gains[1]}; {twin} over such a DFlash)" in README


def test_a_result_that_is_not_there_has_no_tables(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        smollm2.main(["table", "--out", str(tmp_path / "none.json")])


def test_a_result_of_other_arms_has_the_tables_that_it_fills():
    result = json.loads((ROOT / "docs" / "results" / "smollm2.json").read_text())
    found = tables({"arms": {"medusa": result["arms"]["medusa"]}})
    assert sorted(found) == ["arms", "block sizes", "data"]
    assert "| medusa |" in found["arms"]
