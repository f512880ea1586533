"""Episodes in columns: what the storage holds, without TorchRL.

Whole episodes come in at one end and leave at the other. ``admit`` refuses and changes nothing;
``append`` only stores what was admitted.

An episode's rows are one block of the ring. What is written names its rows as ``Blocks``, the
blocks in the order of the data; what is read as a ``RowPlan``, windows of rows in any order; a
``Selection`` of the storage is a plan with the columns read so far; ``runs`` lists the rows of
either one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_mt.data.columns import (
    DenseColumn,
    NextColumn,
    ObjectColumn,
    RaggedColumn,
    ReadPlan,
    RowPlan,
    StoredColumn,
)
from torchrl_mt.data.ring import Blocks, Ring, runs
from torchrl_mt.data.schema import Entry, Schema
from torchrl_mt.data.steps import Column, Path, Steps
from torchrl_mt.data.table import EpisodeTable

__all__ = ["EpisodeStore"]

_USUAL_LENGTH = 32
"""Episodes are taken to be at least this long on average until they prove shorter."""


class EpisodeStore:
    """Whole episodes, at most ``max_steps`` steps of them.

    Every episode has one block of rows in a ring, of ``T`` rows, or ``T + 1`` where next entries
    share the rows of their root entries; every column keeps its values by these rows.

    Args:
        max_steps: the budget, in steps.
        device: where tensors are kept.
        share_next: whether next entries may be shared.
    """

    def __init__(self, max_steps: int, device: torch.device, share_next: bool) -> None:
        self.max_steps = max_steps
        self.device = device
        self.share_next = share_next
        self.schema: Schema | None = None
        self.columns: dict[Path, StoredColumn] = {}
        self.table = EpisodeTable()
        self._ring = Ring(0)
        self._slack = 0
        """Rows of the longest episode that the ring has room for beside the budget."""
        self._pad = 0
        """Rows that an episode has beyond its steps: 1 where next entries are shared."""
        self._seen_steps = 0
        """Steps ever stored, those that left included."""

    @property
    def first_number(self) -> int:
        """How many steps came before the oldest stored one, ever."""
        return self._seen_steps - self.table.num_steps

    @property
    def nbytes(self) -> int:
        """Bytes that the columns hold, Python objects not counted."""
        return sum(column.nbytes for column in self.columns.values())

    def admit(self, steps: Steps, lengths: Tensor) -> Schema:
        """The schema once these episodes are stored.

        Args:
            steps: the episodes, one after the other.
            lengths: int64 ``[E]``, steps of each, at least one episode.

        Raises:
            ValueError: if one is empty, longer than ``max_steps`` or does not fit the schema.
        """
        if int(lengths.min()) < 1:
            raise ValueError("an episode must have at least one step, got an empty one")
        longest = int(lengths.max())
        if longest > self.max_steps:
            raise ValueError(
                f"an episode of {longest} steps does not fit in max_steps={self.max_steps}: give "
                f"EpisodeStorage a larger budget"
            )
        if self.schema is None:
            return Schema.of(steps, lengths, share_next=self.share_next)
        return self.schema.admit(steps, lengths)

    def append(self, schema: Schema, steps: Steps, lengths: Tensor) -> None:
        """Store episodes, after the oldest have made room.

        Args:
            schema: what :meth:`admit` gave for them.
            steps: the episodes, one after the other, on the store's device.
            lengths: int64 ``[E]``, steps of each.
        """
        if schema is not self.schema:
            self._adopt(schema, lengths)
        ends = lengths.cumsum(0)
        done = 0
        while done < lengths.shape[0]:
            # As many episodes at once as the budget holds.
            begin = int(ends[done] - lengths[done])
            stop = int(torch.searchsorted(ends, begin + self.max_steps, right=True))
            self._write(steps[begin : int(ends[stop - 1])], lengths[done:stop])
            done = stop

    def evict(self, episodes: int) -> None:
        """Let the oldest ``episodes`` leave; allocations stay."""
        if not episodes:
            return
        stays = episodes < self.table.num_episodes
        first = int(self.table.starts[episodes]) if stays else None
        blocks = Blocks(self.table.starts[:episodes], self.table.lengths[:episodes])
        for column in self.columns.values():
            column.release(blocks, first)
        self.table.evict(episodes)
        self._ring.pop(next_start=first)

    def read(self, plan: ReadPlan, known: Mapping[Path, Column] | None = None) -> Steps:
        """The steps of ``plan``; columns that are ``known`` are not read again.

        Raises:
            IndexError: if nothing was ever stored.
        """
        if self.schema is None:
            raise IndexError("nothing is stored yet")
        known = known or {}
        columns = {
            path: known[path] if path in known else plan.read(path, column)
            for path, column in self.columns.items()
        }
        return Steps(len(plan), columns, self.schema.root_class)

    def state_dict(self) -> dict[str, Any]:
        """Everything stored, as copies."""
        columns: dict[Path, Column] = {}
        if self.schema is not None:
            columns = self.read(RowPlan(runs(self.table.starts, self.table.lengths))).columns
        return {
            "schema": self.schema,
            "columns": columns,
            "lengths": self.table.lengths.clone(),
            "oldest": self.table.oldest,
            "seen_steps": self._seen_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store what :meth:`state_dict` gave, in a store that holds nothing yet.

        Raises:
            ValueError: if it holds more than ``max_steps`` steps.
        """
        lengths: Tensor = state_dict["lengths"]
        stored = int(lengths.sum())
        if stored > self.max_steps:
            raise ValueError(
                f"the state holds {stored} steps, more than max_steps={self.max_steps}"
            )
        schema: Schema | None = state_dict["schema"]
        if schema is not None:
            self._adopt(schema, lengths if stored else torch.ones(1, device="cpu"))
        if schema is not None and stored:
            steps = Steps(stored, state_dict["columns"], schema.root_class)
            self._write(steps.on(self.device), lengths)
        self.table.oldest = state_dict["oldest"]
        self._seen_steps = state_dict["seen_steps"]

    def _adopt(self, schema: Schema, lengths: Tensor) -> None:
        """Make the columns fit ``schema``; ``lengths`` are those of the episodes to come."""
        if self.schema is None:
            self._pad = int(any(entry.shared for entry in schema.entries.values()))
            self._slack = int(lengths.max()) + self._pad
            usual = max(float(lengths.float().mean()), _USUAL_LENGTH)
            rows = self.max_steps + self._pad * math.ceil(self.max_steps / usual) + self._slack
            self._ring = Ring(rows)
        entries = schema.entries
        for path, entry in entries.items():
            column = self.columns.get(path)
            if isinstance(column, NextColumn) and not entry.shared:
                column = self.columns[path] = column.unshared()
            if isinstance(column, DenseColumn) and entry.kind == "ragged":
                self.columns[path] = self._as_ragged(column, entry)
            elif column is None and not entry.shared:
                self.columns[path] = self._new_column(entry)
        for path in entries:
            if path not in self.columns:
                source = self.columns[path[1:]]
                assert isinstance(source, DenseColumn)
                self.columns[path] = NextColumn(source)
        self.columns = {path: self.columns[path] for path in entries}
        self.schema = schema

    def _new_column(self, entry: Entry) -> StoredColumn:
        """An empty column for ``entry``."""
        if entry.kind == "object":
            return ObjectColumn(self._ring.capacity)
        if entry.kind == "dense":
            return DenseColumn.empty(entry, self._ring.capacity, self.device)
        return RaggedColumn(entry, self._ring.capacity, self.device)

    def _as_ragged(self, dense: DenseColumn, entry: Entry) -> RaggedColumn:
        """A dense column's episodes, stored as ragged ones."""
        ragged = RaggedColumn(entry, self._ring.capacity, self.device)
        if self.table.num_episodes:
            blocks = Blocks(self.table.starts, self.table.lengths)
            ragged.write(blocks, dense.read(RowPlan(blocks.rows)))
        return ragged

    def _write(self, steps: Steps, lengths: Tensor) -> None:
        """Store admitted episodes that the budget holds, after the oldest have made room."""
        self.evict(
            self.table.episodes_holding(self.table.num_steps + steps.length - self.max_steps)
        )
        sizes = (lengths + self._pad).tolist()
        starts = self._ring.push_all(sizes)
        if starts is None:
            self._grow(sizes)
            starts = self._ring.push_all(sizes)
            assert starts is not None
        blocks = Blocks(torch.tensor(starts, device="cpu"), lengths)
        for path, column in self.columns.items():
            column.write(blocks, steps.columns[path])
        self.table.extend(lengths, blocks.starts)
        self._seen_steps += steps.length

    def _grow(self, sizes: list[int]) -> None:
        """Lay the live rows out in a larger ring, in which these blocks find a place.

        The budget counts steps, and a row more per episode where next entries are shared: the
        ring aims at the rows that episodes of the mean length so far need. The slack for the
        longest episode grows by half at least, so that the cost per write stays constant.
        """
        longest = max(sizes)
        if longest > self._slack:
            self._slack = min(max(longest, self._slack * 3 // 2), self.max_steps + self._pad)
        episodes = self.table.next + len(sizes)
        mean = (self._seen_steps + sum(sizes) - self._pad * len(sizes)) / episodes
        wanted = self.max_steps + self._pad * math.ceil(self.max_steps / mean) + self._slack
        moves = self._ring.layout()
        needed = moves.upper + moves.lower + sum(sizes)
        if self._ring.capacity >= wanted:
            wanted = self._ring.capacity + self._ring.capacity // 16
        moves = self._ring.resize(max(wanted, needed))
        for column in self.columns.values():
            column.relayout(moves, self._ring.capacity)
        self.table.move(moves)
