"""Episodes in columns: the contents of a storage, without TorchRL.

Whole episodes are appended and evicted, the oldest first, within budgets of steps, tokens and
episodes. ``admit`` checks episodes and changes nothing; ``append`` stores admitted ones.

An episode's rows are one block of the ring. Writes name their rows as ``Blocks``, in the order of the
data. Reads name theirs as a ``RowPlan``, windows of rows in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass, replace
from pathlib import Path as FilePath
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchrl_mt.data._store.clip_marks import ClipMarks
from torchrl_mt.data._store.columns.columns import (
    Change,
    DenseColumn,
    NextColumn,
    ObjectColumn,
    RaggedColumn,
    ReadPlan,
    RecordColumn,
    StoredColumn,
)
from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.columns.prompt_column import PromptColumn, Prompts
from torchrl_mt.data._store.columns.records import Record, records_for
from torchrl_mt.data._store.columns.rows import RowPlan
from torchrl_mt.data._store.deferred_interrupts import interrupts_deferred
from torchrl_mt.data._store.files.column_files import Part, SavedColumn
from torchrl_mt.data._store.handles import KINDS
from torchrl_mt.data._store.plain import plain_schema, schema_from
from torchrl_mt.data._store.ring import Blocks, Moves, Ring, runs
from torchrl_mt.data._store.schema import PARENT, PROMPT, RESPONSE, Entry, Schema
from torchrl_mt.data._store.steps import Column, Objects, Path, Steps, own
from torchrl_mt.data._store.table import EpisodeTable
from torchrl_mt.data._store.token_count import count_tokens

__all__ = ["Admission", "Budgets", "EpisodeStore"]

_USUAL_LENGTH = 32
"""Assumed least mean length of episodes; the ring grows if they are shorter."""


@dataclass(frozen=True)
class Admission:
    """Checked episodes that can be stored."""

    schema: Schema
    """The schema once they are stored."""
    steps: Steps
    """Their steps, each column in the form in which it is stored."""
    lengths: Tensor
    """int64 ``[E]``: steps of each episode."""
    tokens: Tensor
    """int64 ``[E]``: tokens of each episode."""


class Budgets(NamedTuple):
    """The most that a store holds; None for no limit."""

    max_steps: int
    max_tokens: int | None
    max_episodes: int | None


class EpisodeStore:
    """Whole episodes within budgets of steps, tokens and episodes.

    Every episode has one block of rows in a ring: ``T`` rows, or ``T + 1`` if a ``("next", k)`` shares
    the rows of ``k``. Every column stores its values by these rows.

    Args:
        budgets: the most that it holds.
        device: device of the stored tensors.
        share_next: whether ``("next", k)`` may share the rows of ``k``.
        scratch_dir: folder for files that hold the tensors; None keeps them in memory.
    """

    def __init__(
        self,
        budgets: Budgets,
        device: torch.device,
        share_next: bool,
        scratch_dir: str | FilePath | None = None,
    ) -> None:
        self.budgets = budgets
        self.share_next = share_next
        self.memory = Memory(device, scratch_dir)
        self.schema: Schema | None = None
        self.columns: dict[Path, StoredColumn] = {}
        self.table = EpisodeTable()
        self._rows = _RingRows(Ring(0))
        self._marks: list[ClipMarks | None] = [None]
        """How sampled clips are marked, by the kind that their handles tell."""

    def kind_for(self, marks: ClipMarks | None) -> int:
        """Return the kind by which handles tell these marks; ``RuntimeError`` if there are too many."""
        if marks in self._marks:
            return self._marks.index(marks)
        if len(self._marks) == KINDS:
            raise RuntimeError(
                f"the samplers of one EpisodeStorage may mark clips in {KINDS - 1} ways (keys, stride, "
                f"padding, burn-in), and these are more."
            )
        self._marks.append(marks)
        return len(self._marks) - 1

    def marks_of(self, kind: int) -> ClipMarks | None:
        """Return the marks of a kind; ``IndexError`` if no sampler of this store used them."""
        if kind >= len(self._marks):
            raise IndexError("index has steps of a sample of another storage.")
        return self._marks[kind]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors; Python objects are not counted."""
        columns = sum(column.nbytes for column in self.columns.values())
        return columns + sum(record.nbytes for record in self.records)

    @property
    def records(self) -> set[Record]:
        """The records that hold the small entries."""
        return {c.record for c in self.columns.values() if isinstance(c, RecordColumn)}

    def admit(self, steps: Steps, lengths: Tensor) -> Admission:
        """Check episodes before they are stored.

        Args:
            steps: the episodes, one after the other, on the store's device.
            lengths: int64 ``[E]``, steps of each, at least one episode.

        Raises:
            ValueError: if an episode is empty, exceeds a budget or does not fit the schema.
        """
        sizes = lengths.tolist()
        if min(sizes) < 1:
            raise ValueError("an episode must have at least one step, got an empty one.")
        longest, max_steps = max(sizes), self.budgets.max_steps
        if longest > max_steps:
            raise ValueError(
                f"an episode of {longest} steps does not fit in max_steps={max_steps}: give "
                f"EpisodeStorage a larger budget."
            )
        if self.schema is None:
            schema = Schema.of(steps, lengths, share_next=self.share_next)
        elif self.schema.fits(steps, lengths):
            return self._admitted(self.schema, steps, lengths)
        else:
            schema = self.schema.admit(steps, lengths)
        return self._admitted(schema, steps, lengths)

    def append(self, admitted: Admission, metadata: Sequence[Mapping[Any, Any]] = ()) -> None:
        """Evict the oldest episodes and store admitted ones; if that fails, change nothing.

        Args:
            admitted: the episodes.
            metadata: metadata of each episode, or nothing.
        """
        commit = self._plan(admitted, metadata)
        with interrupts_deferred():
            commit()

    def evict(self, episodes: int) -> None:
        """Evict the oldest ``episodes``; keep allocations."""
        if not episodes:
            return
        first, blocks = self._first_after(episodes), self._oldest(episodes)
        with interrupts_deferred():
            self.table.evict(episodes)
            self._rows.ring.pop(next_start=first)
            for column in self.columns.values():
                column.release(blocks, first)

    def read(self, plan: ReadPlan, known: Mapping[Path, Column] | None = None) -> Steps:
        """Read the steps of ``plan``; ``known`` columns are not read again.

        Raises:
            IndexError: if nothing was ever stored.
        """
        if self.schema is None:
            raise IndexError("nothing is stored yet.")
        known = known or {}
        columns = {
            path: known[path] if path in known else plan.read(path, column)
            for path, column in self.columns.items()
        }
        return Steps(len(plan), columns, self.schema.root_class)

    def parts(self) -> dict[str, Any]:
        """Return the state with the parts of each column; nothing is copied."""
        live = self._rows.ring.layout()
        return {
            "schema": plain_schema(self.schema),
            "lengths": self.table.lengths.clone(),
            "tokens": self.table.tokens,
            "metadata": self.table.metadata,
            "oldest": self.table.oldest,
            "seen_steps": self.table.end,
            "renumbered": self.table.renumbered,
            "pad": self._rows.pad,
            "columns": {path: column.parts(live) for path, column in self.columns.items()},
            "budgets": self.budgets._asdict(),
            "share_next": self.share_next,
            "marks": [astuple(marks) for marks in self._marks if marks is not None],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything stored, as copies; entries that share rows share them there too."""

        def copied(part: Part | Objects) -> Tensor | list[Any]:
            return part.whole() if isinstance(part, Part) else [*map(own, part.items)]

        state = self.parts()
        state["columns"] = {
            path: {name: copied(part) for name, part in parts.items()}
            for path, parts in state["columns"].items()
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> int:
        """Load what :meth:`state_dict` returned into an empty store; arguments as :meth:`load`."""
        columns = {
            path: SavedColumn(parts, self.memory.device)
            for path, parts in state_dict["columns"].items()
        }
        return self.load(state_dict, columns)

    def load(
        self, state: Mapping[str, Any], columns: Mapping[Path, SavedColumn], *, mapped: bool = False
    ) -> int:
        """Load a saved state into an empty store.

        Args:
            state: what :meth:`parts` returned; its columns are ignored.
            columns: the saved columns.
            mapped: whether columns stay in mapped files, which have no room for more rows.

        Returns:
            Number of oldest episodes that are left out because the budgets are smaller.

        Raises:
            ValueError: if not even the newest episode fits.
        """
        schema = schema_from(state["schema"])
        left_out = self._beyond_budgets(state["lengths"], state["tokens"])
        lengths, tokens = state["lengths"][left_out:], state["tokens"][left_out:]
        sizes = lengths + state["pad"]
        if schema is not None:
            total, live = int((state["lengths"] + state["pad"]).sum()), int(sizes.sum())
            self._rows = self._new_rows(schema, lengths, state["pad"])
            capacity = live if mapped else max(live, self._rows.ring.capacity)
            self._rows.ring = Ring(capacity, tail=live, upper_end=live)
            stored = self._columns_for(schema, 0 if mapped else capacity, packed=not mapped)
            for path, column in stored.items():
                column.load(columns[path], range(total - live, total))
            self.schema, self.columns = schema, stored
            self.table.extend(lengths, sizes.cumsum(0) - sizes, tokens)
            if not self.share_next and schema.shared:
                self.schema = schema.unshared()
                self.columns = self._columns_for(self.schema, capacity)
        self._number(state, left_out)
        return left_out

    def _number(self, state: Mapping[str, Any], left_out: int) -> None:
        """Restore the saved ordinals of episodes, their metadata and the numbers of steps."""
        oldest, first = state["oldest"] + left_out, state["seen_steps"] - self.table.num_steps
        self.table.renumber(oldest, first, state["renumbered"])
        self.table.restore_metadata(state["metadata"])
        self._marks += [ClipMarks(*marks) for marks in state["marks"]]

    def _beyond_budgets(self, lengths: Tensor, tokens: Tensor) -> int:
        """Count the oldest saved episodes that exceed the budgets; ``ValueError`` if all do."""
        left_out = max(self.not_kept(lengths, tokens).values())
        if left_out and left_out == len(lengths):
            budget = "max_steps" if int(lengths[-1]) > self.budgets.max_steps else "max_tokens"
            size = int(lengths[-1] if budget == "max_steps" else tokens[-1])
            raise ValueError(
                f"the newest episode that was saved has {size} {budget[4:]}, more than "
                f"{budget}={getattr(self.budgets, budget)}: give EpisodeStorage a larger budget."
            )
        return left_out

    def _admitted(self, schema: Schema, steps: Steps, lengths: Tensor) -> Admission:
        """Convert episodes that fit the schema to the form in which they are stored."""
        with_additions = _with_additions(schema, steps, lengths)
        tokens = count_tokens(schema, with_additions, lengths)
        if schema.growing:
            steps = with_additions
        budget = self.budgets.max_tokens
        if budget is not None and int(tokens.max()) > budget:
            raise ValueError(
                f"an episode of {int(tokens.max())} tokens does not fit in max_tokens={budget}: give "
                f"EpisodeStorage a larger budget."
            )
        return Admission(schema, steps, lengths, tokens)

    def _plan(
        self, admitted: Admission, metadata: Sequence[Mapping[Any, Any]]
    ) -> Callable[[], None]:
        """Do everything that can fail; return a function that stores the episodes."""
        schema, table = admitted.schema, self.table
        steps, lengths, tokens = admitted.steps, admitted.lengths, admitted.tokens
        skipped = max(self.not_kept(lengths, tokens).values()) if len(lengths) > 1 else 0
        if skipped:
            lengths, tokens, metadata = lengths[skipped:], tokens[skipped:], metadata[skipped:]
            steps = steps[steps.length - int(lengths.sum()) :]
        rows = self._rows if self.schema is not None else self._new_rows(schema, lengths)
        columns, recount = self.columns, None
        if schema is not self.schema:
            columns = self._columns_for(schema, rows.ring.capacity)
            recount = self._recount(schema, columns)
        leaving = table.num_episodes
        if not skipped:
            leaving = self._leaving(len(lengths), steps.length, tokens, recount)
        ring = rows.ring.copy()
        rows = _RingRows(ring, rows.pad, rows.slack)
        first, moves, left = self._first_after(leaving) if leaving else None, None, None
        if leaving:
            ring.pop(next_start=first)
            if schema.has_objects:
                left = self._oldest(leaving)
        sizes = [length + rows.pad for length in lengths.tolist()]
        starts = ring.push_all(sizes)
        if starts is None:
            moves = self._grow(rows, sizes)
            columns = _laid_out(columns, moves, ring.capacity)
            left, first = (
                None,
                None if first is None else int(moves.positions(torch.tensor(first, device="cpu"))),
            )
            starts = ring.push_all(sizes)
            assert starts is not None
        change = Change(Blocks(starts, lengths.tolist()), leaving > 0, first, left)
        commits = _plan_columns(change, steps, columns)

        def commit() -> None:
            if recount is not None:
                table.recount(recount)
            table.evict(leaving)
            table.pass_over(skipped, admitted.steps.length - steps.length)
            if moves is not None:
                table.move(moves)
            self.schema, self.columns, self._rows = schema, columns, rows
            for store in commits:
                store()
            table.extend(lengths, starts, tokens, metadata)

        return commit

    def _leaving(self, episodes: int, steps: int, tokens: Tensor, recount: Tensor | None) -> int:
        """Count the stored episodes to evict for new ones of so many steps and tokens."""
        table, (max_steps, max_tokens, max_episodes) = self.table, self.budgets
        leaving = table.episodes_holding(table.num_steps + steps - max_steps)
        if max_episodes is not None:
            leaving = max(leaving, table.num_episodes + episodes - max_episodes)
        if max_tokens is None:
            return leaving
        coming = int(tokens.sum()) - max_tokens
        if recount is None:
            return max(leaving, table.episodes_holding(0, table.num_tokens + coming))
        held = recount.cumsum(0)
        surplus = int(held[-1]) + coming
        return max(leaving, int(torch.searchsorted(held, surplus)) + 1 if surplus > 0 else 0)

    def not_kept(self, lengths: Tensor, tokens: Tensor) -> dict[str, int]:
        """Count, by budget, the oldest of these episodes that do not fit with the later ones."""

        def beyond(sizes: Tensor, budget: int) -> int:
            if sum(sizes.tolist()) <= budget:
                return 0
            return int((sizes.flip(0).cumsum(0) > budget).sum())

        sizes = (lengths, tokens, torch.ones_like(lengths))
        budgets = zip(self.budgets._asdict().items(), sizes, strict=True)
        return {name: beyond(each, most) for (name, most), each in budgets if most is not None}

    def _oldest(self, episodes: int) -> Blocks:
        """Return the rows of the oldest ``episodes``."""
        table = self.table
        return Blocks(table.starts[:episodes].tolist(), table.lengths[:episodes].tolist())

    def _first_after(self, episodes: int) -> int | None:
        """Return the first row of the episode after the oldest ``episodes``; None if there is none."""
        stays = episodes < self.table.num_episodes
        return int(self.table.starts[episodes]) if stays else None

    def _new_rows(self, schema: Schema, lengths: Tensor, pad: int | None = None) -> _RingRows:
        """Create rows for a store whose first episodes have these lengths."""
        if pad is None:
            pad = int(any(entry.shared for entry in schema.entries.values()))
        if not len(lengths):
            lengths = torch.ones(1, device="cpu")
        slack = int(lengths.max()) + pad
        usual = max(float(lengths.float().mean()), _USUAL_LENGTH)
        max_steps = self.budgets.max_steps
        rows = max_steps + pad * math.ceil(max_steps / usual) + slack
        return _RingRows(Ring(rows), pad, slack)

    def _columns_for(
        self, schema: Schema, capacity: int, *, packed: bool = True
    ) -> dict[Path, StoredColumn]:
        """Return columns for ``schema`` with the stored values; columns that fit are reused."""
        records: dict[Path, Record] = {}
        if packed and not self.columns:
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
                column = self._new_column(path, entry, capacity)
            columns[path] = column
        if schema.growing and not isinstance(columns[PROMPT], PromptColumn):
            columns[PROMPT] = self._as_growing(columns, schema.entries[PROMPT], capacity)
        _link(columns)
        return columns

    def _new_column(self, path: Path, entry: Entry, capacity: int) -> StoredColumn:
        """Create an empty column for ``entry``."""
        if entry.shared:
            return NextColumn()
        if entry.kind == "object":
            return ObjectColumn(capacity)
        if entry.kind == "dense":
            return DenseColumn(entry, capacity, self.memory)
        return RaggedColumn(entry, capacity, self.memory)

    def _as_ragged(
        self, dense: DenseColumn | RecordColumn, entry: Entry, capacity: int
    ) -> RaggedColumn:
        """Convert a dense column to a ragged one."""
        ragged = RaggedColumn(entry, capacity, self.memory)
        if self.table.num_episodes:
            stored = self._oldest(self.table.num_episodes)
            ragged.plan(Change(stored), dense.read(RowPlan(stored.rows)))()
        return ragged

    def _as_growing(
        self, columns: Mapping[Path, StoredColumn], entry: Entry, capacity: int
    ) -> PromptColumn:
        """Convert the prompts to a column of what each one adds."""
        growing = PromptColumn(entry, capacity, self.memory)
        if self.table.num_episodes:
            stored = self._oldest(self.table.num_episodes)
            plan = RowPlan(stored.rows)
            paths = {PROMPT, RESPONSE, PARENT} & columns.keys()
            steps = Steps(len(plan), {path: columns[path].read(plan) for path in paths})
            lengths = torch.tensor(stored.lengths, device="cpu")
            growing.plan(Change(stored), Prompts.of(steps, lengths))()
        return growing

    def _recount(self, schema: Schema, columns: dict[Path, StoredColumn]) -> Tensor | None:
        """Count the stored tokens under another schema; None if that changes nothing."""
        before, lengths = self.schema, self.table.lengths
        if before is None or not len(lengths) or before.counted == schema.counted:
            return None
        plan = RowPlan(runs(self.table.starts, lengths))
        paths = schema.counted | ({PARENT} & columns.keys())
        counted = {path: plan.read(path, columns[path]) for path in paths}
        stored = Steps(len(plan), counted, schema.root_class)
        return count_tokens(schema, _with_additions(schema, stored, lengths), lengths)

    def _grow(self, rows: _RingRows, sizes: list[int]) -> Moves:
        """Enlarge the ring so that blocks of these sizes fit.

        The ring gets the rows that ``max_steps`` steps in episodes of the mean length so far need. The
        slack for the longest episode grows by at least half, so that the amortized cost per write
        is constant.
        """
        longest, max_steps = max(sizes), self.budgets.max_steps
        if longest > rows.slack:
            rows.slack = min(max(longest, rows.slack * 3 // 2), max_steps + rows.pad)
        episodes = self.table.next + len(sizes)
        mean = (self.table.end + sum(sizes) - rows.pad * len(sizes)) / episodes
        wanted = max_steps + rows.pad * math.ceil(max_steps / mean) + rows.slack
        moves = rows.ring.layout()
        needed = moves.upper + moves.lower + sum(sizes)
        if rows.ring.capacity >= wanted:
            wanted = rows.ring.capacity + rows.ring.capacity // 16
        return rows.ring.resize(max(wanted, needed))


@dataclass
class _RingRows:
    """The ring and what its size allows for."""

    ring: Ring
    pad: int = 0
    """Rows of an episode beyond its steps: 1 if next entries share rows."""
    slack: int = 0
    """Rows beyond the budget, for an episode of up to so many rows."""


def _plan_columns(
    change: Change, steps: Steps, columns: Mapping[Path, StoredColumn]
) -> list[Callable[[], None]]:
    """Plan the writes of all columns; the entries of a record are written at once."""
    commits: list[Callable[[], None]] = []
    packed: dict[Record, list[Path]] = {}
    for path, column in columns.items():
        if isinstance(column, RecordColumn):
            packed.setdefault(column.record, []).append(path)
        else:
            commits.append(column.plan(change, steps.columns[path]))
    for record, paths in packed.items():
        if len(paths) == len(record.shapes):
            commits.append(record.plan(change.written, steps.columns))
        else:  # An entry became ragged.
            commits += [columns[path].plan(change, steps.columns[path]) for path in paths]
    return commits


def _laid_out(
    columns: Mapping[Path, StoredColumn], moves: Moves, capacity: int
) -> dict[Path, StoredColumn]:
    """Return columns for a ring of ``capacity`` rows, with the rows moved."""
    new = {path: column.laid_out(moves, capacity) for path, column in columns.items()}
    moved: dict[Record, Record] = {}
    for column in new.values():
        if isinstance(column, RecordColumn):
            if column.record not in moved:
                moved[column.record] = column.record.laid_out(moves, capacity)
            column.follow(moved[column.record])
    _link(new)
    return new


def _link(columns: dict[Path, StoredColumn]) -> None:
    """Link columns to the columns that they read from."""
    for path, column in columns.items():
        if isinstance(column, NextColumn):
            source = columns[path[1:]]
            assert isinstance(source, (DenseColumn, RecordColumn))
            column.source = source
        elif isinstance(column, PromptColumn):
            column.responses = columns[RESPONSE]


def _with_additions(schema: Schema, steps: Steps, lengths: Tensor) -> Steps:
    """Replace each prompt by what it adds to an earlier turn."""
    if not schema.has_turns:
        return steps
    grown = cast(Column, Prompts.of(steps, lengths))
    return replace(steps, columns={**steps.columns, PROMPT: grown})
