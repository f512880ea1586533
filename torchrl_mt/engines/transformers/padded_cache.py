"""A left-padded batch with its keys and values; rows join and leave between forward passes.

The promise: the model gets exactly the inputs that ``generate()`` passes for left-padded rows, so
windows, biases and sinks work as the model defines them. All rows end at the same column. A step writes
the next column and reads a view; only rows that join or leave are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from torchrl_mt.devices import upload

__all__ = ["CacheLayout", "PaddedCache"]

_SLACK = 64
"""Minimum number of spare columns, for later tokens."""


@dataclass(frozen=True)
class CacheLayout:
    """Shapes of a model's keys and values.

    Args:
        shapes: ``(heads, size)`` of the keys and of the values of each layer; ``None`` for a layer
            without.
        dtype: dtype of all keys and values.
        device: device of all keys and values.
    """

    shapes: tuple[tuple[tuple[int, int], tuple[int, int]] | None, ...]
    dtype: torch.dtype
    device: torch.device


class PaddedCache(Cache):
    """A transformers cache whose rows all end at the same column.

    Args:
        layout: shapes of the model's keys and values.
        argument: name of the model's argument for a cache.
    """

    def __init__(self, layout: CacheLayout, argument: str = "past_key_values") -> None:
        layers = [_Layer(self) for _ in layout.shapes]
        super().__init__(layers=list(layers))
        self.layout = layout
        self._argument = argument
        self._keeping = [
            (layer, shapes)
            for layer, shapes in zip(layers, layout.shapes, strict=True)
            if shapes is not None
        ]
        self.starts: list[int] = []
        """Column of each row's first token."""
        self.shifts: list[int] = []
        """What each row's next token has as its position beyond its place in the row."""
        self.end = 0
        """Column after each row's last token."""
        self._allocate(0, 0)
        self._update_starts()
        # The current forward pass: its rows, their first column, the first and last new column.
        self._rows = range(0)
        self._begin = self._first = self._last = 0
        self._real: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.starts)

    @property
    def width(self) -> int:
        """Length of the longest row, in columns."""
        return self.end - self._longest

    def join(
        self,
        lengths: Sequence[int],
        pasts: Sequence[Sequence[torch.Tensor]],
        shifts: Sequence[int] | None = None,
    ) -> range:
        """Add rows, whose remaining tokens :meth:`fill` computes.

        Args:
            lengths: length of each row, in tokens.
            pasts: keys and values of each row's first tokens, as consecutive pieces ``[n, F]`` from
                :meth:`pieces`.
            shifts: for each row, what to add to the places of later tokens for their positions; 0 if
                None.

        Returns:
            The indices of the new rows.
        """
        rows = self._add([self.width, *lengths], len(lengths))
        self.starts += [self.end - length for length in lengths]
        self.shifts += shifts or [0] * len(lengths)
        self._update_starts()
        memories = self._memories()
        for memory in memories:
            # A mask does not hide NaNs, so data of earlier rows must go.
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
        self,
        rows: range,
        tokens: torch.Tensor,
        num_new: Sequence[int],
        left: int,
        positions: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Prepare a forward pass over the next columns of rows that joined.

        Args:
            rows: rows that joined together.
            tokens: ``[B, Q]`` int64; values before a row's first new token are ignored.
            num_new: number of new tokens of each row.
            left: number of columns left to compute after this pass.
            positions: ``[3, B, Q]``, if they are not those of text.

        Returns:
            The model's keyword arguments.
        """
        self._last = self.end - left
        self._first = self._last - tokens.shape[1]
        self._real = None
        if min(num_new) < left + tokens.shape[1]:
            firsts = self.end - upload(num_new, self.layout.device)[:, None]
            new = torch.arange(self._first, self._last, device=self.layout.device)
            self._real = (new >= firsts)[:, None, :, None]
        return self._inputs(rows, tokens, positions)

    def extend(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Prepare a forward pass over the next column of all rows.

        Args:
            tokens: ``[B, 1]`` int64.

        Returns:
            The model's keyword arguments.
        """
        self._make_room(self.num_rows, self.width, 1)
        self.end += 1
        self._last, self._first, self._real = self.end, self.end - 1, None
        positions = None if self._offsets is None else self._first + self._offsets
        return self._inputs(range(self.num_rows), tokens, positions)

    def absorb(self, other: PaddedCache, rows: Sequence[int]) -> range:
        """Append copies of rows of another cache or of this one; returns the new rows' indices."""
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
        self.shifts += [other.shifts[row] for row in rows]
        self._update_starts()
        return joined

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Remove rows; the last rows move into their places.

        Returns:
            The former index of each remaining row.
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
        self.shifts = [self.shifts[row] for row in order]
        self._update_starts()
        return order

    def pieces(
        self, rows: Sequence[int], begins: Sequence[int], ends: Sequence[int]
    ) -> list[torch.Tensor]:
        """Copy the keys and values of some tokens.

        Args:
            rows: indices of rows.
            begins: first token of each row to copy, counted from the row's first token.
            ends: token after the last to copy.

        Returns:
            ``[n, F]`` per row: the keys and values of all layers, for every token.
        """
        memories = self._memories()
        pieces = []
        for row, begin, end in zip(rows, begins, ends, strict=True):
            columns = slice(self.starts[row] + begin, self.starts[row] + end)
            parts = [memory[row, :, columns].transpose(0, 1).flatten(1) for memory in memories]
            pieces.append(torch.cat(parts, -1))
        return pieces

    def write(self, memory: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write new columns ``[B, H, Q, D]``, except padding; returns all columns of the pass's rows."""
        rows = memory[self._rows.start : self._rows.stop]
        place = rows[:, :, self._first : self._last]
        place.copy_(new if self._real is None else torch.where(self._real, new, place))
        return rows[:, :, self._begin : self._last]

    def seen(self) -> tuple[int, int]:
        """Number of columns that the forward pass reads: before the new ones, and in all."""
        return self._first - self._begin, self._last - self._begin

    def _inputs(
        self, rows: range, tokens: torch.Tensor, positions: torch.Tensor | None
    ) -> dict[str, Any]:
        """The model's keyword arguments for a forward pass."""
        self._rows = rows
        whole = len(rows) == self.num_rows
        self._begin = self._longest if whole else min(self.starts[rows.start : rows.stop])
        starts = self._starts[rows.start : rows.stop]
        columns = torch.arange(self._begin, self._last, device=self.layout.device)
        if positions is None:
            positions = columns[self._first - self._begin :] - starts
            if self._real is not None:
                positions.clamp_(min=0)
        return {
            "input_ids": tokens,
            "attention_mask": columns >= starts,
            "position_ids": positions,
            self._argument: self,
            "use_cache": True,
        }

    def _memories(self) -> list[torch.Tensor]:
        """Keys and values in turn, ``[rows, heads, columns, size]``."""
        return [memory for layer, _ in self._keeping for memory in (layer.keys, layer.values)]

    def _add(self, lengths: Sequence[int], count: int) -> range:
        """Make room for more rows of up to ``max(lengths)`` columns; returns their indices."""
        first = self.num_rows
        self._make_room(first + count, max(lengths), 0)
        return range(first, first + count)

    def _make_room(self, rows: int, width: int, more: int) -> None:
        """Reallocate the memory if it lacks rows or columns, or rows end too far left for the width."""
        if rows <= self.room[0] and width <= self.end and self.end + more <= self.room[1]:
            return
        old = [memory[: self.num_rows, :, self._longest : self.end] for memory in self._memories()]
        # Spare rows, so that not every new row causes a copy of all others.
        enough = rows <= self.room[0]
        self._allocate(
            min(self.room[0], 2 * rows) if enough else rows + self.num_rows // 2, width + more
        )
        for before, memory in zip(old, self._memories(), strict=True):
            memory[: self.num_rows, :, width - self.width : width] = before
        self.starts = [start + width - self.end for start in self.starts]
        self.end = width
        self._update_starts()

    def _allocate(self, rows: int, width: int) -> None:
        """Allocate zeroed memory with spare columns."""
        self.room = rows, width + max(_SLACK, width // 4)
        """Number of rows and columns of the memory."""
        for layer, shapes in self._keeping:
            layer.keys, layer.values = (
                torch.zeros(
                    (rows, heads, self.room[1], size),
                    dtype=self.layout.dtype,
                    device=self.layout.device,
                )
                for heads, size in shapes
            )

    def _update_starts(self) -> None:
        """Update what is derived from ``starts``."""
        self._longest = min(self.starts, default=self.end)
        self._starts = upload(self.starts, self.layout.device)[:, None]
        self._offsets: torch.Tensor | None = None
        if any(self.shifts):
            shifts = upload(self.shifts, self.layout.device)[:, None]
            self._offsets = shifts - self._starts


class _Layer(CacheLayerMixin):
    """One layer's keys and values, for all rows."""

    is_compileable = False
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: PaddedCache) -> None:
        super().__init__()
        # A reference cycle would delay freeing the memory.
        self.cache: PaddedCache = weakref.proxy(cache)
        self.is_initialized = True

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """Do nothing: the cache allocates the memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values ``[B, H, Q, D]``; returns those of all columns ``[B, H, K, D]``."""
        return self.cache.write(self.keys, key_states), self.cache.write(self.values, value_states)

    def get_seq_length(self, *args: Any) -> int:
        """Number of columns before the new ones."""
        return self.cache.seen()[0]

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """Number of columns, and the offset of the first."""
        return self.cache.seen()[1], 0

    def get_max_length(self) -> int:
        """No maximum length."""
        return -1

    get_max_cache_shape = get_max_length
