"""Records: small entries of one dtype, side by side in one row of memory.

Reading a window of steps then touches one place in memory instead of one per entry. A read returns
views of one new tensor, which do not overlap.
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
"""Most bytes per step of a small entry. Larger ones take longer to copy than to locate."""


def records_for(entries: Mapping[Path, Entry], capacity: int, memory: Memory) -> dict[Path, Record]:
    """Create a record per dtype for all small dense entries; return the record of each entry.

    Args:
        entries: the entries of the schema.
        capacity: number of rows.
        memory: allocates the records.
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
    """The records of all rows of the ring.

    Args:
        shapes: the entries and their shapes per step.
        dtype: dtype of all entries.
        capacity: number of rows.
        memory: allocates the records.
    """

    def __init__(
        self,
        shapes: Iterable[tuple[Path, tuple[int, ...]]],
        dtype: torch.dtype,
        capacity: int,
        memory: Memory,
    ) -> None:
        self.shapes = dict(shapes)
        """Shapes of the entries, in the order of a record."""
        self._sizes = [math.prod(shape) for shape in self.shapes.values()]
        self._others = {path: shape for path, shape in self.shapes.items() if len(shape) != 1}
        """Shapes of the entries that are no vectors."""
        # Two records, as the stride between rows of a single one has no meaning.
        records = torch.empty(2, sum(self._sizes), dtype=dtype, device="meta")
        self._places = [
            (part.storage_offset() * dtype.itemsize, part.stride())
            for part in self.entries(records).values()
        ]
        """Byte offset in a record, and strides, of each entry."""
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
        """Split records ``[N, width]`` into entries ``[N, *shape]``, as views."""
        parts = records.split_with_sizes(self._sizes, 1)
        entries = dict(zip(self.shapes, parts, strict=True))
        for path, shape in self._others.items():
            entries[path] = entries[path].view(len(records), *shape)
        return entries

    def plan(self, blocks: Blocks, columns: Mapping[Path, Any]) -> Callable[[], None]:
        """Plan to write the entries of episodes: in one copy if they already lie side by side."""
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
        """Whether entries lie in memory as in a record."""
        begin, memory = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
        return all(
            part.stride() == stride
            and part.data_ptr() == begin + offset
            and part.untyped_storage().data_ptr() == memory
            for part, (offset, stride) in zip(parts, self._places, strict=True)
        )

    def like(self, capacity: int) -> Record:
        """Allocate records of the same entries for ``capacity`` rows."""
        new = copy(self)
        new._hold(self._memory.empty((capacity, self.data.shape[1]), self.data.dtype))
        return new

    def laid_out(self, moves: Moves, capacity: int) -> Record:
        """Copy the records to a ring of ``capacity`` rows, with the rows moved."""
        new = self.like(capacity)
        moves.rows(self.data, new.data)
        return new
