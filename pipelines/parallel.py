"""How a drafter lies on the workers of a run, whole on each (DDP) or in shards (FSDP2), and how it becomes whole again.

Either way the masters are float32, autocast computes in bfloat16, and gradients cross the ranks once per optimiser
step. What leaves a run, checkpoints and drafters, is whole and does not show how the run was spread.

PyTorch's sharding takes two seconds to import: it is, where there are ranks.
"""

import contextlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from domino_core.drafter import Drafter


def spread(drafter: Drafter, *, shard: bool) -> nn.Module:
    """The drafter for this rank's share of the work: itself where it is alone. Every rank has the same afterwards.

    shard: parameters, gradients and what the optimiser keeps of them are divided among the ranks, in place; a layer is
    whole only while it computes. The target's matrices are buffers: each rank keeps them whole, as with DDP.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return drafter
    if not shard:
        # The buffers are the target's, read from the same file by every rank: nothing to broadcast.
        device = next(drafter.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(drafter, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    with torch.no_grad():  # as DDP does it; sharding keeps what each rank has
        for parameter in drafter.parameters():
            dist.broadcast(parameter, 0)
    group = dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, next(drafter.parameters()).device.type)
    for layer in drafter.backbone.layers:
        fully_shard(layer, mesh=mesh)
    # The rest is one group more: it is whole during the whole pass, for the losses read W2 outside of its module.
    fully_shard(drafter, mesh=mesh)
    return drafter


def drafter_of(model: nn.Module) -> Drafter:
    """The drafter in what `spread` gave."""
    return cast(Drafter, model.module if isinstance(model, DistributedDataParallel) else model)


def is_sharded(model: nn.Module) -> bool:
    if not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def exchanging(model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """For a forward and backward pass whose gradients cross the ranks if it is the last one of its optimiser step.

    Until then they add up on each rank, whole also where the drafter is sharded.
    """
    if is_sharded(model):
        cast(Any, model).set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def whole_norm(norm: Tensor) -> Tensor:
    """A norm over gradients, over those of all ranks: the same number on each of them."""
    return cast(Any, norm).full_tensor() if _is_share(norm) else norm


def whole_drafter(drafter: Drafter) -> Drafter | None:
    """The drafter with all its weights, for reading. Every rank must call it; sharded ones get it on rank 0 only.

    Gathered on the CPU, a tensor at a time, without the target's matrices.
    """
    if not is_sharded(drafter):
        return drafter
    tensors = {name: _whole(tensor) for name, tensor in drafter.state_dict().items()}
    if dist.get_rank() != 0:
        return None
    with torch.device("meta"):
        vocabulary_VD = torch.empty(drafter.config.vocab_size, drafter.config.hidden_size)
        whole = Drafter(drafter.config, vocabulary_VD, vocabulary_VD)
    whole.load_state_dict(cast(dict[str, Tensor], tensors), assign=True)
    return whole


def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """optimizer.state_dict() of the whole drafter. Every rank must call it; the tensors are complete on rank 0 only."""
    state = optimizer.state_dict()
    moments = {
        index: {name: _whole(value) if isinstance(value, Tensor) else value for name, value in of_one.items()}
        for index, of_one in state["state"].items()
    }
    return state | {"state": moments}


def load_whole(
    drafter: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor], moments: dict[str, Any]
) -> None:
    """Fill a drafter and its optimiser, in place and however they lie, from what the two functions above gave."""
    own = drafter.state_dict()
    assert own.keys() == weights.keys(), "a checkpoint of this run has the tensors of its drafter"
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_share_of(weights[name], tensor))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shares = {
        index: {
            # The number of steps has no dimension, and lies whole beside every parameter.
            name: _share_of(value, parameters[index]) if isinstance(value, Tensor) and value.ndim else value
            for name, value in of_one.items()
        }
        for index, of_one in moments["state"].items()
    }
    optimizer.load_state_dict(moments | {"state": shares})


def _whole(tensor: Tensor) -> Tensor | None:
    """On rank 0 and on the CPU, if it was in shards; an exchange that every rank takes part in."""
    if not _is_share(tensor):
        return tensor
    full = cast(Any, tensor.detach()).full_tensor()
    return full.cpu() if dist.get_rank() == 0 else None


def _share_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, lying as `like` does."""
    if not _is_share(like):
        return whole.to(like.device, copy=True)  # it may be mapped from a file that goes away
    from torch.distributed.tensor import distribute_tensor

    of_rank: Any = like
    # src_data_rank=None: every rank has read the whole and takes its own part, nothing is sent.
    return distribute_tensor(whole.to(like.device), of_rank.device_mesh, of_rank.placements, src_data_rank=None)


def _is_share(tensor: Tensor) -> bool:
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
