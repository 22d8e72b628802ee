"""Muon beside AdamW: what each of them moves, the size of a step, and a run that goes on where it was."""

import copy

import pytest
import torch

from pipelines.parallel import whole_optimizer_state
from pipelines.train_config import TrainConfig
from pipelines.train_loop import Progress, new_optimizer, train
from pipelines.train_state import load_state, save_state
from tests.training import VOCAB, config, curve, dataset, drafter, source

STARTED = {"run": 1}


def run(model, optimizer, progress, steps, **hooks):
    settings = config(optimizer="muon", checkpoint_every=4)
    return train(model, optimizer, settings, progress, total_steps=steps, batches_of=source(dataset(8), 2), **hooks)


def test_matrices_of_the_layers_are_muons_and_tables_and_norms_are_not():
    model = drafter()
    optimizer = new_optimizer(model, config(optimizer="muon"))
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = ({named[id(each)] for each in group["params"]} for group in optimizer.param_groups)
    assert muon | adamw == set(named.values())
    assert not muon & adamw
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name for name in muon if len(shapes[name]) != 2 or VOCAB in shapes[name]} == set()
    assert {name for name in adamw if len(shapes[name]) == 2 and VOCAB not in shapes[name]} == set()
    assert "head.embed_proj.2.weight" in adamw
    assert "head.prefix_gru.weight_hh_l0" in muon


def test_a_step_moves_a_matrix_in_all_directions_and_by_as_much_as_adamw():
    model = drafter()
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = new_optimizer(model, config(optimizer="muon", learning_rate=0.01))
    name = "backbone.layers.0.mlp.down_proj.weight"
    gradient = torch.randn(before[name].shape[0], 1) @ torch.randn(1, before[name].shape[1])  # of one direction
    gradient += 0.01 * torch.randn_like(gradient)
    for key, parameter in model.named_parameters():
        parameter.grad = gradient.clone() if key == name else torch.zeros_like(parameter)
    optimizer.step()
    moved = before[name].detach() - dict(model.named_parameters())[name].detach()
    given, values = torch.linalg.svdvals(gradient), torch.linalg.svdvals(moved)
    assert given[-1] < 0.01 * given[0]
    assert values[-1] > 0.1 * values[0]
    assert moved.square().mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.35)


def test_a_run_goes_on_where_its_checkpoint_was(tmp_path):
    whole_model = drafter()
    whole = run(whole_model, new_optimizer(whole_model, config(optimizer="muon")), Progress(), 10)
    model = drafter()
    optimizer = new_optimizer(model, config(optimizer="muon"))

    def stop(progress: Progress) -> None:
        save_state(tmp_path / "checkpoint", model, whole_optimizer_state(optimizer), progress, STARTED)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, optimizer, Progress(), 10, on_checkpoint=stop)
    again = drafter()
    optimizer = new_optimizer(again, config(optimizer="muon"))
    progress = load_state(tmp_path / "checkpoint", again, optimizer, STARTED)
    assert curve(run(again, optimizer, progress, 10)) == curve(whole)
    for name, value in whole_model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_muon_has_no_shares_of_matrices():
    with pytest.raises(ValueError, match=r"train\.shard=false"):
        TrainConfig(optimizer="muon", shard=True)
