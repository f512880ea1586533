"""Exceptions to shared rows: episodes whose ``("next", k)`` differs from ``k`` one step later.

Such an episode has its own rows for the entry, which are evicted with it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.files.column_files import Part, SavedColumn
from torchrl_mt.data._store.ring import Moves, Ring, runs
from torchrl_mt.data._store.schema import bits
from torchrl_mt.data._store.steps import Objects, Rows, rows_at

if TYPE_CHECKING:
    from torchrl_mt.data._store.columns.columns import Change

__all__ = ["DisagreeingEpisodes", "are_too_many"]

_FEW = 8
"""Disagreeing episodes that are never too many."""
_NONE = np.zeros(0, dtype=np.int64)


def are_too_many(disagreeing: int, episodes: int) -> bool:
    """Whether so many of ``episodes`` disagree that sharing rows is no longer worth it."""
    return disagreeing > max(_FEW, episodes // 4)


class DisagreeingEpisodes:
    """The disagreeing episodes of one entry, oldest first.

    Args:
        memory: allocates their rows.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._starts = _NONE
        """First ring row of each episode."""
        self._lengths = _NONE
        self._places = _NONE
        """First row of each episode in ``_values``."""
        self._order = _NONE
        """Positions of the episodes, sorted by ring row."""
        self._values: Tensor | None = None
        self._ring = Ring(0)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return 0 if self._values is None else self._values.nbytes

    def plan(self, change: Change, odd: Tensor | None, column: Any) -> Callable[[], None]:
        """Plan to drop the evicted episodes and store new ones.

        Args:
            change: the write.
            odd: bool ``[E]``, which of the written episodes disagree; None for none.
            column: the values of all written episodes.
        """
        new, commit_values = copy(self), None
        if change.left is not None:
            new._drop(set(change.left.starts))
        if odd is not None and bool(odd.any()):
            commit_values = new._plan_values(change, odd.nonzero().squeeze(1), column)

        def commit() -> None:
            self.__dict__.update(new.__dict__)
            if commit_values is not None:
                commit_values()

        return commit

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Overwrite shared values of these episodes with their own, in place.

        Args:
            rows: int64 ``[N]`` on the CPU, ring rows.
            values: ``[N, ...]``, the values read at these rows.
        """
        if not len(self):
            return
        numbers = rows.numpy()
        starts = self._starts[self._order]
        at = self._order[np.maximum(starts.searchsorted(numbers, "right") - 1, 0)]
        offsets = numbers - self._starts[at]
        found = np.flatnonzero((offsets >= 0) & (offsets < self._lengths[at]))
        if len(found):
            assert self._values is not None
            own = torch.from_numpy((self._places[at] + offsets)[found]).to(values.device)
            places = torch.from_numpy(found).to(values.device)
            bits(values)[places] = bits(self._values)[own]

    def release(self, starts: set[int]) -> None:
        """Drop the oldest episodes, which begin at these rows."""
        self._drop(starts)

    def moved(self, moves: Moves) -> DisagreeingEpisodes:
        """Return the episodes with their rows moved, without those whose rows are not live."""
        new = copy(self)
        upper = (self._starts >= moves.start) & (self._starts < moves.start + moves.upper)
        new._keep(int((~upper & (self._starts >= moves.lower)).sum()))
        new._starts = moves.positions(torch.from_numpy(new._starts)).numpy()
        new._order = new._starts.argsort()
        return new

    def parts(self, live: Moves) -> dict[str, Part | Objects]:
        """Return their rows, first ring rows and lengths; {} without episodes."""
        if not len(self):
            return {}
        assert self._values is not None
        starts, lengths = torch.from_numpy(self._starts), torch.from_numpy(self._lengths)
        return {
            "own": Part(self._ring.layout().pieces(self._values)),
            "starts": Part([starts], live.positions),
            "lengths": Part([lengths]),
        }

    def load(self, saved: SavedColumn, rows: range) -> None:
        """Load the disagreeing episodes among these rows."""
        if "own" not in saved:
            return
        count = range(saved.rows("starts"))
        here = Memory(torch.device("cpu"))
        starts = saved.new("starts", count, here).numpy() - rows.start
        lengths = saved.new("lengths", count, here).numpy()
        first = int((starts < 0).sum())
        begin = int(lengths[:first].sum())
        self._values = saved.new("own", range(begin, saved.rows("own")), self._memory)
        self._starts, self._lengths = starts[first:], lengths[first:].copy()
        self._places = self._lengths.cumsum() - self._lengths
        self._order = self._starts.argsort()
        size = len(self._values)
        self._ring = Ring(size, tail=size, upper_end=size)

    def _plan_values(self, change: Change, odd: Tensor, column: Any) -> Callable[[], None]:
        """Make room for the episodes ``odd``; return a function that stores their values."""
        written = change.written
        lengths = torch.tensor(written.lengths, device="cpu")
        begins = (lengths.cumsum(0) - lengths)[odd]
        steps, lengths = runs(begins, lengths[odd]), lengths[odd]
        if isinstance(column, Rows):
            values = torch.stack([column.items[i] for i in steps.tolist()])
        else:
            values = rows_at(column, steps)
        ring, held, sizes = replace(self._ring), self._values, lengths.tolist()
        places = ring.push_all(sizes)
        if places is None or held is None:
            live = ring.layout()
            needed = live.upper + live.lower + sum(sizes)
            larger = self._memory.empty(
                (max(needed, ring.capacity * 9 // 8), *values.shape[1:]), values.dtype
            )
            moves = ring.resize(len(larger))
            if held is not None:
                moves.rows(held, larger)
            self._places = moves.positions(torch.from_numpy(self._places)).numpy()
            places, held = ring.push_all(sizes), larger
            assert places is not None
        self._ring, self._values = ring, held
        starts = [written.starts[i] for i in odd.tolist()]
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, sizes])
        self._places = np.concatenate([self._places, places])
        self._order = self._starts.argsort()
        own = runs(torch.tensor(places, device="cpu"), lengths).to(held.device)
        values = values.to(held.device, held.dtype)

        def commit() -> None:
            bits(held)[own] = bits(values)

        return commit

    def _drop(self, starts: set[int]) -> None:
        """Drop the oldest episodes, which begin at these rows."""
        left = 0
        while left < len(self) and int(self._starts[left]) in starts:
            left += 1
        if left:
            self._keep(left)

    def _keep(self, first: int) -> None:
        """Keep the episodes from position ``first`` on."""
        self._starts, self._lengths = self._starts[first:], self._lengths[first:]
        self._places, self._ring = self._places[first:], replace(self._ring)
        self._ring.pop(next_start=int(self._places[0]) if len(self._places) else None)
        self._order = self._starts.argsort()
