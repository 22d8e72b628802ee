"""A version's stored acceptance: taken at its gate, asked for when a replica loads it; damage is refused by it."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_core.checkpoint import load_drafter
from domino_core.decode import Acceptance
from domino_core.self_check import Sample, SelfCheck, shortfall, take_samples
from domino_core.target import load_target, load_tokenizer
from serve.config import ServeConfig
from serve.follower import NotYetError
from serve.registry_alias import Version
from serve.server import Server
from tests.trained import train_drafter, written_texts

PROMPTS = ["import os\n\ndef ", "class Reader:\n    def __init__", "for name in sorted(", "def read(path):"]


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(embedded_target):
    tokenizer = load_tokenizer(embedded_target)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def trained(embedded_target, target, prompts, tmp_path_factory):
    texts = written_texts(target, prompts, 64)
    return train_drafter(tmp_path_factory.mktemp("trained") / "drafter", embedded_target, texts, 25)


@pytest.fixture(scope="module")
def check(target, trained, prompts):
    return take_samples(target, load_drafter(trained, target.embed_VD, target.lm_head_VD), prompts)


@pytest.fixture(scope="module")
def shuffled(trained, tmp_path_factory):
    """The same numbers in each tensor, in another order: it loads, and drafts noise."""
    folder = tmp_path_factory.mktemp("shuffled") / "drafter"
    folder.mkdir()
    for file in trained.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    mixed = {name: w.flatten()[torch.randperm(w.numel())].view(w.shape).contiguous() for name, w in weights.items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def serving(embedded_target, **changes) -> Server:
    settings = {"target": str(embedded_target), "drafter": "none", "max_rows": 2, "max_length": 512}
    return Server(ServeConfig(**(settings | changes)))


def test_check_is_what_was_accepted_and_survives_json(check, prompts):
    assert [list(sample.prompt_ids) for sample in check.samples] == prompts
    assert all(sample.rounds > 5 for sample in check.samples)
    assert check.expected(check.requests(512), None) > 0.8  # it has learnt these texts
    assert SelfCheck.from_json(check.to_json()) == check
    assert check.requests(40) == []  # 48 tokens of answer do not fit


@pytest.mark.parametrize("changes", [{}, {"num_verify": 2}, {"num_verify": "auto"}, {"dtype": "bfloat16"}])
def test_the_measured_weights_are_let_in_and_shuffled_ones_refused(embedded_target, trained, shuffled, check, changes):
    """Whatever the replica verifies a round, and in the other type. The version before stays."""
    server = serving(embedded_target, **changes)
    check = replace(check, samples=check.samples[:2])  # decoding noise takes its time
    server.accept(trained, Version(number="1", source="s", self_check=check.to_json()))
    live = server.loop.live
    assert live.version == "1"
    assert live.engine.num_verify == changes.get("num_verify")
    assert live.figures.steps == {}  # not counted as anybody's requests
    with pytest.raises(ValueError, match=r"self-check: \d+ drafts accepted in \d+ rounds of the stored prompts"):
        server.accept(shuffled, Version(number="2", source="t", self_check=check.to_json()))
    assert server.loop.live is live
    page = server.metrics_page().decode()
    assert 'vllm:spec_decode_drafter_refusals_total{drafter_version="2"' in page
    assert 'refusals_total{drafter_version="1"' not in page
    server.close()


def test_a_check_that_cannot_be_read_refuses_and_none_says_so_in_the_log(embedded_target, shuffled, caplog):
    server = serving(embedded_target)
    with pytest.raises(ValueError, match="gate the version again"):
        server.accept(shuffled, Version(number="2", source="t", self_check='{"samples": 3}'))
    with caplog.at_level("WARNING", logger="ray.serve.domino"):
        server.accept(shuffled, Version(number="2", source="t"))
    assert "no self-check stored" in caplog.text
    assert server.loop.live.version == "2"
    server.close()


def test_lack_of_room_is_no_refusal(embedded_target, trained, monkeypatch):
    server = serving(embedded_target)
    monkeypatch.setattr(type(server.loop), "draining", "1")
    with pytest.raises(NotYetError):
        server.accept(trained, Version(number="2", source="t"))
    assert b"refusals_total{" not in server.metrics_page()
    server.close()


def counted(rounds: int, accepted: int) -> Acceptance:
    return Acceptance(rounds=rounds, accepted=accepted)


@pytest.mark.parametrize(
    ("found", "expected", "fine"),
    [
        (counted(100, 200), 2.0, True),
        (counted(100, 141), 2.0, True),  # texts part at a near-tie, the rest is another text
        (counted(100, 139), 2.0, False),
        (counted(150, 0), 2.0, False),
        (counted(100, 320), 2.0, True),
        (counted(100, 25), 0.5, False),  # 50 expected: chance lets pass 28.8
        (counted(100, 29), 0.5, True),
        (counted(100, 0), 0.05, True),  # so poor a drafter that its damage would not show
        (counted(100, 0), 0.0, True),
        (counted(0, 0), 2.0, True),
    ],
)
def test_what_is_short(found, expected, fine):
    assert (shortfall(found, expected) == "") is fine


def test_fewer_verified_drafts_are_compared_with_the_first_ones():
    check = SelfCheck(max_tokens=4, samples=(Sample(prompt_ids=(1,), rounds=10, accepted_at=(9, 6, 3)),))
    requests = check.requests(64)
    assert [check.expected(requests, verified) for verified in (1, 2, None)] == [0.9, 1.5, 1.8]
    assert json.loads(check.to_json())["samples"][0]["accepted_at"] == [9, 6, 3]
