"""Episodes in columns: what the storage holds, without TorchRL.

Whole episodes come in at one end and leave at the other, the oldest first, so that two budgets
hold: of steps and of tokens. ``admit`` refuses and changes nothing; ``append`` only stores what was
admitted.

An episode's rows are one block of the ring. What is written names its rows as ``Blocks``, the
blocks in the order of the data; what is read as a ``RowPlan``, windows of rows in any order; a
``Selection`` of the storage is a plan with the columns read so far; ``runs`` lists the rows of
either one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, cast

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
from torchrl_mt.data.growing import PromptColumn, additions
from torchrl_mt.data.memory import Memory
from torchrl_mt.data.ring import Blocks, Ring, runs
from torchrl_mt.data.schema import PROMPT, RESPONSE, Entry, Schema
from torchrl_mt.data.steps import Column, Path, Steps, step_tensors
from torchrl_mt.data.table import EpisodeTable
from torchrl_mt.data.token_count import count_tokens

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
    """Whole episodes, at most ``max_steps`` steps of them and ``max_tokens`` tokens.

    Every episode has one block of rows in a ring, of ``T`` rows, or ``T + 1`` where next entries
    share the rows of their root entries; every column keeps its values by these rows.

    Args:
        max_steps: the budget, in steps.
        device: where tensors are kept.
        share_next: whether next entries may be shared.
        max_tokens: the budget, in tokens; None for none.
        scratch_dir: the folder for files that hold the tensors; None to hold them in memory.
    """

    def __init__(
        self,
        max_steps: int,
        device: torch.device,
        share_next: bool,
        max_tokens: int | None = None,
        scratch_dir: str | FilePath | None = None,
    ) -> None:
        self.max_steps = max_steps
        self.max_tokens = max_tokens
        self.share_next = share_next
        self.memory = Memory(device, scratch_dir)
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
        """Store what :meth:`admit` gave, after the oldest have made room."""
        lengths, tokens = admitted.lengths, admitted.tokens
        if admitted.schema is not self.schema:
            self._adopt(admitted.schema, lengths)
        if lengths.shape[0] == 1:
            self._write(admitted.steps, lengths, tokens)
            return
        ends, token_ends = lengths.cumsum(0), tokens.cumsum(0)
        done = 0
        while done < lengths.shape[0]:
            # As many episodes at once as the budgets hold.
            begin = int(ends[done] - lengths[done])
            stop = int(torch.searchsorted(ends, begin + self.max_steps, right=True))
            if self.max_tokens is not None:
                held = int(token_ends[done] - tokens[done]) + self.max_tokens
                stop = min(stop, int(torch.searchsorted(token_ends, held, right=True)))
            part = admitted.steps[begin : int(ends[stop - 1])]
            self._write(part, lengths[done:stop], tokens[done:stop])
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
            ValueError: if it holds more than a budget.
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
            steps = Steps(stored, state_dict["columns"], schema.root_class).on(self.memory.device)
            admitted = self._admitted(schema, steps, lengths)
            tokens = int(admitted.tokens.sum())
            if self.max_tokens is not None and tokens > self.max_tokens:
                raise ValueError(
                    f"the state holds {tokens} tokens, more than max_tokens={self.max_tokens}"
                )
            self._write(admitted.steps, lengths, admitted.tokens)
        self.table.oldest = state_dict["oldest"]
        self._seen_steps = state_dict["seen_steps"]

    def _admitted(self, schema: Schema, steps: Steps, lengths: Tensor) -> Admission:
        """Episodes that fit the schema, in the form in which they are stored.

        Raises:
            ValueError: if one is longer than ``max_tokens``.
        """
        steps = _as_stored(schema, steps, lengths)
        tokens = count_tokens(schema, steps, lengths)
        if self.max_tokens is not None and int(tokens.max()) > self.max_tokens:
            raise ValueError(
                f"an episode of {int(tokens.max())} tokens does not fit in "
                f"max_tokens={self.max_tokens}: give EpisodeStorage a larger budget"
            )
        return Admission(schema, steps, lengths, tokens)

    def _adopt(self, schema: Schema, lengths: Tensor) -> None:
        """Make the columns fit ``schema``; ``lengths`` are those of the episodes to come."""
        if self.schema is None:
            self._pad = int(any(entry.shared for entry in schema.entries.values()))
            self._slack = int(lengths.max()) + self._pad
            usual = max(float(lengths.float().mean()), _USUAL_LENGTH)
            rows = self.max_steps + self._pad * math.ceil(self.max_steps / usual) + self._slack
            self._ring = Ring(rows)
        columns: dict[Path, StoredColumn] = {}
        for path, entry in schema.entries.items():
            column = self.columns.get(path)
            if isinstance(column, NextColumn) and not entry.shared:
                column = column.unshared()
            if isinstance(column, DenseColumn) and entry.kind == "ragged":
                column = self._as_ragged(column, entry)
            if column is None:
                column = NextColumn() if entry.shared else self._new_column(entry)
            columns[path] = column
        if schema.growing and not isinstance(columns[PROMPT], PromptColumn):
            columns[PROMPT] = self._as_growing(
                columns[PROMPT], columns[RESPONSE], schema.entries[PROMPT]
            )
        self._link(columns)
        others_count = self.schema is not None and self.schema.counted != schema.counted
        self.columns, self.schema = columns, schema
        if others_count:
            stored = self.read(RowPlan(runs(self.table.starts, self.table.lengths)))
            stored = _as_stored(schema, stored, self.table.lengths)
            self.table.recount(count_tokens(schema, stored, self.table.lengths))

    @staticmethod
    def _link(columns: dict[Path, StoredColumn]) -> None:
        """Tell the columns that are read from others which those are."""
        for path, column in columns.items():
            if isinstance(column, NextColumn):
                source = columns[path[1:]]
                assert isinstance(source, DenseColumn)
                column.source = source
            elif isinstance(column, PromptColumn):
                column.responses = columns[RESPONSE]

    def _new_column(self, entry: Entry) -> StoredColumn:
        """An empty column for ``entry``."""
        if entry.kind == "object":
            return ObjectColumn(self._ring.capacity)
        if entry.kind == "dense":
            return DenseColumn(entry, self._ring.capacity, self.memory)
        return RaggedColumn(entry, self._ring.capacity, self.memory)

    def _as_ragged(self, dense: DenseColumn, entry: Entry) -> RaggedColumn:
        """A dense column's episodes, stored as ragged ones."""
        ragged = RaggedColumn(entry, self._ring.capacity, self.memory)
        if self.table.num_episodes:
            blocks = Blocks(self.table.starts, self.table.lengths)
            ragged.write(blocks, dense.read(RowPlan(blocks.rows)))
        return ragged

    def _as_growing(
        self, whole: StoredColumn, responses: StoredColumn, entry: Entry
    ) -> PromptColumn:
        """The prompts of a column, stored as what they add."""
        growing = PromptColumn(entry, self._ring.capacity, self.memory)
        if self.table.num_episodes:
            blocks = Blocks(self.table.starts, self.table.lengths)
            plan = RowPlan(blocks.rows)
            prompts, answers = (step_tensors(column.read(plan)) for column in (whole, responses))
            growing.write(blocks, additions(prompts, answers, blocks.lengths))
        return growing

    def _write(self, steps: Steps, lengths: Tensor, tokens: Tensor) -> None:
        """Store admitted episodes that the budgets hold, after the oldest have made room."""
        table, most = self.table, self.max_tokens
        surplus = 0 if most is None else table.num_tokens + int(tokens.sum()) - most
        self.evict(table.episodes_holding(table.num_steps + steps.length - self.max_steps, surplus))
        sizes = (lengths + self._pad).tolist()
        starts = self._ring.push_all(sizes)
        if starts is None:
            self._grow(sizes)
            starts = self._ring.push_all(sizes)
            assert starts is not None
        blocks = Blocks(torch.tensor(starts, device="cpu"), lengths)
        for path, column in self.columns.items():
            column.write(blocks, steps.columns[path])
        self.table.extend(lengths, blocks.starts, tokens)
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
        ring = replace(self._ring)
        moves = ring.layout()
        needed = moves.upper + moves.lower + sum(sizes)
        if ring.capacity >= wanted:
            wanted = ring.capacity + ring.capacity // 16
        moves = ring.resize(max(wanted, needed))
        # Nothing is changed before every column has found its memory.
        columns = {
            path: column.laid_out(moves, ring.capacity) for path, column in self.columns.items()
        }
        self._link(columns)
        self._ring, self.columns = ring, columns
        self.table.move(moves)


def _as_stored(schema: Schema, steps: Steps, lengths: Tensor) -> Steps:
    """The steps with a growing prompt taken apart."""
    if not schema.growing:
        return steps
    prompts, responses = (step_tensors(steps.columns[path]) for path in (PROMPT, RESPONSE))
    grown = cast(Column, additions(prompts, responses, lengths))
    return replace(steps, columns={**steps.columns, PROMPT: grown})
