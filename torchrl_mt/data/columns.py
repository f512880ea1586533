"""Columns: how each entry of the stored steps lies in the rows of the storage's ring.

What is read equals, bit for bit, what was written. A column knows rows, not episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data.ring import Moves, Ring
from torchrl_mt.data.schema import Entry
from torchrl_mt.data.steps import Column, Objects, Rows, step_tensors

__all__ = ["DenseColumn", "NextColumn", "ObjectColumn", "RaggedColumn", "RowPlan", "StoredColumn"]


class RowPlan:
    """The ring rows of one read: windows of equal length, or rows in any order.

    Args:
        starts: int64 ``[n]`` on the CPU, first row of each window (or each row).
        span: rows per window; 1 reads single rows.
    """

    def __init__(self, starts: Tensor, span: int = 1) -> None:
        self.starts = starts
        self.span = span
        self._moved: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.starts) * self.span

    def starts_on(self, device: torch.device) -> Tensor:
        """``starts`` on ``device``; copied there once."""
        if device not in self._moved:
            self._moved[device] = self.starts.to(device, non_blocking=True)
        return self._moved[device]

    def rows(self) -> Tensor:
        """int64 ``[n * span]`` on the CPU: every row."""
        if self.span == 1:
            return self.starts
        return (self.starts[:, None] + torch.arange(self.span)).flatten()


class StoredColumn(Protocol):
    """What the storage asks of a column."""

    def write(self, start: int, column: Any) -> None:
        """Store an episode's column in the rows from ``start``."""

    def read(self, plan: RowPlan) -> Column:
        """The rows of ``plan``, as new memory."""

    def release(self, rows: Sequence[tuple[int, int]], first: int | None) -> None:
        """Let go of row ranges; ``first`` is the row that is now the oldest, None if none is."""

    def relayout(self, moves: Moves, capacity: int) -> None:
        """Follow the rows to a ring of ``capacity`` rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""


class DenseColumn:
    """Tensors of one shape: row ``r`` of ``data`` is the value at ring row ``r``."""

    def __init__(self, entry: Entry, capacity: int, device: torch.device) -> None:
        self.data = torch.empty((capacity, *entry.shape), dtype=entry.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.data.numel() * self.data.element_size()

    def write(self, start: int, column: Any) -> None:
        """Store an episode's column in the rows from ``start``."""
        if isinstance(column, Rows):
            column = torch.stack(column.items)
        self.data[start : start + len(column)].copy_(column)

    def read(self, plan: RowPlan, shift: int = 0) -> Tensor:
        """The rows of ``plan``, each ``shift`` rows further on."""
        data, span = self.data, plan.span
        width = data[0].numel()
        starts = plan.starts_on(data.device)
        if span == 1 or width == 0 or not len(starts):
            rows = plan.rows().to(data.device) if span > 1 else starts
            return data.index_select(0, rows + shift if shift else rows)
        windows = data.as_strided(
            (data.shape[0] - span + 1 - shift, span * width), (width, 1), shift * width
        )
        return windows.index_select(0, starts).view(len(starts) * span, *data.shape[1:])

    def release(self, rows: Sequence[tuple[int, int]], first: int | None) -> None:
        """Nothing to let go of: rows are overwritten."""

    def relayout(self, moves: Moves, capacity: int) -> None:
        """Follow the rows to a ring of ``capacity`` rows."""
        old = self.data
        self.data = torch.empty((capacity, *old.shape[1:]), dtype=old.dtype, device=old.device)
        moves.rows(old, self.data)


class NextColumn:
    """``("next", k)`` read from the rows of ``k``: each episode holds one row of ``k`` more."""

    def __init__(self, source: DenseColumn) -> None:
        self.source = source

    @property
    def nbytes(self) -> int:
        """Bytes of memory held: none of its own."""
        return 0

    def write(self, start: int, column: Any) -> None:
        """Store the last step's value in the row after the episode's last."""
        items = step_tensors(column)
        self.source.data[start + len(items)].copy_(items[-1])

    def read(self, plan: RowPlan) -> Tensor:
        """The rows of ``plan``, as new memory."""
        return self.source.read(plan, shift=1)

    def release(self, rows: Sequence[tuple[int, int]], first: int | None) -> None:
        """Nothing to let go of."""

    def relayout(self, moves: Moves, capacity: int) -> None:
        """Nothing to move: the source does."""

    def unshared(self) -> DenseColumn:
        """The same values in rows of their own."""
        data = self.source.data
        own = DenseColumn.__new__(DenseColumn)
        own.data = torch.empty_like(data)
        own.data[:-1].copy_(data[1:])
        return own


class ObjectColumn:
    """Python objects, kept as they are."""

    def __init__(self, capacity: int) -> None:
        self.data = np.empty(capacity, dtype=object)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, the objects themselves not counted."""
        return self.data.nbytes

    def write(self, start: int, column: Any) -> None:
        """Store an episode's column in the rows from ``start``."""
        for row, item in enumerate(column.items, start):
            self.data[row] = item

    def read(self, plan: RowPlan) -> Objects:
        """The rows of ``plan``."""
        return Objects([self.data[row] for row in plan.rows().tolist()])

    def release(self, rows: Sequence[tuple[int, int]], first: int | None) -> None:
        """Drop the objects of the rows."""
        for start, stop in rows:
            self.data[start:stop] = None

    def relayout(self, moves: Moves, capacity: int) -> None:
        """Follow the rows to a ring of ``capacity`` rows."""
        old, self.data = self.data, np.empty(capacity, dtype=object)
        self.data[: moves.upper] = old[moves.start : moves.start + moves.upper]
        self.data[moves.upper : moves.upper + moves.lower] = old[: moves.lower]


class RaggedColumn:
    """Tensors of varying shape: their elements lie one after the other in a ring of their own.

    Where a step's elements begin and what shape they have is kept per row, on the CPU.
    """

    def __init__(self, entry: Entry, capacity: int, device: torch.device) -> None:
        self.values = torch.empty(0, dtype=entry.dtype, device=device)
        self.ring = Ring(0)
        self.offset = torch.empty(capacity, dtype=torch.int64)
        self.shape = torch.empty(capacity, len(entry.shape), dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        tensors = (self.values, self.offset, self.shape)
        return sum(t.numel() * t.element_size() for t in tensors)

    def write(self, start: int, column: Any) -> None:
        """Store an episode's column in the rows from ``start``."""
        items = step_tensors(column)
        stop = start + len(items)
        sizes = torch.tensor([item.numel() for item in items])
        total = int(sizes.sum())
        first = self.ring.push(total)
        if first is None:
            self._grow(total)
            first = self.ring.push(total)
            assert first is not None
        if total:
            device = self.values.device
            flat = torch.cat([item.reshape(-1) for item in items])
            self.values[first : first + total].copy_(flat.to(device))
        self.offset[start:stop] = first + sizes.cumsum(0) - sizes
        self.shape[start:stop] = torch.tensor([item.shape for item in items]).view(len(items), -1)

    def read(self, plan: RowPlan) -> Rows:
        """The rows of ``plan``, as views of one new tensor."""
        rows = plan.rows()
        offsets, shapes = self.offset[rows], self.shape[rows]
        sizes = shapes.prod(1)
        ends = offsets + sizes
        breaks = torch.ones(len(rows), dtype=torch.bool)
        breaks[1:] = offsets[1:] != ends[:-1]
        first = breaks.nonzero().squeeze(1)
        last = torch.cat([first[1:], torch.tensor([len(rows)])]) - 1
        runs = zip(offsets[first].tolist(), ends[last].tolist(), strict=True)
        pieces = [self.values[start:stop] for start, stop in runs]
        flat = torch.cat(pieces) if pieces else self.values[:0]
        items = list(flat.split(sizes.tolist()))
        if shapes.shape[1] != 1:
            items = [i.view(s) for i, s in zip(items, shapes.tolist(), strict=True)]
        return Rows(items)

    def release(self, rows: Sequence[tuple[int, int]], first: int | None) -> None:
        """Free the elements of the oldest episodes."""
        next_start = None if first is None else int(self.offset[first])
        self.ring.pop(next_start=next_start, blocks=len(rows))

    def relayout(self, moves: Moves, capacity: int) -> None:
        """Follow the rows to a ring of ``capacity`` rows."""
        for name in ("offset", "shape"):
            old = getattr(self, name)
            new = torch.empty((capacity, *old.shape[1:]), dtype=torch.int64)
            moves.rows(old, new)
            setattr(self, name, new)

    def _grow(self, size: int) -> None:
        """Make room for ``size`` more elements, in at least half as much room again."""
        live = self.ring.layout()
        capacity = max(live.upper + live.lower + size, self.ring.capacity * 3 // 2)
        moves = self.ring.resize(capacity)
        old = self.values
        self.values = torch.empty(capacity, dtype=old.dtype, device=old.device)
        moves.rows(old, self.values)
        self.offset.copy_(moves.positions(self.offset))
