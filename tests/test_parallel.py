"""Two real processes: a sharded drafter trains as one that is whole on each, and what leaves a run is the same."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from domino_core.checkpoint import load_drafter, save_drafter
from pipelines.parallel import drafter_of, is_sharded, whole_drafter, whole_optimizer_state
from pipelines.parallel import spread as spread_over
from pipelines.train_loop import Progress, new_optimizer, train
from pipelines.train_state import load_state, save_state
from tests.training import config, curve, dataset, drafter, source

STEPS, STARTED = 6, {"run": 1}


class Exchanges(TorchDispatchMode):
    """Counts the collectives that the ranks take part in, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def local_bytes(tensors: list[torch.Tensor]) -> int:
    local = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors]
    return sum(tensor.nbytes for tensor in local)


def trained(out: Path, name: str, *, shard: bool, rank: int, world: int, **options: Any) -> None:
    """A run of this rank, from the checkpoint of another mode if told, and what it leaves."""
    torch.manual_seed(3 + rank)  # what `spread` does must make the ranks equal
    plain = drafter()
    if rank:
        with torch.no_grad():
            plain.backbone.fc.weight.add_(1.0)
    model = spread_over(plain, shard=shard)
    assert is_sharded(model) == shard
    settings = config(accumulation=4 // world, shard=shard, checkpoint_every=3, clip_norm=0.5)
    optimizer, progress = new_optimizer(model, settings), Progress()
    if "start" in options:
        progress = load_state(out / options["start"], plain, optimizer, STARTED)
    rows = dataset(16)
    if "damaged" in options:
        rows[options["damaged"]].features_TC[3] = math.nan

    def on_checkpoint(progress: Progress) -> None:
        whole, moments = whole_drafter(drafter_of(model)), whole_optimizer_state(optimizer)
        assert (whole is None) == (shard and rank > 0)
        if rank == 0 and whole is not None:
            save_state(out / f"{name}-{progress.step}", whole, moments, progress, STARTED)
            save_drafter(whole, out / f"{name}-drafter", {})

    with Exchanges() as exchanges:
        done = train(
            model, optimizer, settings, progress, total_steps=STEPS, batches_of=source(rows, 2, rank, world),
            on_checkpoint=on_checkpoint,
        )  # fmt: skip
    moments = [value for each in optimizer.state.values() for value in each.values() if value.ndim]
    found = {"curve": curve(done), "norm": curve(done, "grad_norm"), "skipped": done.skipped}
    found |= {"exchanges": dict(exchanges.counts), "weights": local_bytes(list(plain.parameters()))}
    found |= {"moments": local_bytes(moments), "frozen": local_bytes(list(plain.buffers()))}
    torch.save(found, out / f"{name}-rank{rank}.pt")


def rank_main(rank: int, port: int, out: str) -> None:
    """All runs of two ranks, one after the other: starting processes is what takes time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    runs: list[tuple[str, dict[str, Any]]] = [
        ("whole", {"shard": False}),
        ("sharded", {"shard": True}),
        ("sharded after whole", {"shard": True, "start": "whole-3"}),
        ("whole after sharded", {"shard": False, "start": "sharded-3"}),
        ("sharded after one", {"shard": True, "start": "one-3"}),
        ("damaged", {"shard": True, "damaged": 2}),
    ]
    for name, options in runs:
        trained(Path(out), name, rank=rank, world=2, **options)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    import socket

    out = tmp_path_factory.mktemp("parallel")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trained(out, "one", shard=False, rank=0, world=1)
    spawn(rank_main, (port, str(out)), nprocs=2)
    trained(out, "one after sharded", shard=False, rank=0, world=1, start="sharded-3")
    return out


def found(runs: Path, name: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(runs / f"{name}-rank{rank}.pt", weights_only=True)


def weights(runs: Path, name: str) -> dict[str, torch.Tensor]:
    plain = drafter()
    return load_drafter(runs / f"{name}-drafter", plain.embed_VD, plain.lm_head_VD).state_dict()


MODES = ["whole", "sharded", "sharded after whole", "whole after sharded", "sharded after one", "one after sharded"]


@pytest.mark.parametrize("name", MODES)
def test_every_way_gives_the_same_run(runs, name):
    one, other = found(runs, "one"), found(runs, name)
    assert other["curve"] == pytest.approx(one["curve"], rel=1e-4)
    assert other["norm"] == pytest.approx(one["norm"], rel=1e-3)
    assert max(one["norm"]) > 0.5 > 0  # the limit was at work
    expected, got = weights(runs, "one"), weights(runs, name)
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-3, atol=5e-5)


def test_state_is_divided_and_the_rest_is_not(runs):
    whole = found(runs, "whole")
    shares = [found(runs, "sharded", rank) for rank in range(2)]
    for kind in ("weights", "moments"):
        total = sum(share[kind] for share in shares)
        assert whole[kind] == total
        assert all(0.4 < share[kind] / whole[kind] < 0.6 for share in shares)
    assert whole["frozen"] == shares[0]["frozen"] > 0


def test_gradients_cross_the_ranks_once_a_step(runs):
    # Two micro-batches a step and rank; one exchange for the layer, one for the rest.
    sharded, whole = (found(runs, name)["exchanges"] for name in ("sharded", "whole"))
    assert sharded["c10d::_reduce_scatter_base_"] == STEPS * 2
    # Both count their rows as often; DDP sends its gradients the same way, in one bucket.
    assert whole["c10d::allreduce_"] - sharded["c10d::allreduce_"] == STEPS


def test_what_leaves_a_run_does_not_show_how_it_was_spread(runs):
    one, sharded = (torch.load(runs / f"{name}-{STEPS}" / "state.pt", weights_only=True) for name in ("one", "sharded"))
    assert list(one["drafter"]) == list(sharded["drafter"])
    assert one["optimizer"]["param_groups"] == sharded["optimizer"]["param_groups"]
    for index, moments in one["optimizer"]["state"].items():
        for name, value in moments.items():
            other = sharded["optimizer"]["state"][index][name]
            assert (type(value), value.dtype, value.shape) == (type(other), other.dtype, other.shape)
    headers = []
    for name in ("one", "sharded"):
        content = (runs / f"{name}-drafter" / "model.safetensors").read_bytes()
        headers.append(content[: 8 + int.from_bytes(content[:8], "little")])
        config = (runs / f"{name}-drafter" / "config.json").read_bytes()
        headers.append(config)
    assert headers[:2] == headers[2:]


def test_ranks_skip_a_damaged_row_of_one_of_them_together(runs):
    first, second = (found(runs, "damaged", rank) for rank in range(2))
    assert first["skipped"] == second["skipped"]
    assert len(first["skipped"]) == STEPS // 2  # two steps are an epoch
    assert all("samples row-2" in message for message in first["skipped"])
    assert all(torch.isfinite(value).all() for value in weights(runs, "damaged").values())
