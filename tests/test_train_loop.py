"""The training loop as a plain function: denominators, resume, ranks, curricula and the non-finite guard."""

import copy
import math
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from domino_core.features import FP8, FeatureMeta, table
from pipelines.batches import join_rows
from pipelines.train_config import TrainConfig
from pipelines.train_loop import Progress, TrainingStoppedError, draw_blocks, train
from tests.training import HIDDEN, collate, config, curve, dataset, drafter, source


def run(
    model: torch.nn.Module,
    settings: TrainConfig,
    total_steps: int,
    batches_of: Any,
    progress: Progress | None = None,
    **hooks: Any,
) -> Progress:
    optimizer = hooks.pop("optimizer", None) or torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], weight_decay=0.0
    )
    progress = progress or Progress()
    return train(model, optimizer, settings, progress, total_steps=total_steps, batches_of=batches_of, **hooks)


def test_loss_falls_and_the_schedule_is_followed():
    done = run(drafter(), config(learning_rate=1e-2), 60, source(dataset(8), 4))
    final, base = curve(done), curve(done, "base_loss")
    assert final[-1] < 0.5 * final[0]
    assert base[-1] < 0.5 * base[0]
    lam = curve(done, "lambda_base")
    assert lam[0] == 1.0
    assert lam[30] == pytest.approx(0.5)
    assert lam[-1] == pytest.approx(1 / 60)
    assert curve(done, "learning_rate")[-1] < 1e-4 < max(curve(done, "learning_rate"))
    assert done.history[-1]["final_accepted"] > 2
    assert done.epoch == 29  # two steps an epoch, the last one not left
    assert done.samples == 60 * 4


@pytest.mark.parametrize("head", [True, False])
def test_accumulation_equals_one_large_batch(head):
    rows = dataset(16)
    small = run(drafter(head=head), config(batch_size=2, accumulation=4), 6, source(rows, 2))
    large = run(drafter(head=head), config(batch_size=8), 6, source(rows, 8))
    assert curve(small) == pytest.approx(curve(large), rel=1e-4)
    assert curve(small, "grad_norm") == pytest.approx(curve(large, "grad_norm"), rel=1e-3)


def test_anchors_depend_on_seed_epoch_and_sample_only():
    rows = dataset(4)
    shape = drafter().config
    draw = lambda batch, epoch, seed=1: draw_blocks(  # noqa: E731
        batch, shape, 2.0, config(num_anchors=3, seed=seed), epoch, torch.device("cpu")
    )
    alone = draw(rows[2], 0).rows.anchors_X.tolist()
    together = draw(collate(rows), 0)
    before = sum(len(row.input_ids_T) for row in rows[:2])
    assert together.rows.anchors_X.view(4, 3)[2].tolist() == [before + anchor for anchor in alone]
    assert draw(rows[2], 1).rows.anchors_X.tolist() != alone
    assert draw(rows[2], 0, seed=2).rows.anchors_X.tolist() != alone
    assert together.weight == pytest.approx(sum(draw(row, 0).weight for row in rows))


@pytest.mark.parametrize("stop_at", [3, 4, 8])  # inside an epoch, and at the ends of the first and the second one
def test_resume_continues_the_same_curve(stop_at):
    rows, settings = dataset(8), config(checkpoint_every=stop_at)
    whole_model = drafter()
    whole = run(whole_model, settings, 10, source(rows, 2))

    saved = {}
    model = drafter()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)

    def stop(progress: Progress) -> None:
        if progress.step == stop_at:
            saved.update(model=model.state_dict(), optimizer=optimizer.state_dict(), progress=progress)
            saved.update(copy.deepcopy(saved))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, settings, 10, source(rows, 2), optimizer=optimizer, on_checkpoint=stop)
    assert len(saved["progress"].acknowledged) == 2 * (stop_at - 4 * saved["progress"].epoch)

    again = drafter()
    again.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], weight_decay=0.0)
    optimizer.load_state_dict(saved["optimizer"])
    resumed = run(again, settings, 10, source(rows, 2), saved["progress"], optimizer=optimizer)
    assert curve(resumed) == curve(whole)
    assert resumed.samples == whole.samples
    for name, value in whole_model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_ledger_holds_the_ids_of_the_epoch_in_order():
    ledgers = []
    rows = dataset(6)
    run(
        drafter(),
        config(checkpoint_every=2),
        5,
        source(rows, 2),
        on_checkpoint=lambda p: ledgers.append(p.acknowledged[:]),
    )
    assert ledgers[0] == ["row-0", "row-1", "row-2", "row-3"]
    assert ledgers[1] == ["row-1", "row-2"]  # step 4 is the first one of epoch 1, which starts one row later
    assert ledgers[2] == ["row-1", "row-2", "row-3", "row-4"]


def test_nonfinite_step_is_skipped_named_and_counted():
    rows = dataset(8)
    rows[3].features_TC[4] = math.inf
    model = drafter()
    done = run(model, config(), 4, source(rows, 2))
    assert len(done.skipped) == 1
    assert done.step == 4
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert "row-3" in done.skipped[0]
    assert "row-2" not in done.skipped[0]
    assert done.history[-1]["skipped_steps"] == 1
    assert all(math.isfinite(line["final_loss"]) for line in done.history)


def test_nonfinite_steps_stop_the_run_after_the_limit():
    rows = dataset(8)
    for row in rows:
        row.features_TC[:] = math.nan
    with pytest.raises(TrainingStoppedError, match=r"row-4.*max_nonfinite=2"):
        run(drafter(), config(max_nonfinite=2), 10, source(rows, 2))


def test_an_epoch_without_rows_is_an_error():
    with pytest.raises(TrainingStoppedError, match="epoch 0 gave no rows"):
        run(drafter(), config(), 3, source([], 2))


def test_missing_epoch_ends_training_with_a_checkpoint():
    rows, saved = dataset(4), []
    batches_of = lambda epoch, skip: source(rows, 2)(epoch, skip) if epoch == 0 else None  # noqa: E731
    done = run(drafter(), config(), 10, batches_of, on_checkpoint=lambda p: saved.append(p.step))
    assert done.step == 2
    assert saved == [2]


def test_total_steps():
    assert config(steps=7).total_steps(None) == 7
    assert config(epochs=3, batch_size=2, accumulation=2, num_workers=2).total_steps(17) == 9
    with pytest.raises(ValueError, match=r"train\.steps="):
        config().total_steps(None)
    with pytest.raises(ValueError, match=r"train\.batch_size"):
        config(batch_size=0)


CASES = {"even": (8, None), "uneven": (3, None), "empty": (0, None), "damaged": (8, 2)}
"""Rows of rank 1 (rank 0 has eight), and one that is damaged: number 2 is of rank 1, in its first step."""


def rank_main(rank: int, port: int, out: str) -> None:
    """All runs of two gloo ranks, one after the other: starting processes is what takes time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name, (rows_of_rank_one, damaged) in CASES.items():
        torch.save(ranks_run(rank, rows_of_rank_one, damaged), f"{out}/{name}-{rank}.pt")
    dist.destroy_process_group()


def ranks_run(rank: int, rows_of_rank_one: int, damaged: int | None) -> dict[str, Any]:
    torch.manual_seed(rank)  # DDP must make the ranks equal
    model = torch.nn.parallel.DistributedDataParallel(drafter(), broadcast_buffers=False)
    syncs = []
    model.register_comm_hook(None, lambda state, bucket: (syncs.append(1), average(bucket))[1])
    rows = dataset(16)
    if damaged is not None:
        rows[damaged].features_TC[3] = math.nan
    if rows_of_rank_one < 8:
        mine = rows[:8] if rank == 0 else rows[8 : 8 + rows_of_rank_one]
        batches = source(mine, 2)
    else:
        batches = source(rows, 2, rank, 2)
    saved = []
    done = run(model, config(accumulation=2, checkpoint_every=2), 4, batches,
               on_checkpoint=lambda p: saved.append(p.acknowledged[:]))  # fmt: skip
    state = model.module.state_dict()
    return {"curve": curve(done), "norm": curve(done, "grad_norm"), "state": state, "syncs": len(syncs),
            "saved": saved, "samples": done.samples, "skipped": done.skipped}  # fmt: skip


def average(bucket: Any) -> Any:
    tensor = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks have of every case."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path_factory.mktemp("ranks")
    spawn(rank_main, (port, str(out)), nprocs=2)
    return {name: [torch.load(out / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)] for name in CASES}


def test_two_ranks_equal_one_with_the_double_batch(two_ranks):
    first, second = two_ranks["even"]
    one_model = drafter()
    one = run(one_model, config(accumulation=4), 4, source(dataset(16), 2))
    assert first["curve"] == second["curve"] == pytest.approx(curve(one), rel=1e-4)
    assert first["norm"] == pytest.approx(curve(one, "grad_norm"), rel=1e-3)
    for name, value in one_model.state_dict().items():
        assert torch.equal(first["state"][name], second["state"][name])
        torch.testing.assert_close(first["state"][name], value, rtol=1e-3, atol=2e-5)
    assert first["syncs"] == 4  # one exchange a step (everything fits one bucket), whatever the accumulation
    assert first["saved"] == second["saved"]
    # Step by step, rank 0's rows before rank 1's; rows are dealt out two by two.
    assert first["saved"][0][:8] == [f"row-{i}" for i in (0, 1, 4, 5, 2, 3, 6, 7)]


@pytest.mark.parametrize("case", ["uneven", "empty"])
def test_uneven_shards_neither_hang_nor_lose_rows(two_ranks, case):
    (first, second), (rows_of_rank_one, _) = two_ranks[case], CASES[case]
    assert first["curve"] == second["curve"]
    assert all(math.isfinite(value) for value in first["curve"])
    assert len(first["saved"][0]) == 8 + rows_of_rank_one  # two steps are an epoch: all rows of both ranks
    assert first["samples"] == 2 * (8 + rows_of_rank_one)


def test_ranks_skip_a_damaged_row_of_one_of_them_together(two_ranks):
    first, second = two_ranks["damaged"]
    assert first["skipped"] == second["skipped"]
    assert len(first["skipped"]) == 2  # two steps are an epoch: the row comes twice in four steps
    assert all("samples row-2" in message for message in first["skipped"])
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
    assert all(torch.isfinite(value).all() for value in first["state"].values())


@pytest.mark.parametrize(
    "change",
    [{"lambda_base_decay_ratio": -1.0}, {"lambda_base_decay_ratio": 0.0}, {"seed": 10**23}, {"gpus_per_worker": 0.0}],
)
def test_settings_that_no_run_can_have_are_named(change):
    with pytest.raises(ValueError, match=f"train.{next(iter(change))} must be"):
        TrainConfig(**change)


def test_a_step_on_float8_features_is_the_step_on_what_they_stand_for():
    rows = dataset(4)
    meta = FeatureMeta(target="t", target_hash="h", layer_ids=(1, 2), hidden_size=HIDDEN, tokenizer_hash="k", dtype=FP8)
    stored = table(
        meta,
        [
            {
                "sample_id": row.sample_ids[0],
                "input_ids": row.input_ids_T.tolist(),
                "loss_mask": row.loss_mask_T.tolist(),
                "features": row.features_TC.view(-1, 2, HIDDEN),
            }
            for row in rows
        ],
    )
    quantized = join_rows(stored)
    assert quantized.features_TC.dtype == torch.float8_e4m3fn
    widened = replace(quantized, features_TC=quantized.features_on(torch.device("cpu"), torch.float32), scales_TL=None)
    assert not torch.equal(widened.features_TC[:14], rows[0].features_TC)
    after = []
    for batch in (quantized, widened):
        model = drafter()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = TrainConfig(precision="float32", num_anchors=4, batch_size=4)
        train(model, optimizer, config, Progress(), total_steps=3, batches_of=lambda epoch, skip, batch=batch: [batch])
        after.append(dict(model.named_parameters()))
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])
