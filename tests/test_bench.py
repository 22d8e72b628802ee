"""jobs.bench: its tables hold every arm that was asked for, and its result says where it comes from."""

import json

import pytest
import torch

from domino_core.checkpoint import save_drafter
from domino_core.drafter import Drafter
from domino_core.target import load_target
from jobs import bench
from tests.serving import drafter_config

SMALL = ["evaluate.num_prompts=2", "evaluate.max_tokens=8", "evaluate.repeats=1"]


@pytest.fixture(scope="module")
def arguments(embedded_target, tmp_path_factory) -> list[str]:
    """An untrained drafter and what it is measured on."""
    target = load_target(embedded_target, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("bench") / "drafter"
    save_drafter(Drafter(drafter_config(embedded_target), target.embed_VD, target.lm_head_VD), folder, {})
    prompts = embedded_target / "prompts" / "heldout.jsonl"
    return ["--drafter", str(folder), f"target={embedded_target}", f"eval_data={prompts}", *SMALL]


def test_rules_at_each_temperature(arguments, tmp_path, capsys):
    out = tmp_path / "deep" / "rules.json"
    bench.main([*arguments, "--rules", "--temperatures", "0.5,1", "--out", str(out)])
    found = json.loads(out.read_text())
    assert list(found["rules"]) == ["0.5", "1.0"]
    for rules in found["rules"].values():
        assert {rule: figures["identical"] for rule, figures in rules.items()} == {
            "shared_noise": True, "greedy_draft": True, "rejection": None,
        }  # fmt: skip
        assert all(figures["tau"] >= 1 and figures["tokens_per_s"] > 0 for figures in rules.values())
    assert found["command"].startswith("python -m jobs.bench --drafter ")
    assert found["environment"]["cores"] >= 1
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + 2 * 3
    assert printed[3].endswith("no claim")


def test_concurrencies(arguments, tmp_path):
    bench.main([*arguments, "--concurrency", "1,3", "--out", str(tmp_path / "rows.json")])
    found = json.loads((tmp_path / "rows.json").read_text())["concurrency"]
    assert list(found) == ["1", "3"]
    assert all(figures["identical"] for figures in found.values())
    assert found["3"]["num_tokens"] > found["1"]["num_tokens"]  # a prompt for each row


@pytest.mark.parametrize("text", ["0", "0.5,hot", "3", "nan", ""])
def test_temperatures_that_are_none_are_refused(arguments, text):
    with pytest.raises(ValueError, match="--temperatures"):
        bench.main([*arguments, "--rules", "--temperatures", text])
