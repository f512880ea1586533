"""Records: small entries of one dtype side by side in one row of memory.

Reading a window of steps then touches one place instead of one for each entry. What a read gives are
views of one new tensor; no two of them share an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.columns.rows import Windows, dense, plan_values, run
from torchrl_mt.data._store.ring import Blocks, Moves
from torchrl_mt.data._store.schema import Entry
from torchrl_mt.data._store.steps import Path

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
        self.shapes = dict(shapes)
        """The entries, in the order in which they lie in a record."""
        self._sizes = [math.prod(shape) for shape in self.shapes.values()]
        self._others = {path: shape for path, shape in self.shapes.items() if len(shape) != 1}
        """Those that are no vectors."""
        # Two, as the stride between rows of which there is one means nothing.
        records = torch.empty(2, sum(self._sizes), dtype=dtype, device="meta")
        self._places = [
            (part.storage_offset() * dtype.itemsize, part.stride())
            for part in self.entries(records).values()
        ]
        """Of each entry, the bytes before it in a record, and its strides in several."""
        self._memory = memory
        self._hold(memory.empty((capacity, sum(self._sizes)), dtype))

    def _hold(self, data: Tensor) -> None:
        self.data = data
        self.windows = Windows(data, self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.data.numel() * self.data.element_size()

    def entries(self, records: Tensor) -> dict[Path, Tensor]:
        """The entries of some records ``[N, width]``: ``[N, *shape]`` each, as views."""
        parts = records.split_with_sizes(self._sizes, 1)
        entries = dict(zip(self.shapes, parts, strict=True))
        for path, shape in self._others.items():
            entries[path] = entries[path].view(len(records), *shape)
        return entries

    def plan(self, blocks: Blocks, columns: Mapping[Path, Any]) -> Callable[[], None]:
        """What stores the entries of episodes: one copy, if they lie in memory as in a record."""
        parts = [dense(columns[path]) for path in self.shapes]
        first, width = parts[0], self.data.shape[1]
        if self._are_side_by_side(parts):
            records = first.as_strided((len(first), width), (width, 1))
            return plan_values(self.data, blocks, records)
        entries = self.entries(self.data).values()
        return partial(
            run,
            [plan_values(entry, blocks, part) for entry, part in zip(entries, parts, strict=True)],
        )

    def _are_side_by_side(self, parts: Sequence[Tensor]) -> bool:
        """Whether entries of steps lie in memory as they do in a record."""
        begin, memory = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
        return all(
            part.stride() == stride
            and part.data_ptr() == begin + offset
            and part.untyped_storage().data_ptr() == memory
            for part, (offset, stride) in zip(parts, self._places, strict=True)
        )

    def like(self, capacity: int) -> Record:
        """A record of the same entries for ``capacity`` rows, whose values are yet to be written."""
        new = copy(self)
        new._hold(self._memory.empty((capacity, self.data.shape[1]), self.data.dtype))
        return new

    def laid_out(self, moves: Moves, capacity: int) -> Record:
        """The records for a ring of ``capacity`` rows to which the rows have moved."""
        new = self.like(capacity)
        moves.rows(self.data, new.data)
        return new
