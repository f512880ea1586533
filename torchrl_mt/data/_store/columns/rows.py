"""Reads and writes of ring rows.

A read returns new memory, one copy per window of consecutive rows. A write is planned first, so that
whatever can fail fails before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.ring import Blocks
from torchrl_mt.data._store.schema import as_array, bits
from torchrl_mt.data._store.steps import Rows
from torchrl_mt.devices import sent

if TYPE_CHECKING:
    from torchrl_mt.data._store.columns.columns import StoredColumn
    from torchrl_mt.data._store.columns.records import Record
    from torchrl_mt.data._store.steps import Column, Path

__all__ = ["RowPlan", "Windows", "dense", "plan_rows", "plan_values", "run"]

_MAX_VIEWS = 16
"""Most cached views."""
_FEW_PIECES = 8
"""Up to so many pieces, copying piece by piece is faster than row by row."""


class RowPlan:
    """The rows of one read: windows of equal length, or rows in any order.

    Args:
        starts: int64 ``[n]`` on the CPU, first row of each window (or each row).
        span: rows per window; 1 reads single rows.
    """

    def __init__(self, starts: Tensor, span: int = 1) -> None:
        self.starts = starts
        self.span = span
        self.steps = starts.shape[0] * span
        self._moved: Tensor | None = None
        self._entries: dict[tuple[Record, int], dict[Path, Tensor]] = {}

    def __len__(self) -> int:
        return self.steps

    def starts_on(self, device: torch.device) -> Tensor:
        """``starts`` on a device other than the CPU; copied there once."""
        if self._moved is None or self._moved.device != device:
            self._moved = sent(self.starts, device)
        return self._moved

    def rows(self) -> Tensor:
        """Return every row: int64 ``[n * span]`` on the CPU."""
        if self.span == 1:
            return self.starts
        return (self.starts[:, None] + torch.arange(self.span, device="cpu")).flatten()

    def entries(self, record: Record, shift: int) -> dict[Path, Tensor]:
        """Read all entries of a record, each ``shift`` rows further on; cached."""
        found = self._entries.get((record, shift))
        if found is None:
            records = record.windows.read(self, shift)
            found = self._entries[record, shift] = record.entries(records)
        return found

    def read(self, path: Path, column: StoredColumn) -> Column:
        """Read the entry ``path``, which ``column`` stores."""
        return column.read(self)


class Windows:
    """Reads windows of rows of one tensor.

    Args:
        data: contiguous tensor with one row per row of the ring.
        memory: allocates what is read.
    """

    def __init__(self, data: Tensor, memory: Memory) -> None:
        self._data = data
        self._memory = memory
        self._shape = data.shape[1:]
        self._width = math.prod(self._shape)
        self._itemsize = data.element_size()
        self._views: dict[tuple[int, int], Tensor] = {}
        """Views by span and shift: row ``r`` of a view is the window that begins there."""

    def read(self, plan: RowPlan, shift: int = 0) -> Tensor:
        """Read the rows of ``plan``, each ``shift`` rows further on: ``[n * span, *shape]``."""
        memory, starts, size = self._memory, plan.starts, plan.steps * self._width
        views = self._views.get((plan.span, shift))
        if views is None:
            views = self._view(plan.span, shift)
        if not memory.is_cpu:
            starts = plan.starts_on(memory.device)
        if size * self._itemsize < memory.large:
            out = views.index_select(0, starts)
        else:
            out = memory.for_sample(size, views.dtype)
            torch.index_select(views, 0, starts, out=out.view(len(starts), -1))
        return out.view(plan.steps, *self._shape)

    def _view(self, span: int, shift: int) -> Tensor:
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        width = self._width
        view = self._data.as_strided(
            (self._data.shape[0] - span + 1 - shift, span * width), (width, 1), shift * width
        )
        return self._views.setdefault((span, shift), view)


def run(operations: Iterable[Callable[[], Any]]) -> None:
    """Call all operations."""
    for operation in operations:
        operation()


def plan_values(data: Tensor, blocks: Blocks, column: Any) -> Callable[[], None]:
    """Plan to write a column of whole episodes to their rows of ``data``."""
    values = dense(column)
    to: Any = as_array(data)
    of: Any = as_array(values)
    copy: Callable[..., Any] = np.copyto  # Less overhead than a copy of tensors.
    if to is None or of is None:
        if len(blocks.pieces) > _FEW_PIECES:
            return plan_rows(data, blocks.rows, values)
        to, of, copy = data, values, Tensor.copy_
    return partial(
        run,
        [
            partial(copy, to[row : row + stop - first], of[first:stop])
            for row, first, stop in blocks.pieces
        ],
    )


def plan_rows(data: Tensor, rows: Tensor, values: Tensor) -> Callable[[], None]:
    """Plan to write one value to each of ``rows`` of ``data``."""
    to, of = as_array(data), as_array(values)
    if to is not None and of is not None:
        return partial(to.__setitem__, rows.numpy(), of)
    places, values = rows.to(data.device), bits(values.to(data.device, data.dtype).contiguous())
    return partial(run, [partial(bits(data).index_copy_, 0, places, values)])


def dense(column: Any) -> Tensor:
    """Stack a column of tensors of one shape."""
    return torch.stack(column.items) if isinstance(column, Rows) else column
