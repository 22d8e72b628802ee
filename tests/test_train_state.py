"""Training checkpoints: whole or absent, exact, and not taken by another run."""

import pytest
import torch

from pipelines.train_loop import Progress
from pipelines.train_state import changed, load_state, read_progress, save_state

STARTED = {"total_steps": 10, "drafter.block_size": 8, "drafter.target_layer_ids": [1, 2]}


def trained(steps: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step + 1))).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


def test_everything_comes_back(tmp_path):
    model, optimizer = trained(3)
    history = [{"step": 3, "final_loss": 0.1}]
    progress = Progress(step=3, epoch=1, samples=9, acknowledged=["b", "a"], skipped=["step 2: ..."], history=history)
    save_state(tmp_path / "checkpoint", model, optimizer.state_dict(), progress, STARTED)
    other, other_optimizer = trained(0)
    assert load_state(tmp_path / "checkpoint", other, other_optimizer, STARTED) == progress
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    # The moments came along: one more step is the same one.
    for net, opt in ((model, optimizer), (other, other_optimizer)):
        opt.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        opt.step()
    assert torch.equal(model.weight, other.weight)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    model, optimizer = trained(1)
    save_state(tmp_path / "checkpoint", model, optimizer.state_dict(), Progress(step=1), STARTED)
    with pytest.raises(ValueError, match=r"another run: drafter\.block_size: 8 -> 16"):
        load_state(tmp_path / "checkpoint", model, optimizer, STARTED | {"drafter.block_size": 16})
    assert changed({"a": 1, "b": 2}, {"b": 2, "c": 3}) == ["a: 1 -> None", "c: None -> 3"]


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model, optimizer = trained(1)
    save_state(tmp_path / "checkpoint", model, optimizer.state_dict(), Progress(step=1), STARTED)

    def full_disk(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_state(tmp_path / "checkpoint", model, optimizer.state_dict(), Progress(step=2), STARTED)
    assert read_progress(tmp_path / "checkpoint")["progress"]["step"] == 1
