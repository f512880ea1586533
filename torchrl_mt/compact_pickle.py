"""Pickles of data whose tensors are views of common memory.

A pickle has each byte that tensors use once, however many of them show it, and no other byte of their
storages. ``pickle`` alone writes the whole storage of each tensor.
"""

from __future__ import annotations

import io
import pickle
from bisect import bisect_right
from collections import ChainMap
from collections.abc import Iterable
from copyreg import dispatch_table
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import Tensor

__all__ = ["Memory", "dumps", "loads"]


class Memory(NamedTuple):
    """The bytes of one storage that tensors use."""

    device: torch.device
    runs: list[tuple[int, int]]
    """First byte and end of each run of bytes in the storage, ascending; none overlap."""
    data: np.ndarray
    """Their bytes, one run after the other, uint8; Ray sends arrays without a copy."""


def dumps(data: Any, pickler: type = cloudpickle.Pickler) -> tuple[bytes, list[Memory]]:
    """Pickle data and the memory of its tensors.

    Args:
        data: a TensorDict, or any object that can be pickled.
        pickler: a subclass of ``pickle.Pickler``, with the reducers of cloudpickle.

    Returns:
        The arguments of :func:`loads`: a pickle with a place for each tensor, and what they show.

    Examples:
        >>> line = torch.arange(1000)
        >>> structure, memory = dumps([line[:end] for end in (2, 400, 600)])
        >>> memory[0].data.nbytes
        4800
        >>> loads(structure, memory)[0]
        tensor([0, 1])
    """
    file, storages = io.BytesIO(), _Storages()
    _with_places(pickler)(file, storages).dump(data)
    return file.getvalue(), [storage.memory() for storage in storages.items]


def loads(structure: bytes, memory: list[Memory]) -> Any:
    """Rebuild what :func:`dumps` was given.

    Tensors that overlapped in memory, such as growing prompts, share it again; all others are
    independent. So are overlapping columns with gaps, such as ``x[:, :2]`` and ``x[:, 1:]``.
    """
    return _Unpickler(structure, memory).load()


# ---- writing --------------------------------------------------------------------------------------

_Place = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""What a tensor shows: number of the memory, first byte in the storage, dtype, size and stride."""


@dataclass
class _Storage:
    """A storage, and which parts of it tensors use."""

    device: torch.device
    whole: torch.UntypedStorage
    used: set[tuple[int, int]] = field(default_factory=set)
    """First byte and end of each part."""

    def memory(self) -> Memory:
        runs = _joined(self.used) or [(0, 0)]
        first, end = runs[0][0], runs[-1][1]
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.whole)
        data = whole[first:end].cpu().numpy()
        parts = [data[start - first : stop - first] for start, stop in runs]
        return Memory(self.device, runs, np.concatenate(parts))


class _Storages:
    """The storages of the tensors of one pickle; they stay alive, so each has another address."""

    def __init__(self) -> None:
        self.items: list[_Storage] = []
        self._numbers: dict[Any, int] = {}

    def place(self, tensor: Tensor) -> _Place | Tensor:
        """Return the place of a tensor, or a copy of one that has more to it than its memory."""
        if not _is_plain(tensor):
            tensor = tensor.clone()
            if not _is_plain(tensor):
                return tensor
        extent = _extent(tensor)
        if extent > tensor.numel():  # It has gaps, which need not be sent.
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            extent = tensor.numel()
        width = tensor.element_size()
        start = int(tensor.storage_offset()) * width
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes(), tensor.device)
        number = self._numbers.setdefault(key, len(self.items))
        if number == len(self.items):
            self.items.append(_Storage(tensor.device, storage))
        if extent:
            self.items[number].used.add((start, start + extent * width))
        return number, start, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory, dtype, size and stride say all about a tensor."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def _extent(tensor: Tensor) -> int:
    """Number of elements from the first to the last that a tensor shows, with what is between."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join parts that overlap."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if joined and start < joined[-1][1]:
            start, before = joined.pop()
            stop = max(stop, before)
        joined.append((start, stop))
    return joined


@lru_cache
def _with_places(pickler: Any) -> Any:
    """Subclass a pickler so that it writes places of tensors."""

    class Pickler(pickler):
        # As tensordict itself has it, also where TensorDicts are registered to be sent by `dumps`.
        dispatch_table: ClassVar = ChainMap(
            {kind: dispatch_table[kind] for kind in (TensorDict, LazyStackedTensorDict)},
            pickler.dispatch_table,
        )

        def __init__(self, file: io.BytesIO, storages: _Storages) -> None:
            super().__init__(file, pickle.HIGHEST_PROTOCOL)
            self._storages = storages

        def persistent_id(self, obj: Any) -> Any:
            return self._storages.place(obj) if isinstance(obj, Tensor) else None

    return Pickler


# ---- reading --------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, memory: list[Memory]) -> None:
        super().__init__(io.BytesIO(structure))
        self._memory = [(part.device, part.runs, _storages_of(part)) for part in memory]

    def persistent_load(self, place: Any) -> Tensor:
        if isinstance(place, Tensor):
            return place
        number, offset, dtype, size, stride = place
        device, runs, storages = self._memory[number]
        if 0 in size:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        run = bisect_right(runs, offset, key=itemgetter(0)) - 1
        first = (offset - runs[run][0] + runs[run][0] % _ALIGNMENT) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=device).set_(storages[run], first, size, stride)


_ALIGNMENT = 16
"""Bytes of the largest element, complex128: a run keeps its place between multiples of it."""


def _storages_of(memory: Memory) -> list[torch.UntypedStorage]:
    """Copy each run to a storage of its own; Ray's memory may not be written to."""
    storages, taken = [], 0
    for start, stop in memory.runs:
        before = start % _ALIGNMENT
        data = np.empty(before + stop - start, np.uint8)
        data[before:] = memory.data[taken : taken + stop - start]
        storages.append(torch.from_numpy(data).to(memory.device).untyped_storage())
        taken += stop - start
    return storages
