"""Measuring a drafter: τ and counters, identity with plain decoding, the head's share, prompts from a file."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from domino_core.checkpoint import read_provenance, save_drafter
from domino_core.config import DrafterConfig
from domino_core.decode import Acceptance
from domino_core.drafter import Drafter
from domino_core.sampling import gumbel_noise
from domino_core.target import load_target
from pipelines import evaluate
from pipelines.evaluate import EvalConfig, measure, measure_arms, measure_rules, placement, without_head
from pipelines.gate import GateConfig, identity_failure
from pipelines.measurement import Mismatch, note_measurement, summary, write_measurement

PROMPTS = [(1, 2, 3), (5, 8, 13, 21, 34), (40, 41), (7,) * 9]


@pytest.fixture(scope="module")
def target(tiny_target_dir):
    return load_target(tiny_target_dir)


@pytest.fixture(scope="module")
def drafter(target):
    torch.manual_seed(0)
    config = DrafterConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, num_target_layers=4, target_layer_ids=(1, 2), mask_token_id=96,
        block_size=4, emb_dim=8, gru_hidden_dim=16, dtype="float32",
    )  # fmt: skip
    return Drafter(config, target.embed_VD, target.lm_head_VD).eval()


def settings(**changes) -> EvalConfig:
    return EvalConfig(**({"max_tokens": 20, "repeats": 2, "device": "cpu"} | changes))


@pytest.mark.parametrize(("concurrency", "temperature"), [(1, 0.0), (3, 0.0), (4, 0.9)])
def test_outputs_are_the_targets_own(target, drafter, concurrency, temperature):
    found = measure(target, drafter, PROMPTS, settings(concurrency=concurrency, temperature=temperature))
    assert found.identical
    assert found.greedy_identical is (True if temperature == 0 else None)
    assert found.num_tokens == 20 * len(PROMPTS)
    counters = found.acceptance
    assert counters["drafted"] == 4 * counters["rounds"]
    assert found.tau == 1 + counters["accepted"] / counters["rounds"]
    assert sum(found.acceptance_by_position) == pytest.approx(found.tau - 1)
    assert len(found.plain_seconds) == len(found.seconds) == 2
    assert found.speedup == pytest.approx(found.tokens_per_s / found.plain_tokens_per_s)


def test_arms_share_prompts_and_baseline(target, drafter):
    arms = {"with": drafter, "without": without_head(drafter)}
    found = measure_arms(target, arms, PROMPTS, settings())
    assert list(found) == ["with", "without"]
    assert found["with"].plain_seconds == found["without"].plain_seconds
    assert found["with"].seconds != found["without"].seconds
    for name, arm in arms.items():
        alone = measure(target, arm, PROMPTS, settings(repeats=1))
        assert (found[name].tau, found[name].acceptance, found[name].identical) == (alone.tau, alone.acceptance, True)


def test_rules_are_measured_beside_one_baseline_and_rejection_claims_no_identity(target, drafter):
    found = measure_rules(target, drafter, PROMPTS, settings(temperature=3.0))
    assert list(found) == ["shared_noise", "greedy_draft", "rejection"]
    assert [each.identical for each in found.values()] == [True, True, None]
    assert {each.settings["rule"]: each.plain_seconds for each in found.values()} == {
        rule: found["rejection"].plain_seconds for rule in found
    }
    for rule, each in found.items():
        alone = measure(target, drafter, PROMPTS, settings(temperature=3.0, rule=rule, repeats=1))
        assert (each.acceptance, each.num_tokens) == (alone.acceptance, alone.num_tokens)
    taus = {rule: each.tau for rule, each in found.items()}
    assert taus["shared_noise"] > 1.2 > taus["greedy_draft"]  # so hot that the noise, which is shared, decides
    assert taus["rejection"] not in (taus["shared_noise"], taus["greedy_draft"])
    assert "not compared" in summary(found["rejection"])
    assert identity_failure(found["rejection"], GateConfig()) is None
    assert measure(target, drafter, PROMPTS, settings(rule="rejection", repeats=1)).greedy_identical is True


def test_measurement_is_json(target, drafter, tmp_path):
    found = measure(target, drafter, PROMPTS[:1], settings(repeats=1))
    stored = json.loads(write_measurement(tmp_path / "deep" / "evaluation.json", found).read_text())
    assert stored["tau"] == found.tau
    assert stored["greedy_identical"] is True
    assert stored["settings"]["max_tokens"] == 20


def test_a_difference_is_found_and_judged_by_the_targets_logits(target, drafter, monkeypatch):
    """An engine that swaps one token of its speculative output must be caught, with the right place."""
    genuine = evaluate._pass

    def swapping(target, drafter, prompts, config):
        outputs, seconds, acceptance = genuine(target, drafter, prompts, config)
        if drafter is not None:
            outputs = [output.copy() for output in outputs]
            outputs[-1][7] = (outputs[-1][7] + 1) % 97
        return outputs, seconds, acceptance

    monkeypatch.setattr(evaluate, "_pass", swapping)
    found = measure(target, drafter, PROMPTS, settings(repeats=1))
    assert not found.identical
    (mismatch,) = found.mismatches
    assert mismatch.plain is not None
    assert (mismatch.prompt, mismatch.position) == (3, 7)
    assert mismatch.speculative == (mismatch.plain + 1) % 97
    # The gap is that of the target's logits of the two tokens, after the shared part.
    plain = genuine(target, None, PROMPTS, settings())[0][3]
    ids = torch.tensor([[*PROMPTS[3], *plain[:7]]])
    hidden, _ = target.forward(ids, torch.zeros(1, dtype=torch.long), target.new_cache(1, ids.shape[1]))
    logits = target.logits(hidden[0, -1])
    assert int(logits.argmax()) == mismatch.plain
    assert mismatch.gap == pytest.approx(float(logits[mismatch.plain] - logits[mismatch.speculative]), abs=1e-4)
    assert found.largest_gap == mismatch.gap


def test_the_gap_of_a_sampled_choice_is_between_what_was_compared(target):
    """The noise counts: the gap is what the logits would have to change by for another draw."""
    config = settings(temperature=0.8, seed=5)
    plain, _, _ = evaluate._pass(target, None, PROMPTS, config)
    other = [*plain[2][:4], (plain[2][4] + 1) % 97, *plain[2][5:]]
    gap = evaluate._first_mismatch(target, 2, PROMPTS[2], plain[2], other, config).gap
    ids = torch.tensor([[*PROMPTS[2], *plain[2][:4]]])
    hidden, _ = target.forward(ids, torch.zeros(1, dtype=torch.long), target.new_cache(1, ids.shape[1]))
    noise = gumbel_noise(torch.tensor([7]), torch.tensor([4]), 97)[0]
    scores = target.logits(hidden[0, -1]) + 0.8 * noise
    assert int(scores.argmax()) == plain[2][4]
    assert gap == pytest.approx(float(scores[plain[2][4]] - scores[other[4]]), abs=1e-4)


def test_output_that_ends_early_is_a_difference(target):
    found = evaluate._first_mismatch(target, 0, (1, 2), [5, 6, 7], [5, 6], settings())
    assert (found.position, found.plain, found.speculative) == (2, 7, None)
    assert isinstance(found, Mismatch)


def test_without_head_shares_the_backbone(target, drafter):
    bare = without_head(drafter)
    assert bare.head is None
    assert bare.config == dataclasses.replace(drafter.config, head=False)
    assert bare.backbone is drafter.backbone
    assert drafter.head is not None
    assert measure(target, bare, PROMPTS, settings(repeats=1)).identical


def test_no_prompts_is_an_error(target, drafter):
    with pytest.raises(ValueError, match="no prompts"):
        measure(target, drafter, [], settings())


def test_prompts_are_cut_where_the_answer_begins(embedded_target, tmp_path):
    from domino_core.target import load_tokenizer, render_chat

    tokenizer = load_tokenizer(embedded_target)
    question = [{"role": "user", "content": "def f(x):"}]
    rows = [
        {"id": "a", "messages": question},
        {"id": "b", "messages": [*question, {"role": "assistant", "content": "    return x"}]},
        {"id": "c", "messages": question},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = evaluate.held_out_prompts(path, tokenizer, settings(num_prompts=2))
    assert prompts == [tuple(render_chat(tokenizer, question))] * 2


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"evaluate\.device=cuda"):
        placement(settings(device="cuda"))
    assert placement(settings(device="auto")) == (torch.device("cpu"), torch.float32)
    assert placement(settings(dtype="bfloat16"))[1] is torch.bfloat16


def test_positions_of_acceptance():
    counts = Acceptance()
    counts.count(4, 4)
    counts.count(4, 1)
    assert counts.tau == 3.5
    with pytest.raises(ValueError, match=r"evaluate\.repeats"):
        settings(repeats=0)


def test_what_an_engine_does_once_is_not_timed(target, drafter, monkeypatch):
    """With num_verify=auto it measures its rounds first, on a card it captures graphs: here that takes a minute."""
    clock, honest = [0.0], evaluate.Engine.warm_up

    def slow(engine):
        honest(engine)
        clock[0] += 60.0

    monkeypatch.setattr(evaluate.Engine, "warm_up", slow)
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: clock[0] + 0.001 * len(ticks.append(0) or ticks))
    ticks: list[int] = []
    found = measure(target, drafter, PROMPTS, settings(num_verify="auto"))
    assert max(*found.seconds, *found.plain_seconds) < 60.0
    assert clock[0] == 60.0 * 2 * 3  # two arms, a pass before the timed ones


def test_two_measurements_of_one_drafter_are_noted_at_once(target, drafter, tmp_path, monkeypatch):
    """By two commands: neither takes the other's file."""
    folder = save_drafter(drafter, tmp_path / "drafter", {})
    found = measure(target, drafter, PROMPTS[:1], settings(max_tokens=4))
    replaced = Path.replace

    def meanwhile(path, goal):
        monkeypatch.setattr(Path, "replace", replaced)
        note_measurement(folder, found, "other.jsonl")
        return replaced(path, goal)

    monkeypatch.setattr(Path, "replace", meanwhile)
    note_measurement(folder, found, "prompts.jsonl")
    assert read_provenance(folder)["evaluation"]["prompts"] == "prompts.jsonl"
