"""The steps of unfinished episodes, in one log.

Batches are appended, so that the rows of an episode increase with time. Rows of closed episodes are
free, and a full log is compacted: its memory stays in proportion to the open steps and the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.columns.records import Record, records_for
from torchrl_mt.data._store.deferred_interrupts import interrupts_deferred
from torchrl_mt.data._store.schema import Schema, as_array, bits
from torchrl_mt.data._store.steps import Column, Path, Rows, Steps, copied, rows_at
from torchrl_mt.data._writing.continuity import Bits, bits_at
from torchrl_mt.data._writing.segments import Segments

__all__ = ["Label", "OpenSteps"]

Label = Hashable
"""Name of an open episode: its id; or ``(id, 2)``, ``(id, 3)``... if another has that id."""

_FEW_SLOTS = 4
"""Up to so many slots, finding rows slot by slot is faster."""
_SMALL_LOG = 1024
"""Rows of a log that never shrinks."""

_MEMORY = Memory(torch.device("cpu"))

_NO_ROWS = np.zeros(0, dtype=np.int64)


class OpenSteps:
    """Open episodes, stored by *slot*: a number that later episodes reuse.

    :meth:`put` writes a batch to unused rows; :meth:`accept` commits them.
    """

    def __init__(self) -> None:
        self.schema: Schema | None = None
        self.columns: dict[Path, _Tensors | _Items] = {}
        self._records: list[tuple[Record, _Tensors]] = []
        """Small entries of one dtype, side by side in one record per row."""
        self.tail = 0
        """One past the last committed row."""
        self.owner = np.zeros(0, dtype=np.int32)
        """Slot of each row; -1 where the row is free."""
        self.ids = self.first = self.last = self.length = self.batch = _NO_ROWS
        """By slot: id, first row, last row, number of steps, batch of the last step."""
        self.is_open = np.zeros(0, dtype=bool)
        """By slot: whether it holds an open episode."""
        self.slots: dict[Label, int] = {}
        """Slot of every open episode, by label."""
        self.by_id: dict[int, list[int]] = {}
        """Slots of the episodes with an id, oldest episode first."""
        self.labels: dict[int, Label] = {}
        """Label of the episode in each slot."""
        self.num_steps = 0
        """Steps of all open episodes."""
        self.batches = 0
        """Number of batches so far."""
        self._free: list[int] = []

    @property
    def any_id_twice(self) -> bool:
        """Whether an id has more than one open episode."""
        return len(self.by_id) < len(self.slots)

    def newest(self, keys: Iterable[int]) -> np.ndarray:
        """Slot of each id's newest episode: int64 ``[S]``; -1 if the id has none."""
        none = [-1]
        return np.array([self.by_id.get(key, none)[-1] for key in keys], dtype=np.int64)

    def by_age(self) -> list[int]:
        """Slots of the open episodes, ordered by their last steps."""
        slots = self._open_slots()
        ordered: list[int] = slots[np.argsort(self.last[slots], kind="stable")].tolist()
        return ordered

    def rows(self, slot: int) -> np.ndarray:
        """Rows of an open episode: int64 ``[T]``."""
        return self.rows_of([slot], self.tail)[0]

    def rows_of(self, slots: Sequence[int], stop: int) -> list[np.ndarray]:
        """Rows of each slot before row ``stop``: int64 ``[T]`` each."""
        firsts = [int(self.first[slot]) if self.is_open[slot] else self.tail for slot in slots]
        if len(slots) <= _FEW_SLOTS:
            return [
                np.flatnonzero(self.owner[first:stop] == slot) + first
                for slot, first in zip(slots, firsts, strict=True)
            ]
        first = min(firsts)
        owner = self.owner[first:stop]
        chosen = np.zeros(len(self.ids) + 1, dtype=bool)  # Free rows have the slot -1: the last.
        chosen[slots] = True
        found = np.flatnonzero(chosen.take(owner, mode="wrap"))
        owner = owner[found]
        order = np.argsort(owner, kind="stable")
        rows, owner = found[order] + first, owner[order]
        starts, stops = (np.searchsorted(owner, slots, side).tolist() for side in ("left", "right"))
        return [rows[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def take(self, rows: np.ndarray) -> Steps:
        """Read the steps in ``rows``; dense tensors are copied, other values are not."""
        assert self.schema is not None
        packed: dict[Path, Tensor] = {}
        for record, tensors in self._records:
            packed.update(record.entries(tensors.take(rows)))
        columns = self._map_columns(packed, lambda column: column.take(rows))
        return Steps(len(rows), columns, self.schema.root_class)

    def episode(self, slot: int) -> Steps:
        """A copy of the steps of an episode."""
        return self.take(self.rows(slot)).clone()

    def bits_at(self, path: Path, rows: np.ndarray) -> Bits:
        """Bits of an entry in ``rows``."""
        return self.columns[path].bits_at(rows)

    # ---- writing --------------------------------------------------------------------------------

    def put(self, steps: Steps, schema: Schema) -> int:
        """Write a batch to unused rows; return the first of these rows.

        Args:
            steps: the batch.
            schema: the schema of the open steps and the batch together.
        """
        if self.tail + steps.length > len(self.owner):
            self._resize(steps.length)
        if schema is not self.schema:
            self._add_columns(steps, schema)
        first = self.tail
        for path, column in steps.columns.items():
            held = self.columns[path]
            if isinstance(held, _Tensors) and not isinstance(column, Tensor):
                held = self.columns[path] = held.as_items()
            held.put(first, column)
        return first

    def assign(self, parts: Segments, slots: np.ndarray) -> None:
        """Mark the rows that :meth:`put` wrote as belonging to slots; arguments as :meth:`accept`."""
        owners = slots if len(slots) == int(parts.stops[-1]) else np.repeat(slots, parts.sizes)
        self.owner[self.tail : self.tail + len(owners)] = owners

    def new_slots(self, number: int) -> list[int]:
        """Find ``number`` free slots; :meth:`accept` takes them."""
        lacking = number - len(self._free)
        if lacking > 0:
            known = len(self.ids)
            size = max(known + lacking, 2 * known, 16)
            longer = {}
            for name in ("ids", "first", "last", "length", "batch", "is_open"):
                held = getattr(self, name)
                longer[name] = np.zeros(size, dtype=held.dtype)
                longer[name][:known] = held
            free = [*range(size - 1, known - 1, -1), *self._free]
            with interrupts_deferred():
                self.__dict__.update(longer)
                self._free = free
        return self._free[len(self._free) - number :][::-1]

    def accept(
        self,
        parts: Segments,
        slots: np.ndarray,
        fresh: Mapping[int, int],
        gone: Mapping[int, np.ndarray],
    ) -> None:
        """Commit the batch that :meth:`put` wrote and :meth:`assign` assigned.

        Args:
            parts: its segments.
            slots: int64 ``[S]``, slot of each segment.
            fresh: first segment of each new episode, by slot.
            gone: rows of each closed episode, by slot.
        """
        self.batches += 1
        first, last = parts.starts, parts.stops - 1
        number = int(parts.stops[-1])
        for slot, i in fresh.items():
            self.first[slot], self.length[slot] = first[i] + self.tail, 0
        if parts.differ:
            self.length[slots] += parts.sizes
        else:
            np.add.at(self.length, slots, parts.sizes)  # A slot may have several segments.
        self.last[slots], self.batch[slots] = last + self.tail, self.batches
        self.num_steps += number
        self.tail += number
        for slot, its in gone.items():
            self._release(its)
            if slot in self.labels:
                self._free_slot(slot)
        if fresh:
            self._begin([(slot, parts.keys[i]) for slot, i in fresh.items() if slot not in gone])
        self._shrink(number)

    def restore(self, key: int, label: Label, steps: Steps) -> None:
        """Add a saved open episode."""
        lengths = torch.tensor([steps.length], device="cpu")
        schema = Schema.of(steps, lengths, share_next=False)
        if self.slots and self.schema is not None:
            schema = self.schema.merge(schema)
        self.put(steps, schema)
        (slot,) = self.new_slots(1)
        whole = Segments(np.array([key]), np.array([0]), np.array([steps.length]))
        self.assign(whole, np.array([slot]))
        self.accept(whole, np.array([slot]), {slot: 0}, {})
        del self.slots[self.labels[slot]]
        self.labels[slot], self.slots[label] = label, slot

    def discard(self, slot: int) -> None:
        """Drop an open episode."""
        rows = self.rows(slot)
        with interrupts_deferred():
            self._release(rows)
            self._free_slot(slot)
            self._shrink(0)

    # ---- inside ---------------------------------------------------------------------------------

    def _begin(self, episodes: list[tuple[int, int]]) -> None:
        """Open episodes, given as pairs of slot and id."""
        taken = {slot for slot, _ in episodes}
        if taken:
            self._free = [slot for slot in self._free if slot not in taken]
        for slot, key in episodes:
            self.ids[slot], self.is_open[slot] = key, True
            self.by_id.setdefault(key, []).append(slot)
            label = _new_label(key, self.slots)
            self.labels[slot], self.slots[label] = label, slot

    def _release(self, rows: np.ndarray) -> None:
        """Free rows."""
        self.owner[rows] = -1
        self.num_steps -= len(rows)
        for column in self.columns.values():
            if isinstance(column, _Items):
                column.release(rows)

    def _free_slot(self, slot: int) -> None:
        """Free a slot."""
        del self.slots[self.labels.pop(slot)]
        self._free.append(slot)
        self.is_open[slot] = False
        key = int(self.ids[slot])
        self.by_id[key].remove(slot)
        if not self.by_id[key]:
            del self.by_id[key]

    def _shrink(self, more: int) -> None:
        """Return memory that the open steps and ``more`` together do not need."""
        if not self.slots:
            self.tail = 0
        if len(self.owner) > max(_SMALL_LOG, 12 * (self.num_steps + more)):
            self._resize(more)

    def _open_slots(self) -> np.ndarray:
        """Slots of the open episodes, in no order."""
        return np.fromiter(self.slots.values(), dtype=np.int64, count=len(self.slots))

    def _add_columns(self, steps: Steps, schema: Schema) -> None:
        """Add the columns that steps of ``schema`` need."""
        size = len(self.owner)
        records, columns = self._records, dict(self.columns)
        if not self.slots:
            small = {
                path: schema.entries[path]
                for path, column in steps.columns.items()
                if isinstance(column, Tensor)
                and column.is_cpu
                and not _is_next_of_stored(path, schema)
            }
            records = _tensors_of(set(records_for(small, size, _MEMORY).values()))
            columns = _columns_in(records)
        for path, column in steps.columns.items():
            if path not in columns:
                fresh = _Tensors.like(column, size) if isinstance(column, Tensor) else None
                columns[path] = fresh or _Items(type(column), size)
        with interrupts_deferred():
            self._records, self.columns, self.schema = records, columns, schema

    def _map_columns(
        self, packed: Mapping[Path, Any], other: Callable[[Any], Any]
    ) -> dict[Path, Any]:
        """Take columns from ``packed`` where it has them; make the others with ``other``."""
        return {
            path: packed[path] if path in packed and isinstance(column, _Tensors) else other(column)
            for path, column in self.columns.items()
        }

    def _resize(self, more: int) -> None:
        """Compact the rows in use into a log of three times their number and ``more`` together."""
        live = np.flatnonzero(self.owner[: self.tail] >= 0)
        size = max(64, 3 * (len(live) + more))
        if size <= len(self.owner) <= 2 * size:
            size = len(self.owner)  # Memory that is already in use is the fastest.
        records = _tensors_of(record.like(size) for record, _ in self._records)
        for (_, tensors), (_, before) in zip(records, self._records, strict=True):
            tensors.put(0, before.take(live))
        columns = self._map_columns(
            _columns_in(records), lambda column: column.laid_out(live, size)
        )
        owner = np.full(size, -1, dtype=np.int32)
        owner[: len(live)] = self.owner[live]
        place = np.zeros(self.tail + 1, dtype=np.int64)
        place[live] = np.arange(len(live))
        slots, first, last = self._open_slots(), self.first.copy(), self.last.copy()
        first[slots], last[slots] = place[first[slots]], place[last[slots]]
        with interrupts_deferred():
            self._records, self.columns = records, columns
            self.first, self.last, self.owner, self.tail = first, last, owner, len(live)


class _Tensors:
    """An entry of one shape and dtype."""

    def __init__(self, held: Tensor) -> None:
        self.held = held
        self._array = as_array(held)
        self._bits = None if self._array is None else bits(held).numpy().reshape(len(held), -1)

    @classmethod
    def like(cls, column: Tensor, size: int) -> _Tensors:
        """Allocate ``size`` steps like those of a column."""
        with torch.inference_mode(False):
            shape = (size, *column.shape[1:])
            return cls(torch.empty(shape, dtype=column.dtype, device=column.device))

    def put(self, first: int, column: Any) -> None:
        """Write values from row ``first`` on."""
        array = None if self._array is None else as_array(column)
        if array is None or self._array is None:
            self.held[first : first + len(column)].copy_(column)
        else:
            self._array[first : first + len(array)] = array

    def take(self, rows: np.ndarray) -> Tensor:
        """Copy the values in ``rows``."""
        if self._array is None:
            return rows_at(self.held, torch.from_numpy(rows))
        taken = torch.from_numpy(_rows_at(self._array, rows))
        return taken if taken.dtype == self.held.dtype else taken.view(self.held.dtype)

    def bits_at(self, rows: np.ndarray) -> Bits:
        """Bits in ``rows``: integers ``[n, w]``."""
        return bits_at(self.held, rows) if self._bits is None else _rows_at(self._bits, rows)

    def laid_out(self, rows: np.ndarray, size: int) -> _Tensors:
        """Copy ``rows`` into a column with room for ``size``."""
        new = _Tensors.like(self.held, size)
        new.put(0, self.take(rows))
        return new

    def as_items(self) -> _Items:
        """The same values as a list with one tensor per step."""
        items = _Items(Rows, len(self.held))
        items.put(0, self.held)
        return items


class _Items:
    """An entry with tensors of varying shape or Python objects."""

    def __init__(self, kind: type, size: int) -> None:
        self.kind = kind
        self.items: list[Any] = [None] * size

    def put(self, first: int, column: Any) -> None:
        """Write copies of values from row ``first`` on."""
        column = Rows([*column]) if isinstance(column, Tensor) else column
        copies: Any = copied(column)
        self.items[first : first + len(copies.items)] = copies.items

    def take(self, rows: np.ndarray) -> Column:
        """Read the values in ``rows``, not copied."""
        column: Column = self.kind([self.items[row] for row in rows.tolist()])
        return column

    def bits_at(self, rows: np.ndarray) -> Bits:
        """Bits in ``rows``: one array a step."""
        return bits_at(self.kind(self.items), rows)

    def laid_out(self, rows: np.ndarray, size: int) -> _Items:
        """Move ``rows`` into a column with room for ``size``."""
        new = _Items(self.kind, size)
        new.items[: len(rows)] = [self.items[row] for row in rows.tolist()]
        return new

    def release(self, rows: np.ndarray) -> None:
        """Drop the values in ``rows``."""
        for row in rows.tolist():
            self.items[row] = None


def _tensors_of(records: Iterable[Record]) -> list[tuple[Record, _Tensors]]:
    """Pair records with their memory."""
    return [(record, _Tensors(record.data)) for record in records]


def _columns_in(records: Iterable[tuple[Record, _Tensors]]) -> dict[Path, _Tensors | _Items]:
    """Entries of records, by path."""
    return {
        path: _Tensors(entry)
        for record, _ in records
        for path, entry in record.entries(record.data).items()
    }


def _rows_at(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Copy ``rows`` of an array."""
    # take() is faster, but first copies the whole array if it is not contiguous.
    found: np.ndarray = array.take(rows, 0) if array.flags.c_contiguous else array[rows]
    return found


def _is_next_of_stored(path: Path, schema: Schema) -> bool:
    """Whether an entry is ``("next", k)`` of a stored ``k``, whose rows the storage may share."""
    return path[0] == "next" and path[1:] in schema.entries


def _new_label(key: int, known: Mapping[Label, int]) -> Label:
    """Return an unused label for an episode with id ``key``."""
    label: Label = key
    number = 2
    while label in known:
        label, number = (key, number), number + 1
    return label
