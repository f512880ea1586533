"""A batch of token rows with their keys and values, which rows join and leave between forward passes.

The promise: the model is given exactly what ``generate()`` gives it for rows padded on the left, so that
windows, biases and sinks remain the model's own affair. All rows end at one column of the memory; a step
writes the next column and reads a view, and only a row that joins or leaves is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

__all__ = ["CacheLayout", "PaddedCache"]

_SLACK = 64
"""Columns that are kept free at least, for the tokens to come."""


@dataclass(frozen=True)
class CacheLayout:
    """What a model keeps of a token.

    Args:
        shapes: of each layer's keys and values, ``(heads, size)`` each; ``None`` of a layer without.
        dtype: of all of them.
        device: of all of them.
    """

    shapes: tuple[tuple[tuple[int, int], tuple[int, int]] | None, ...]
    dtype: torch.dtype
    device: torch.device


class PaddedCache(Cache):
    """A transformers cache of rows that all end at the same column.

    Args:
        layout: of the model's keys and values.
    """

    def __init__(self, layout: CacheLayout) -> None:
        layers = [_Layer(self) for _ in layout.shapes]
        super().__init__(layers=list(layers))
        self.layout = layout
        self._keeping = [
            (layer, shapes)
            for layer, shapes in zip(layers, layout.shapes, strict=True)
            if shapes is not None
        ]
        self.starts: list[int] = []
        """The column of each row's first token."""
        self.end = 0
        """The column behind each row's last token."""
        self._allocate(0, 0)
        self._note_starts()
        # Of the forward pass under way: its rows, where they begin, where what is new begins and ends.
        self._rows = range(0)
        self._begin = self._first = self._last = 0
        self._real: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.starts)

    @property
    def width(self) -> int:
        """Columns of the longest row."""
        return self.end - self._longest

    def join(self, lengths: Sequence[int], pasts: Sequence[Sequence[torch.Tensor]]) -> range:
        """Take rows in, of which all or some tokens are yet to be computed, by :meth:`fill`.

        Args:
            lengths: tokens of each row.
            pasts: what is known of each row's first tokens: pieces ``[n, F]`` that follow each other, as
                :meth:`pieces` gives them out.

        Returns:
            Where they are.
        """
        rows = self._add([self.width, *lengths], len(lengths))
        self.starts += [self.end - length for length in lengths]
        self._note_starts()
        memories = self._memories()
        for memory in memories:
            # A mask does not hide what is not a number: nothing of earlier rows may remain.
            memory[rows.start : rows.stop, :, : self.end] = 0
        sizes = [memory.shape[1] * memory.shape[3] for memory in memories]
        for row, past in zip(rows, pasts, strict=True):
            if past:
                known = torch.cat(list(past))
                columns = slice(self.starts[row], self.starts[row] + len(known))
                for memory, part in zip(memories, known.split(sizes, -1), strict=True):
                    heads = part.unflatten(-1, (memory.shape[1], -1)).transpose(0, 1)
                    memory[row, :, columns] = heads
        return rows

    def fill(
        self, rows: range, tokens: torch.Tensor, num_new: Sequence[int], left: int
    ) -> dict[str, Any]:
        """Prepare for computing columns of rows that joined, from the first new one to the last.

        Args:
            rows: that joined together.
            tokens: ``[B, Q]`` int64, of any value where a row's new tokens have not begun.
            num_new: how many tokens of each row are new.
            left: how many columns will be left to compute.

        Returns:
            What the model is to be called with.
        """
        self._last = self.end - left
        self._first = self._last - tokens.shape[1]
        self._real = None
        if min(num_new) < left + tokens.shape[1]:
            firsts = self.end - torch.tensor(num_new, device=self.layout.device)[:, None]
            new = torch.arange(self._first, self._last, device=self.layout.device)
            self._real = (new >= firsts)[:, None, :, None]
        return self._inputs(rows, tokens)

    def extend(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Prepare for computing the next column, of all rows.

        Args:
            tokens: ``[B, 1]`` int64.

        Returns:
            What the model is to be called with.
        """
        self._make_room(self.num_rows, self.width, 1)
        self.end += 1
        self._last, self._first, self._real = self.end, self.end - 1, None
        return self._inputs(range(self.num_rows), tokens)

    def absorb(self, other: PaddedCache, rows: Sequence[int]) -> range:
        """Copy rows, of another batch or of this one, behind all others; returns where they are."""
        lengths = [other.end - other.starts[row] for row in rows]
        joined = self._add([self.width, *lengths], len(rows))
        width = max(lengths)
        for mine, theirs in zip(self._memories(), other._memories(), strict=True):
            place = mine[joined.start : joined.stop]
            place[:, :, : self.end - width] = 0
            place[:, :, self.end - width : self.end] = theirs[
                rows, :, other.end - width : other.end
            ]
        self.starts += [self.end - length for length in lengths]
        self._note_starts()
        return joined

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Take rows out; the last ones move to their places.

        Returns:
            Of each row that is left, where it was before.
        """
        gone, left = set(rows), self.num_rows - len(rows)
        holes = [row for row in rows if row < left]
        movers = [row for row in range(left, self.num_rows) if row not in gone]
        if holes:
            for memory in self._memories():
                memory[holes, :, : self.end] = memory[movers, :, : self.end]
        order = list(range(left))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.starts = [self.starts[row] for row in order]
        self._note_starts()
        return order

    def pieces(
        self, rows: Sequence[int], begins: Sequence[int], ends: Sequence[int]
    ) -> list[torch.Tensor]:
        """Copies of what is kept of some tokens.

        Args:
            rows: of the batch.
            begins: each row's first token that is wanted, counted from the row's first.
            ends: the token behind the last that is wanted.

        Returns:
            ``[n, F]`` for each row: of every token the keys and values of all layers.
        """
        memories = self._memories()
        pieces = []
        for row, begin, end in zip(rows, begins, ends, strict=True):
            columns = slice(self.starts[row] + begin, self.starts[row] + end)
            parts = [memory[row, :, columns].transpose(0, 1).flatten(1) for memory in memories]
            pieces.append(torch.cat(parts, -1))
        return pieces

    def write(self, memory: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write the new columns ``[B, H, Q, D]`` where they are real; returns all of every row."""
        rows = memory[self._rows.start : self._rows.stop]
        place = rows[:, :, self._first : self._last]
        place.copy_(new if self._real is None else torch.where(self._real, new, place))
        return rows[:, :, self._begin : self._last]

    def seen(self) -> tuple[int, int]:
        """Columns that the forward pass reads: those before the new ones, and all."""
        return self._first - self._begin, self._last - self._begin

    def _inputs(self, rows: range, tokens: torch.Tensor) -> dict[str, Any]:
        """What a forward pass is called with."""
        self._rows = rows
        whole = len(rows) == self.num_rows
        self._begin = self._longest if whole else min(self.starts[rows.start : rows.stop])
        starts = self._starts[rows.start : rows.stop]
        columns = torch.arange(self._begin, self._last, device=self.layout.device)
        position = columns[self._first - self._begin :] - starts
        return {
            "input_ids": tokens,
            "attention_mask": columns >= starts,
            "position_ids": position if self._real is None else position.clamp_(min=0),
            "past_key_values": self,
            "use_cache": True,
        }

    def _memories(self) -> list[torch.Tensor]:
        """Keys and values in turn, ``[rows, heads, columns, size]``."""
        return [memory for layer, _ in self._keeping for memory in (layer.keys, layer.values)]

    def _add(self, lengths: Sequence[int], count: int) -> range:
        """Have room for more rows, none of more tokens than the longest."""
        first = self.num_rows
        self._make_room(first + count, max(lengths), 0)
        return range(first, first + count)

    def _make_room(self, rows: int, width: int, more: int) -> None:
        """Lay the memory out anew if it has not so many rows and columns, or they lie too far left."""
        if rows <= self.room[0] and width <= self.end and self.end + more <= self.room[1]:
            return
        old = [memory[: self.num_rows, :, self._longest : self.end] for memory in self._memories()]
        # Some rows more than are needed, so that not every row that joins has all others copied.
        enough = rows <= self.room[0]
        self._allocate(
            min(self.room[0], 2 * rows) if enough else rows + self.num_rows // 2, width + more
        )
        for before, memory in zip(old, self._memories(), strict=True):
            memory[: self.num_rows, :, width - self.width : width] = before
        self.starts = [start + width - self.end for start in self.starts]
        self.end = width
        self._note_starts()

    def _allocate(self, rows: int, width: int) -> None:
        """Make an empty memory with room for some more columns."""
        self.room = rows, width + max(_SLACK, width // 4)
        """Rows and columns of the memory."""
        for layer, shapes in self._keeping:
            layer.keys, layer.values = (
                torch.zeros(
                    (rows, heads, self.room[1], size),
                    dtype=self.layout.dtype,
                    device=self.layout.device,
                )
                for heads, size in shapes
            )

    def _note_starts(self) -> None:
        """Derive what follows from the starts."""
        self._longest = min(self.starts, default=self.end)
        self._starts = torch.tensor(self.starts, device=self.layout.device)[:, None]


class _Layer(CacheLayerMixin):
    """One layer's keys and values of all rows."""

    is_compileable = False
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: PaddedCache) -> None:
        super().__init__()
        # No cycle: the memory must be free as soon as the cache is.
        self.cache: PaddedCache = weakref.proxy(cache)
        self.is_initialized = True

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """The batch makes the memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values ``[B, H, Q, D]``, and read all of every row, ``[B, H, K, D]``."""
        return self.cache.write(self.keys, key_states), self.cache.write(self.values, value_states)

    def get_seq_length(self, *args: Any) -> int:
        """How many columns come before the new ones."""
        return self.cache.seen()[0]

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """How many columns there are, and where they begin."""
        return self.cache.seen()[1], 0

    def get_max_length(self) -> int:
        """No bound that the model should know of."""
        return -1

    get_max_cache_shape = get_max_length
