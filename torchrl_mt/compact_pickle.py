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
    starts: list[int]
    """First byte of each run of consecutive bytes, ascending."""
    runs: list[np.ndarray]
    """uint8 arrays, which Ray sends without a copy."""


def dumps(data: Any, pickler: type = cloudpickle.Pickler) -> tuple[bytes, list[Memory]]:
    """Pickle data and the memory of its tensors.

    Args:
        data: a TensorDict, or any object that can be pickled.
        pickler: a subclass of ``pickle.Pickler``, with the reducers of cloudpickle.

    Returns:
        The arguments of :func:`loads`: a pickle with a place for each tensor, and what the tensors
        show, as views of the data's memory.

    Examples:
        >>> line = torch.arange(1000)
        >>> structure, memory = dumps([line[:end] for end in (2, 400, 600)])
        >>> [part.nbytes for part in memory[0].runs]
        [4800]
        >>> loads(structure, memory)[0]
        tensor([0, 1])
    """
    file, storages = io.BytesIO(), _Storages()
    _with_places(pickler)(file, storages).dump(data)
    return file.getvalue(), [storage.memory() for storage in storages.items]


def loads(structure: bytes, memory: list[Memory]) -> Any:
    """Rebuild what :func:`dumps` was given.

    Tensors share memory only if they did so before, and only with each other: a write to one of them
    changes no more than it would have changed there. Columns with gaps, such as ``x[:, 0]``, share none.
    """
    return _Unpickler(structure, memory).load()


# ---- writing --------------------------------------------------------------------------------------

_ALIGNMENT = 16
"""Runs begin at multiples of it: the largest element, complex128, has so many bytes."""


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
        runs = _merged(self.used)
        as_bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.whole)
        return Memory(
            self.device,
            [start for start, _ in runs],
            [as_bytes[start:stop].cpu().numpy() for start, stop in runs],
        )


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


def _merged(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join parts that overlap or touch; each begins at a multiple of ``_ALIGNMENT``."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        start -= start % _ALIGNMENT
        if merged and start <= merged[-1][1]:
            start, before = merged.pop()
            stop = max(stop, before)
        merged.append((start, stop))
    return merged


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
        self._memory = [
            (part.device, part.starts, [_storage_of(run, part.device) for run in part.runs])
            for part in memory
        ]

    def persistent_load(self, place: Any) -> Tensor:
        if isinstance(place, Tensor):
            return place
        number, offset, dtype, size, stride = place
        device, starts, runs = self._memory[number]
        if 0 in size:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        run = bisect_right(starts, offset) - 1
        first = (offset - starts[run]) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=device).set_(runs[run], first, size, stride)


def _storage_of(run: np.ndarray, device: torch.device) -> torch.UntypedStorage:
    """Copy bytes to a storage: Ray's may not be written to."""
    return torch.from_numpy(run.copy()).to(device).untyped_storage()
