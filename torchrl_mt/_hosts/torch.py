"""Private names of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.utils.data._utils.collate import default_collate_fn_map

_Module = TypeVar("_Module", bound=nn.Module)

# ---- tensors ------------------------------------------------------------------------------------


def times_changed(tensor: Tensor) -> int:
    """Count the in-place changes of a tensor; 0 for inference tensors, where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether something acts on a gradient once it is there, as an optimizer in the backward pass."""
    return bool(parameter._post_accumulate_grad_hooks)


# ---- data loaders -------------------------------------------------------------------------------


def collate_tensordicts_with(collate: Callable[[Sequence[Any]], Any]) -> None:
    """Set what a ``DataLoader`` without ``collate_fn`` calls for a batch of TensorDicts.

    torch takes them for dicts of values and fails.
    """
    default_collate_fn_map[TensorDictBase] = lambda batch, *, collate_fn_map=None: collate(batch)


def shared_bytes(size: int) -> Tensor:
    """Return uninitialised bytes that other processes get without a copy: uint8 ``[size]``."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        torch.UntypedStorage._new_shared(size)
    )


# ---- modules --------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps a module or compiles its calls, which may skip hooks."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def is_changed(module: nn.Module) -> bool:
    """Whether a module has hooks or a ``forward`` of its own that change what its class does."""
    hooks = bool(module._forward_hooks) or bool(module._forward_pre_hooks)
    return hooks or "forward" in vars(module)


class ExactBuffers(nn.Module):
    """A module whose buffers move between devices but keep their dtype, also after ``half()``.

    ``to``, ``half``, ``cuda`` and so on all call ``_apply``, which casts floating buffers.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactBuffers:
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype is not buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


def with_submodules(module: _Module, **submodules: nn.Module | None) -> _Module:
    """Copy a module, not deeply, with other submodules; the module keeps its own."""
    made = copy.copy(module)
    made._modules = {**module._modules, **submodules}
    return made


def fsdp_meshes(module: nn.Module) -> list[Any]:
    """List the meshes of the ranks among which ``fully_shard`` divides a module's parameters."""
    state = cast(Any, module)._get_fsdp_state()
    # Older versions of torch have one group, newer ones a list.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group.mesh_info.mesh for group in groups if group is not None]


# ---- process groups -----------------------------------------------------------------------------


def join_process_group(
    init_method: str, *, rank: int, world_size: int, backend: str, group_name: str
) -> Any:
    """Join a process group beside the default one, with processes of another program.

    SGLang's processes join theirs in the same way: the keys of the store must be the same.
    """
    from torch.distributed import distributed_c10d  # not every build of torch has it

    timeout = distributed_c10d.default_pg_timeout
    meeting = distributed_c10d.rendezvous(init_method, rank, world_size, timeout=timeout)
    store, rank, world_size = next(meeting)
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(group_name, store),
        group_name=cast(Any, group_name),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group
