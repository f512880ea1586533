"""Episodes in columns: what the storage holds, without TorchRL.

Whole episodes come in at one end and leave at the other, the oldest first, so that three budgets
hold: of steps, of tokens and of episodes. ``admit`` refuses and changes nothing; ``append`` only
stores what was admitted.

An episode's rows are one block of the ring. What is written names its rows as ``Blocks``, the
blocks in the order of the data; what is read as a ``RowPlan``, windows of rows in any order; a
``Selection`` of the storage is a plan with the columns read so far; ``runs`` lists the rows of
either one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, cast

import torch
from torch import Tensor

from torchrl_mt.data.columns import (
    Change,
    DenseColumn,
    NextColumn,
    ObjectColumn,
    RaggedColumn,
    ReadPlan,
    RecordColumn,
    StoredColumn,
)
from torchrl_mt.data.growing import PromptColumn, additions
from torchrl_mt.data.memory import Memory
from torchrl_mt.data.record import Record, records_for
from torchrl_mt.data.ring import Blocks, Moves, Ring, runs
from torchrl_mt.data.rows import RowPlan
from torchrl_mt.data.schema import PROMPT, RESPONSE, Entry, Schema
from torchrl_mt.data.steps import Column, Path, Steps, step_tensors
from torchrl_mt.data.table import EpisodeTable
from torchrl_mt.data.token_count import count_tokens
from torchrl_mt.data.undisturbed import undisturbed

__all__ = ["Admission", "EpisodeStore"]

_USUAL_LENGTH = 32
"""Episodes are taken to be at least this long on average until they prove shorter."""


@dataclass(frozen=True)
class Admission:
    """Episodes that can be stored, one after the other."""

    schema: Schema
    """The schema once they are stored."""
    steps: Steps
    """Their steps, each column in the form in which it is stored."""
    lengths: Tensor
    """int64 ``[E]``: steps of each."""
    tokens: Tensor
    """int64 ``[E]``: tokens of each."""


class EpisodeStore:
    """At most ``max_episodes`` whole episodes, ``max_steps`` steps of them and ``max_tokens`` tokens.

    Every episode has one block of rows in a ring, of ``T`` rows, or ``T + 1`` where next entries
    share the rows of their root entries; every column keeps its values by these rows.

    Args:
        max_steps: the budget, in steps.
        device: where tensors are kept.
        share_next: whether next entries may be shared.
        max_tokens: the budget, in tokens; None for none.
        max_episodes: the budget, in episodes; None for none.
        scratch_dir: the folder for files that hold the tensors; None to hold them in memory.
    """

    def __init__(
        self,
        max_steps: int,
        device: torch.device,
        share_next: bool,
        max_tokens: int | None = None,
        max_episodes: int | None = None,
        scratch_dir: str | FilePath | None = None,
    ) -> None:
        self.max_steps = max_steps
        self.max_tokens = max_tokens
        self.max_episodes = max_episodes
        self.share_next = share_next
        self.memory = Memory(device, scratch_dir)
        self.schema: Schema | None = None
        self.columns: dict[Path, StoredColumn] = {}
        self.records: dict[Path, Record] = {}
        """Where the small entries are; several have one record."""
        self.table = EpisodeTable()
        self._rows = _RingRows(Ring(0))

    @property
    def nbytes(self) -> int:
        """Bytes that the columns hold, Python objects not counted."""
        records = sum(record.nbytes for record in set(self.records.values()))
        return records + sum(column.nbytes for column in self.columns.values())

    def admit(self, steps: Steps, lengths: Tensor) -> Admission:
        """Check episodes before they are stored.

        Args:
            steps: the episodes, one after the other, on the store's device.
            lengths: int64 ``[E]``, steps of each, at least one episode.

        Raises:
            ValueError: if one is empty, exceeds a budget or does not fit the schema.
        """
        sizes = lengths.tolist()
        if min(sizes) < 1:
            raise ValueError("an episode must have at least one step, got an empty one")
        longest = max(sizes)
        if longest > self.max_steps:
            raise ValueError(
                f"an episode of {longest} steps does not fit in max_steps={self.max_steps}: give "
                f"EpisodeStorage a larger budget"
            )
        if self.schema is None:
            schema = Schema.of(steps, lengths, share_next=self.share_next)
        else:
            schema = self.schema.admit(steps, lengths)
        return self._admitted(schema, steps, lengths)

    def append(self, admitted: Admission) -> None:
        """Store what :meth:`admit` gave, after the oldest have made room.

        Nothing is changed if that fails, or if it is interrupted.
        """
        commit = self._plan(admitted)
        with undisturbed():
            commit()

    def evict(self, episodes: int) -> None:
        """Let the oldest ``episodes`` leave; allocations stay."""
        if not episodes:
            return
        first, blocks = self._first_after(episodes), self._oldest(episodes)
        with undisturbed():
            self.table.evict(episodes)
            self._rows.ring.pop(next_start=first)
            for column in self.columns.values():
                column.release(blocks, first)

    def read(self, plan: ReadPlan, known: Mapping[Path, Column] | None = None) -> Steps:
        """The steps of ``plan``; columns that are ``known`` are not read again, and others added.

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
        columns.update(known)
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
            "seen_steps": self.table.end,
            "renumbered": self.table.renumbered,
        }

    def load_state_dict(self, state_dict: dict[str, Any], least: int = 0) -> None:
        """Store what :meth:`state_dict` gave, in a store that holds nothing yet.

        Args:
            state_dict: the state.
            least: steps get numbers from here on, if theirs are lower.

        Raises:
            ValueError: if it holds more than a budget.
        """
        lengths: Tensor = state_dict["lengths"]
        stored = int(lengths.sum())
        if stored > self.max_steps:
            raise ValueError(
                f"the state holds {stored} steps, more than max_steps={self.max_steps}"
            )
        episodes = lengths.shape[0]
        if self.max_episodes is not None and episodes > self.max_episodes:
            raise ValueError(
                f"the state holds {episodes} episodes, more than max_episodes={self.max_episodes}"
            )
        schema: Schema | None = state_dict["schema"]
        if schema is not None and not stored:
            # An empty storage knows what its steps look like, too.
            self.schema, self._rows = schema, self._new_rows(schema, torch.ones(1, device="cpu"))
            self.columns, self.records = self._columns_for(schema, self._rows.ring.capacity)
        if schema is not None and stored:
            steps = Steps(stored, state_dict["columns"], schema.root_class).on(self.memory.device)
            admitted = self._admitted(schema, steps, lengths)
            tokens = int(admitted.tokens.sum())
            if self.max_tokens is not None and tokens > self.max_tokens:
                raise ValueError(
                    f"the state holds {tokens} tokens, more than max_tokens={self.max_tokens}"
                )
            self.append(admitted)
        first = state_dict["seen_steps"] - stored
        renumbered = state_dict.get("renumbered", 0) + max(least - first, 0)
        self.table.renumber(state_dict["oldest"], max(least, first), renumbered)

    def _admitted(self, schema: Schema, steps: Steps, lengths: Tensor) -> Admission:
        """Episodes that fit the schema, in the form in which they are stored.

        Raises:
            ValueError: if one is longer than ``max_tokens``.
        """
        taken_apart = _taken_apart(schema, steps, lengths)
        tokens = count_tokens(schema, taken_apart, lengths)
        if schema.growing:
            steps = taken_apart
        if self.max_tokens is not None and int(tokens.max()) > self.max_tokens:
            raise ValueError(
                f"an episode of {int(tokens.max())} tokens does not fit in "
                f"max_tokens={self.max_tokens}: give EpisodeStorage a larger budget"
            )
        return Admission(schema, steps, lengths, tokens)

    def _plan(self, admitted: Admission) -> Callable[[], None]:
        """What stores the episodes; whatever can fail has failed before it is returned."""
        schema, table = admitted.schema, self.table
        skipped = max(self.not_kept(admitted).values()) if len(admitted.lengths) > 1 else 0
        lengths, tokens = admitted.lengths[skipped:], admitted.tokens[skipped:]
        skipped_steps = admitted.steps.length - int(lengths.sum())
        steps = admitted.steps[skipped_steps:]
        rows = replace(self._rows) if self.schema is not None else self._new_rows(schema, lengths)
        columns, records, recount = self.columns, self.records, None
        if schema is not self.schema:
            columns, records = self._columns_for(schema, rows.ring.capacity)
            recount = self._recount(schema, columns)
        leaving = table.num_episodes
        if not skipped:
            leaving = self._leaving(lengths, int(tokens.sum()), recount)
        rows.ring = ring = replace(rows.ring)
        first, moves, left = self._first_after(leaving), None, None
        if leaving:
            ring.pop(next_start=first)
            left = self._oldest(leaving)
        sizes = (lengths + rows.pad).tolist()
        starts = ring.push_all(sizes)
        if starts is None:
            moves = self._grow(rows, sizes)
            columns = {
                path: column.laid_out(moves, ring.capacity) for path, column in columns.items()
            }
            moved = {
                record: record.laid_out(moves, ring.capacity) for record in set(records.values())
            }
            records = {path: moved[record] for path, record in records.items()}
            _link(columns, records)
            left, first = None, None if first is None else int(moves.positions(torch.tensor(first)))
            starts = ring.push_all(sizes)
            assert starts is not None
        written = Blocks(torch.tensor(starts, device="cpu"), lengths)
        change = Change(written, leaving > 0, first, left)
        commits = [column.plan(change, steps.columns[path]) for path, column in columns.items()]

        def commit() -> None:
            if recount is not None:
                table.recount(recount)
            table.evict(leaving)
            table.pass_over(skipped, skipped_steps)
            if moves is not None:
                table.move(moves)
            self.schema, self.columns, self.records, self._rows = schema, columns, records, rows
            for store in commits:
                store()
            table.extend(lengths, written.starts, tokens)

        return commit

    def _leaving(self, lengths: Tensor, tokens: int, recount: Tensor | None) -> int:
        """How many of the stored episodes must leave for others, of so many steps and tokens."""
        table = self.table
        leaving = table.episodes_holding(table.num_steps + int(lengths.sum()) - self.max_steps)
        if self.max_episodes is not None:
            leaving = max(leaving, table.num_episodes + lengths.shape[0] - self.max_episodes)
        if self.max_tokens is None:
            return leaving
        if recount is None:
            surplus = table.num_tokens + tokens - self.max_tokens
            return max(leaving, table.episodes_holding(0, surplus))
        held = recount.cumsum(0)
        surplus = int(held[-1]) + tokens - self.max_tokens
        return max(leaving, int(torch.searchsorted(held, surplus)) + 1 if surplus > 0 else 0)

    def not_kept(self, admitted: Admission) -> dict[str, int]:
        """How many of the episodes leave again as the later ones of them come, for each budget."""

        def beyond(sizes: Tensor, budget: int) -> int:
            return int((sizes.flip(0).cumsum(0) > budget).sum())

        skipped = {"max_steps": beyond(admitted.lengths, self.max_steps)}
        if self.max_tokens is not None:
            skipped["max_tokens"] = beyond(admitted.tokens, self.max_tokens)
        if self.max_episodes is not None:
            skipped["max_episodes"] = max(admitted.lengths.shape[0] - self.max_episodes, 0)
        return skipped

    def _oldest(self, episodes: int) -> Blocks:
        """The rows of the oldest episodes."""
        table = self.table
        return Blocks(table.starts[:episodes].clone(), table.lengths[:episodes].clone())

    def _first_after(self, episodes: int) -> int | None:
        """The first row of the oldest episode but so many; None if there is none."""
        stays = episodes < self.table.num_episodes
        return int(self.table.starts[episodes]) if stays else None

    def _new_rows(self, schema: Schema, lengths: Tensor) -> _RingRows:
        """Rows for a store that begins with episodes of these lengths."""
        pad = int(any(entry.shared for entry in schema.entries.values()))
        slack = int(lengths.max()) + pad
        usual = max(float(lengths.float().mean()), _USUAL_LENGTH)
        return _RingRows(
            Ring(self.max_steps + pad * math.ceil(self.max_steps / usual) + slack), pad, slack
        )

    def _columns_for(
        self, schema: Schema, capacity: int
    ) -> tuple[dict[Path, StoredColumn], dict[Path, Record]]:
        """Columns that fit ``schema``, with what is stored; those that fit already as they are."""
        records = self.records
        if not self.columns:
            records = records_for(schema.entries, capacity, self.memory)
        columns: dict[Path, StoredColumn] = {}
        for path, entry in schema.entries.items():
            column = copy(self.columns.get(path))
            if isinstance(column, NextColumn) and not entry.shared:
                column = column.unshared(self.memory)
            if isinstance(column, (DenseColumn, RecordColumn)) and entry.kind == "ragged":
                column = self._as_ragged(column, entry, capacity)
            if column is None and path in records:
                column = RecordColumn(records[path], path)
            if column is None:
                column = NextColumn() if entry.shared else self._new_column(entry, capacity)
            columns[path] = column
        if schema.growing and not isinstance(columns[PROMPT], PromptColumn):
            columns[PROMPT] = self._as_growing(
                columns[PROMPT], columns[RESPONSE], schema.entries[PROMPT], capacity
            )
        _link(columns, records)
        return columns, records

    def _new_column(self, entry: Entry, capacity: int) -> StoredColumn:
        """An empty column for ``entry``."""
        if entry.kind == "object":
            return ObjectColumn(capacity)
        if entry.kind == "dense":
            return DenseColumn(entry, capacity, self.memory)
        return RaggedColumn(entry, capacity, self.memory)

    def _as_ragged(
        self, dense: DenseColumn | RecordColumn, entry: Entry, capacity: int
    ) -> RaggedColumn:
        """A dense column's episodes, stored as ragged ones."""
        ragged = RaggedColumn(entry, capacity, self.memory)
        if self.table.num_episodes:
            stored = self._oldest(self.table.num_episodes)
            ragged.plan(Change(stored), dense.read(RowPlan(stored.rows)))()
        return ragged

    def _as_growing(
        self, whole: StoredColumn, responses: StoredColumn, entry: Entry, capacity: int
    ) -> PromptColumn:
        """The prompts of a column, stored as what they add."""
        growing = PromptColumn(entry, capacity, self.memory)
        if self.table.num_episodes:
            stored = self._oldest(self.table.num_episodes)
            plan = RowPlan(stored.rows)
            prompts, answers = (step_tensors(column.read(plan)) for column in (whole, responses))
            growing.plan(Change(stored), additions(prompts, answers, stored.lengths))()
        return growing

    def _recount(self, schema: Schema, columns: dict[Path, StoredColumn]) -> Tensor | None:
        """The tokens of the stored episodes under another schema, if they count otherwise."""
        before, lengths = self.schema, self.table.lengths
        if before is None or not len(lengths) or before.counted == schema.counted:
            return None
        plan = RowPlan(runs(self.table.starts, lengths))
        counted = {path: plan.read(path, columns[path]) for path in schema.counted}
        stored = Steps(len(plan), counted, schema.root_class)
        return count_tokens(schema, _taken_apart(schema, stored, lengths), lengths)

    def _grow(self, rows: _RingRows, sizes: list[int]) -> Moves:
        """Make the ring larger, so that blocks of these sizes find a place.

        The budget counts steps, and a row more per episode where next entries are shared: the
        ring aims at the rows that episodes of the mean length so far need. The slack for the
        longest episode grows by half at least, so that the cost per write stays constant.
        """
        longest = max(sizes)
        if longest > rows.slack:
            rows.slack = min(max(longest, rows.slack * 3 // 2), self.max_steps + rows.pad)
        episodes = self.table.next + len(sizes)
        mean = (self.table.end + sum(sizes) - rows.pad * len(sizes)) / episodes
        wanted = self.max_steps + rows.pad * math.ceil(self.max_steps / mean) + rows.slack
        moves = rows.ring.layout()
        needed = moves.upper + moves.lower + sum(sizes)
        if rows.ring.capacity >= wanted:
            wanted = rows.ring.capacity + rows.ring.capacity // 16
        return rows.ring.resize(max(wanted, needed))


@dataclass
class _RingRows:
    """The ring, and what its size was made for."""

    ring: Ring
    pad: int = 0
    """Rows that an episode has beyond its steps: 1 where next entries are shared."""
    slack: int = 0
    """Rows of the longest episode that the ring has room for beside the budget."""


def _link(columns: dict[Path, StoredColumn], records: dict[Path, Record]) -> None:
    """Tell the columns that are read from others which those are."""
    for path, column in columns.items():
        if isinstance(column, RecordColumn):
            column.follow(records[path])
    for path, column in columns.items():
        if isinstance(column, NextColumn):
            source = columns[path[1:]]
            assert isinstance(source, (DenseColumn, RecordColumn))
            column.source = source
        elif isinstance(column, PromptColumn):
            column.responses = columns[RESPONSE]


def _taken_apart(schema: Schema, steps: Steps, lengths: Tensor) -> Steps:
    """The steps with each prompt given by what it adds."""
    if not schema.has_turns:
        return steps
    prompts, responses = (step_tensors(steps.columns[path]) for path in (PROMPT, RESPONSE))
    grown = cast(Column, additions(prompts, responses, lengths))
    return replace(steps, columns={**steps.columns, PROMPT: grown})
