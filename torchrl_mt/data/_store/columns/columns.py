"""Columns: how each kind of entry is stored by rows of the ring.

What is read equals what was written, bit for bit. A column knows rows, not episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.columns.records import Record
from torchrl_mt.data._store.columns.rows import RowPlan, Windows, plan_rows, plan_values, run
from torchrl_mt.data._store.files.column_files import Part, SavedColumn
from torchrl_mt.data._store.ring import Blocks, Moves, Ring
from torchrl_mt.data._store.schema import Entry, as_array
from torchrl_mt.data._store.steps import Column, Objects, Path, Rows, own, rows_at, step_tensors

__all__ = [
    "Change",
    "DenseColumn",
    "NextColumn",
    "ObjectColumn",
    "RaggedColumn",
    "ReadPlan",
    "RecordColumn",
    "StoredColumn",
]


class ReadPlan(Protocol):
    """A plan of which steps to read, and how."""

    def __len__(self) -> int:
        """Number of steps."""

    def read(self, path: Path, column: StoredColumn) -> Column:
        """Read the entry ``path``, which ``column`` stores, to new memory."""


@dataclass(frozen=True)
class Change:
    """What one write does to the rows: evict the oldest episodes and write new ones."""

    written: Blocks
    """Rows of the written episodes."""
    evicts: bool = False
    """Whether episodes are evicted."""
    first: int | None = None
    """If so, the oldest row that stays; None if none does."""
    left: Blocks | None = None
    """Rows of the evicted episodes, if values besides the rows must be dropped.

    None if nothing is evicted, or all rows were laid out anew without them.
    """


class StoredColumn(Protocol):
    """Storage of one entry by rows of the ring.

    A column is saved as ``parts``: the live rows of each of its tensors, oldest first, in the form of
    the entry, however the column lays out its memory.
    :mod:`~torchrl_mt.data._store.files.column_files` writes them to files. ``load`` reads each part
    with ``SavedColumn.into`` and keeps the tensor that this returns: another one if files are mapped.
    """

    def plan(self, change: Change, column: Any) -> Callable[[], None]:
        """Do everything that can fail; return a function that stores a column of whole episodes."""

    def read(self, plan: RowPlan) -> Column:
        """Read the rows of ``plan`` to new memory."""

    def release(self, blocks: Blocks, first: int | None) -> None:
        """Drop the oldest episodes; ``first`` is the oldest row that stays, None if none."""

    def laid_out(self, moves: Moves, capacity: int) -> StoredColumn:
        """Return the column for a ring of ``capacity`` rows, with the rows moved."""

    def parts(self, live: Moves) -> dict[str, Part | Objects]:
        """Return the tensors and objects to save, by name; ``live`` tells the live rows."""

    def load(self, saved: SavedColumn, rows: range) -> None:
        """Load these rows, those of the newest episodes, to the rows from 0 on.

        Called once, before anything is written.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""


class _FixedShape:
    """Base of columns with tensors of one shape: row ``r`` of ``data`` is ring row ``r``."""

    data: Tensor

    def plan(self, change: Change, column: Any) -> Callable[[], None]:
        return plan_values(self.data, change.written, column)

    def release(self, blocks: Blocks, first: int | None) -> None:
        """Do nothing: rows are overwritten."""

    def parts(self, live: Moves) -> dict[str, Part | Objects]:
        return {"values": Part(live.pieces(self.data))}


class DenseColumn(_FixedShape):
    """Tensors of one shape in a tensor of their own."""

    def __init__(self, entry: Entry, capacity: int, memory: Memory) -> None:
        self._memory = memory
        self._hold(memory.empty((capacity, *entry.shape), entry.dtype))

    def _hold(self, data: Tensor) -> None:
        self.data = data
        self._windows = Windows(data, self._memory)

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def read(self, plan: RowPlan, shift: int = 0) -> Tensor:
        return self._windows.read(plan, shift)

    def laid_out(self, moves: Moves, capacity: int) -> DenseColumn:
        new = copy(self)
        new._hold(self._memory.empty((capacity, *self.data.shape[1:]), self.data.dtype))
        moves.rows(self.data, new.data)
        return new

    def load(self, saved: SavedColumn, rows: range) -> None:
        self._hold(saved.into("values", rows, self.data))


class RecordColumn(_FixedShape):
    """Tensors of one shape in a record with other entries."""

    nbytes = 0
    """0: the store counts records."""

    def __init__(self, record: Record, path: Path) -> None:
        self.path = path
        self.follow(record)

    def follow(self, record: Record) -> None:
        """Use the values of this record."""
        self.record = record
        self.data = record.entries(record.data)[self.path]

    def read(self, plan: RowPlan, shift: int = 0) -> Tensor:
        return plan.entries(self.record, shift)[self.path]

    def laid_out(self, moves: Moves, capacity: int) -> RecordColumn:
        """Return a copy, which must :meth:`follow` the moved record."""
        return copy(self)

    def load(self, saved: SavedColumn, rows: range) -> None:
        saved.into("values", rows, self.data)


class NextColumn:
    """``("next", k)`` read from the rows of ``k``, of which each episode has one more."""

    source: DenseColumn | RecordColumn
    """Set by the store."""

    nbytes = 0
    """It has no rows of its own."""

    def plan(self, change: Change, column: Any) -> Callable[[], None]:
        """Plan to write each episode's last value to the row after its last step."""
        blocks = change.written
        ends = [i - 1 for i in accumulate(blocks.lengths)]
        places = [
            start + length for start, length in zip(blocks.starts, blocks.lengths, strict=True)
        ]
        to = as_array(self.source.data)
        of = None if isinstance(column, Rows) else as_array(column)
        if to is not None and of is not None:
            return partial(to.__setitem__, places, of[ends])
        if len(ends) == 1:
            value = column.items[-1] if isinstance(column, Rows) else column[-1]
            return partial(run, [partial(self.source.data[places[0]].copy_, value)])
        if isinstance(column, Rows):
            values = torch.stack([column.items[i] for i in ends])
        else:
            values = rows_at(column, torch.tensor(ends, device="cpu"))
        return plan_rows(self.source.data, torch.tensor(places, device="cpu"), values)

    def read(self, plan: RowPlan) -> Tensor:
        return self.source.read(plan, shift=1)

    def release(self, blocks: Blocks, first: int | None) -> None:
        """Do nothing: the rows belong to the source."""

    def laid_out(self, moves: Moves, capacity: int) -> NextColumn:
        """Return a copy, of which the store sets the ``source``."""
        return copy(self)

    def parts(self, live: Moves) -> dict[str, Part | Objects]:
        """Return nothing: the rows belong to the source."""
        return {}

    def load(self, saved: SavedColumn, rows: range) -> None:
        """Do nothing: the source loads the rows."""

    def unshared(self, memory: Memory) -> DenseColumn:
        """Copy the values to a column with its own rows."""
        here = self.source.data
        column = DenseColumn(Entry("dense", tuple(here.shape[1:]), here.dtype), len(here), memory)
        column.data[:-1].copy_(here[1:])
        return column


class ObjectColumn:
    """Python objects; reading copies tensorclasses and tensors among them."""

    def __init__(self, capacity: int) -> None:
        self.data = np.empty(capacity, dtype=object)

    @property
    def nbytes(self) -> int:
        """Bytes of the references, without the objects."""
        return self.data.nbytes

    def plan(self, change: Change, column: Any) -> Callable[[], None]:
        """Plan to drop the evicted objects and store new ones."""
        rows, items = change.written.rows.tolist(), column.items

        def commit() -> None:
            if change.left is not None:
                self.release(change.left, change.first)
            for row, item in zip(rows, items, strict=True):
                self.data[row] = item

        return commit

    def read(self, plan: RowPlan) -> Objects:
        return Objects([own(self.data[row]) for row in plan.rows().tolist()])

    def release(self, blocks: Blocks, first: int | None) -> None:
        """Drop the objects of the episodes."""
        for row, begin, stop in blocks.pieces:
            self.data[row : row + stop - begin] = None

    def laid_out(self, moves: Moves, capacity: int) -> ObjectColumn:
        new = ObjectColumn(capacity)
        moves.rows(self.data, new.data)
        return new

    def parts(self, live: Moves) -> dict[str, Part | Objects]:
        return {"objects": Objects([*chain(*live.pieces(self.data))])}

    def load(self, saved: SavedColumn, rows: range) -> None:
        items = saved.objects("objects", rows)
        if len(items) > len(self.data):
            self.data = np.empty(len(items), dtype=object)
        for row, item in enumerate(items):
            self.data[row] = item


class RaggedColumn:
    """Tensors of varying shape, whose elements lie one after the other in a ring of their own.

    Each row has the offset and the shape of its step's elements, on the CPU.
    """

    def __init__(self, entry: Entry, capacity: int, memory: Memory) -> None:
        self._memory = memory
        self.values = memory.empty((0,), entry.dtype)
        self.ring = Ring(0)
        self.offset = torch.empty(capacity, dtype=torch.int64, device="cpu")
        self.shape = torch.empty(capacity, len(entry.shape), dtype=torch.int64, device="cpu")

    @property
    def nbytes(self) -> int:
        tensors = (self.values, self.offset, self.shape)
        return sum(t.numel() * t.element_size() for t in tensors)

    def plan(self, change: Change, column: Any) -> Callable[[], None]:
        """Plan to write a column of whole episodes after eviction."""
        blocks, items = change.written, step_tensors(column)
        lengths = torch.tensor(blocks.lengths, dtype=torch.int64, device="cpu")
        shapes = torch.tensor([item.shape for item in items], dtype=torch.int64, device="cpu")
        sizes = shapes.view(len(items), -1).prod(1)
        before = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        ends = before[lengths.cumsum(0)]
        totals = ends.diff(prepend=ends.new_zeros(1))
        # An episode without elements takes one, as a block in a ring is never empty.
        ring, values, offset = replace(self.ring), self.values, self.offset
        if change.evicts:
            ring.pop(next_start=None if change.first is None else int(offset[change.first]))
        blocks_of_elements = totals.clamp_min(1).tolist()
        places = ring.push_all(blocks_of_elements)
        if places is None:
            moves, values = self._with_room(ring, sum(blocks_of_elements))
            offset = moves.positions(offset)
            places = ring.push_all(blocks_of_elements)
            assert places is not None
        starts = torch.tensor(places, device="cpu")
        flat = torch.cat([item.reshape(-1) for item in items])
        shift = torch.repeat_interleave(starts - ends + totals, lengths)
        rows, offsets, forms = blocks.rows, before[:-1] + shift, shapes.view(len(items), -1)
        pieces = [
            (values[row : row + stop - first], flat[first:stop])
            for row, first, stop in Blocks(places, totals.tolist()).pieces
        ]

        def commit() -> None:
            self.ring, self.values, self.offset = ring, values, offset
            for place, elements in pieces:
                place.copy_(elements)
            self.offset[rows] = offsets
            self.shape[rows] = forms

        return commit

    def read(self, plan: RowPlan) -> Column:
        """Read the rows of ``plan`` as views of one new tensor."""
        rows = plan.rows()
        if not len(rows):
            return self.values.new_zeros((0,) * (1 + self.shape.shape[1]))
        offsets, shapes = self.offset[rows], self.shape[rows]
        sizes = shapes.prod(1)
        ends = offsets + sizes
        breaks = torch.ones(rows.shape[0], dtype=torch.bool, device="cpu")
        breaks[1:] = offsets[1:] != ends[:-1]
        first = breaks.nonzero().squeeze(1)
        last = torch.cat([first[1:], torch.tensor([rows.shape[0]], device="cpu")]) - 1
        pieces = [
            self.values[start:stop]
            for start, stop in zip(offsets[first].tolist(), ends[last].tolist(), strict=True)
        ]
        flat = torch.cat(pieces) if pieces else self.values[:0]
        items: Any = flat.split(sizes.tolist())
        if shapes.shape[1] != 1:
            items = (i.view(s) for i, s in zip(items, shapes.tolist(), strict=True))
        return Rows(list(items))

    def release(self, blocks: Blocks, first: int | None) -> None:
        """Free the elements of the oldest episodes."""
        next_start = None if first is None else int(self.offset[first])
        self.ring.pop(next_start=next_start)

    def laid_out(self, moves: Moves, capacity: int) -> RaggedColumn:
        new = copy(self)
        new.offset = moves.laid_out(self.offset, capacity)
        new.shape = moves.laid_out(self.shape, capacity)
        return new

    def parts(self, live: Moves) -> dict[str, Part | Objects]:
        """Return the elements, and the offset and shape of each row."""
        elements = self.ring.layout()
        return {
            "values": Part(elements.pieces(self.values)),
            "offset": Part(live.pieces(self.offset), elements.positions),
            "shape": Part(live.pieces(self.shape)),
        }

    def load(self, saved: SavedColumn, rows: range) -> None:
        self.offset = saved.into("offset", rows, self.offset)
        self.shape = saved.into("shape", rows, self.shape)
        elements = saved.rows("values")
        begin = int(self.offset[0]) if rows else elements
        if rows and begin:
            self.offset -= begin
        self.values = saved.new("values", range(begin, elements), self._memory)
        size = len(self.values)
        self.ring = Ring(size, tail=size, upper_end=size)

    def _with_room(self, ring: Ring, more: int) -> tuple[Moves, Tensor]:
        """Enlarge ``ring`` for ``more`` elements, by at least an eighth.

        Returns:
            The moves, and the elements at their new places.
        """
        live = ring.layout()
        needed = live.upper + live.lower + more
        capacity = max(needed, ring.capacity * 9 // 8)
        values = self._memory.empty((capacity,), self.values.dtype)
        moves = ring.resize(capacity)
        moves.rows(self.values, values)
        return moves, values
