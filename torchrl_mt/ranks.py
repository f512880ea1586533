"""Several processes (ranks) that train one model together: what they exchange and agree on.

Every rank of a group must make the same calls in the same order, as with all collectives of
``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from torchrl_mt._hosts.torch import fsdp_meshes

T = TypeVar("T")


def check_process_group(process_group: object) -> None:
    """Refuse what is neither ``None`` nor a process group that this rank belongs to."""
    if process_group is None:
        return
    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, such as "
            f"torch.distributed.group.WORLD, or None, got {process_group!r}."
        )


def gather(value: T, process_group: distributed.ProcessGroup) -> list[T]:
    """Return every rank's value, in order of rank; tensors must be on the CPU."""
    size = distributed.get_world_size(process_group)
    values: list[T | None] = [None] * size
    distributed.all_gather_object(values, value, group=process_group)
    return values  # type: ignore[return-value]


def call_on_all(call: Callable[[], T], process_group: distributed.ProcessGroup) -> list[T]:
    """Call a function on every rank, and return every rank's result, in order of rank.

    Raises:
        Exception: What the function raises on this rank.
        RuntimeError: If it fails on another rank, so that no rank waits for one that failed.
    """
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(call())
    except Exception as raised:
        error = raised
    every = gather((results, repr(error)), process_group)
    if error is not None:
        raise error
    for rank, (found, said) in enumerate(every):
        if not found:
            raise RuntimeError(f"rank {rank} failed, and so all ranks of the group stop: {said}")
    return [found[0] for found, _ in every]


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) or another use of DTensor divides a model among ranks.

    All ranks of such a model must run it equally often: each pass gathers the parameters from all.
    """
    return any(_sharded_modules(model)) or any(map(is_dtensor, model.parameters()))


def exchanges_gradients(model: nn.Module) -> bool:
    """Whether ranks exchange gradients or parameters in a model's passes, which must be equally many."""
    return any(isinstance(m, DistributedDataParallel) for m in model.modules()) or is_sharded(model)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a part of one that several ranks hold."""
    if not distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; all of one that is not divided."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 gathered for a forward pass.

    It keeps those of the outermost module for a backward pass. Without one they would take memory, and
    miss the next optimizer step.
    """
    for module in _sharded_modules(model):
        module.reshard()  # type: ignore[operator]


def most(count: int, model: nn.Module) -> int:
    """Return the largest of the counts that the ranks of a sharded model give."""
    meshes = {p.device_mesh for p in model.parameters() if is_dtensor(p)}  # type: ignore[attr-defined]
    if not meshes:
        # All parameters are gathered at the moment.
        meshes = {mesh for module in _sharded_modules(model) for mesh in fsdp_meshes(module)}
    for mesh in sorted(meshes, key=str):
        found = torch.tensor(count, device=mesh.device_type)
        for axis in range(mesh.ndim):
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=mesh.get_group(axis))
        count = int(found)
    return count


def _sharded_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that ``fully_shard`` was applied to."""
    if not distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module
