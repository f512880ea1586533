"""Records: small entries of one dtype side by side in one row of memory.

Reading a window of steps then touches one place instead of one for each entry. What is read are
views of one tensor; no two of them share an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchrl_mt.data.memory import Memory
from torchrl_mt.data.ring import Moves
from torchrl_mt.data.rows import Windows
from torchrl_mt.data.schema import Entry
from torchrl_mt.data.steps import Path

__all__ = ["Record", "records_for"]

_MOST_BYTES = 512
"""Of one entry per step: reading a larger one costs more than finding it."""


def records_for(entries: Mapping[Path, Entry], capacity: int, memory: Memory) -> dict[Path, Record]:
    """The record of every entry that is small and of one shape, with those of the same dtype.

    Args:
        entries: what every step looks like.
        capacity: rows.
        memory: where they are kept.
    """
    small: dict[torch.dtype, list[Path]] = {}
    for path, entry in entries.items():
        if entry.kind != "dense" or entry.shared or entry.dtype is None:
            continue
        if 0 < math.prod(entry.shape) * entry.dtype.itemsize <= _MOST_BYTES:
            small.setdefault(entry.dtype, []).append(path)
    found: dict[Path, Record] = {}
    for dtype, paths in small.items():
        record = Record(((path, entries[path].shape) for path in paths), dtype, capacity, memory)
        found.update(dict.fromkeys(paths, record))
    return found


class Record:
    """One record for each row of the ring.

    Args:
        shapes: the entries and their shapes per step.
        dtype: of all of them.
        capacity: rows.
        memory: where they are kept.
    """

    def __init__(
        self,
        shapes: Iterable[tuple[Path, tuple[int, ...]]],
        dtype: torch.dtype,
        capacity: int,
        memory: Memory,
    ) -> None:
        self._places: dict[Path, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        """Where each entry begins in a record, its shape, and its strides within the record."""
        width = 0
        for path, shape in shapes:
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            self._places[path] = (width, shape, strides)
            width += math.prod(shape)
        self._memory = memory
        self._hold(memory.empty((capacity, width), dtype))

    def _hold(self, data: Tensor) -> None:
        self.data = data
        self.width = data.shape[1]
        self.windows = Windows(data, self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.data.numel() * self.data.element_size()

    def entry(self, path: Path, records: Tensor) -> Tensor:
        """An entry of some records ``[N, width]``: ``[N, *shape]``, as a view."""
        offset, shape, strides = self._places[path]
        return records.as_strided(
            (records.shape[0], *shape), (self.width, *strides), records.storage_offset() + offset
        )

    def laid_out(self, moves: Moves, capacity: int) -> Record:
        """The records for a ring of ``capacity`` rows to which the rows have moved."""
        new = object.__new__(Record)
        new._places, new._memory = self._places, self._memory
        new._hold(self._memory.empty((capacity, self.width), self.data.dtype))
        moves.rows(self.data, new.data)
        return new
