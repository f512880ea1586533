"""Weights that are sent once and read by every worker: one block of bytes in shared memory."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.modules.llm import LLMWrapperBase

from torchrl_mt.engines.adapters import merged_weights, peft_model
from torchrl_mt.processes import pickled

__all__ = ["PackedWeights", "PickledWeights", "SharedWeights", "pack_weights"]

_ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple."""


class PackedWeights:
    """Tensors by name in one block of bytes; tied ones are kept once.

    Args:
        tensors: the tensors, on any device.
        as_tensordict: whether they are to be unpacked as a TensorDict.

    Examples:
        >>> weights = PackedWeights({"w": torch.ones(2), "b": torch.tensor(3)})
        >>> weights.unpack()
        {'w': tensor([1., 1.]), 'b': tensor(3)}
    """

    def __init__(self, tensors: Mapping[str, Tensor], as_tensordict: bool = False) -> None:
        self.as_tensordict = as_tensordict
        self.places: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        """First byte, dtype and shape of each tensor."""
        known: dict[Any, int] = {}
        size = 0
        for name, tensor in tensors.items():
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            start = known.setdefault(key, size) if tensor.numel() else size
            if start == size:
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            self.places[name] = (start, tensor.dtype, tensor.shape)
        self.block: Any = np.empty(max(size, _ALIGNMENT), np.uint8)
        own = self._views()
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)

    def unpack(self) -> dict[str, Tensor] | TensorDictBase:
        """The tensors, to be read only: they are views of the block."""
        tensors = self._views()
        return TensorDict(tensors) if self.as_tensordict else tensors

    def _views(self) -> dict[str, Tensor]:
        block = self.block
        if isinstance(block, np.ndarray):
            with warnings.catch_warnings():  # Ray's arrays are read-only.
                warnings.simplefilter("ignore", UserWarning)
                block = torch.from_numpy(block)
        return {
            name: block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (start, dtype, shape) in self.places.items()
        }


class SharedWeights(PackedWeights):
    """Packed weights in memory that the processes of this machine share."""

    def __init__(self, packed: PackedWeights) -> None:
        vars(self).update(vars(packed), block=torch.from_numpy(packed.block).share_memory_())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "block": bytes(ForkingPickler.dumps(self.block))}  # a handle

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, block=pickle.loads(state["block"]))


class PickledWeights:
    """Anything else that engines take as weights."""

    def __init__(self, source: Any) -> None:
        self._pickled = pickled(source)

    def unpack(self) -> Any:
        """The source of the weights."""
        return pickle.loads(self._pickled)


def pack_weights(source: Any, *, merge: bool = True) -> PackedWeights | PickledWeights:
    """Pack what an engine's ``update_weights`` takes, once for all workers.

    Args:
        source: a model or a TorchRL wrapper (its state dict is sent), a state dict, a TensorDict of
            parameters, or anything else that can be pickled.
        merge: merge the adapters of a PEFT model into its weights, for engines that have none.

    Examples:
        >>> pack_weights(nn.Linear(1, 2)).unpack().keys()
        dict_keys(['weight', 'bias'])
    """
    if merge and (adapted := peft_model(source)) is not None:
        source = merged_weights(adapted)
    if isinstance(source, LLMWrapperBase):
        source = source.model
    if isinstance(source, nn.Module):
        source = source.state_dict()
    if isinstance(source, TensorDictBase):
        return PackedWeights(dict(source.flatten_keys(".").items()), as_tensordict=True)
    if (
        isinstance(source, Mapping)
        and source
        and all(isinstance(each, Tensor) for each in source.values())
    ):
        return PackedWeights(source)
    return PickledWeights(source)
