"""A ring of rows in which every block lies in one piece and the oldest blocks leave first.

Theorem: while the live blocks together hold at most ``M`` rows and each has 1 to ``L`` of them,
a ring of ``M + L`` rows always has a place for the next block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["Blocks", "Moves", "Ring", "runs", "within"]

_Rows = TypeVar("_Rows", Tensor, np.ndarray)


def runs(starts: Tensor, lengths: Tensor) -> Tensor:
    """List the rows of blocks, one block after the other.

    Args:
        starts: int64 ``[n]``, first row of each block.
        lengths: int64 ``[n]``, rows per block.

    Returns:
        int64 ``[sum(lengths)]``.

    Examples:
        >>> runs(torch.tensor([4, 0]), torch.tensor([2, 3]))
        tensor([4, 5, 0, 1, 2])
    """
    ends = lengths.cumsum(0)
    first = torch.repeat_interleave(starts - ends + lengths, lengths)
    return first + torch.arange(first.shape[0], device="cpu")


def within(lengths: np.ndarray) -> np.ndarray:
    """Return each row's offset in its block, one block after the other.

    Examples:
        >>> within(np.array([2, 3]))
        array([0, 1, 0, 1, 2])
    """
    places: np.ndarray = np.arange(lengths.sum()) - (lengths.cumsum() - lengths).repeat(lengths)
    return places


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows, in the order of their data."""

    starts: list[int]
    """First row of each block."""
    lengths: list[int]
    """Rows with data of each block."""

    @cached_property
    def rows(self) -> Tensor:
        """int64 ``[sum(lengths)]``: every row."""
        starts, lengths = (
            torch.tensor(values, dtype=torch.int64, device="cpu")
            for values in (self.starts, self.lengths)
        )
        return runs(starts, lengths)

    @cached_property
    def pieces(self) -> list[tuple[int, int, int]]:
        """Runs of consecutive rows, as few as possible: (row, first, last + 1) with data positions."""
        pieces: list[tuple[int, int, int]] = []
        done = 0
        for start, length in zip(self.starts, self.lengths, strict=True):
            if pieces and pieces[-1][0] + pieces[-1][2] - pieces[-1][1] == start:
                pieces[-1] = (pieces[-1][0], pieces[-1][1], done + length)
            else:
                pieces.append((start, done, done + length))
            done += length
        return pieces


@dataclass(frozen=True)
class Moves:
    """Where the live rows of a ring move when it is laid out anew.

    The live rows are one piece ``[start, start + upper)``, or that piece followed by the rows
    ``[0, lower)`` if the ring had wrapped. They now fill ``[0, upper + lower)`` in order of age.
    """

    start: int
    upper: int
    lower: int

    def pieces(self, old: _Rows) -> list[_Rows]:
        """Return views of the live rows of ``old``, oldest first."""
        return [old[self.start : self.start + self.upper], old[: self.lower]]

    def rows(self, old: _Rows, new: _Rows) -> None:
        """Copy the live rows of ``old`` to their new places in ``new``."""
        upper, lower = self.pieces(old)
        new[: self.upper] = upper
        new[self.upper : self.upper + self.lower] = lower

    def laid_out(self, old: Tensor, capacity: int) -> Tensor:
        """Copy the live rows of ``old`` to their new places in new memory of ``capacity`` rows."""
        new = torch.empty((capacity, *old.shape[1:]), dtype=old.dtype, device=old.device)
        self.rows(old, new)
        return new

    def positions(self, old: Tensor) -> Tensor:
        """Return the new places of the live rows ``old``."""
        return torch.where(old >= self.start, old - self.start, old + self.upper)


@dataclass
class Ring:
    """Places blocks of rows first in, first out, each in one piece.

    Every block has at least one row. A block that does not fit before the end of the ring starts at
    row 0, once the rows there are free. ``M + L`` rows suffice, where ``M`` bounds the live rows with
    the new block, ``L`` bounds every block and ``b <= L`` is the new block. At most ``M - b`` rows are
    live before it:

    - Not wrapped: the free rows lie after the newest block and before the oldest. If neither gap
      held ``b`` rows, fewer than ``2 b`` rows would be free, yet at least
      ``M + L - (M - b) = L + b >= 2 b`` are.
    - Wrapped: the gap at the end was too short for the block that went to row 0, so it holds
      fewer than ``L`` rows, and the gap before the oldest block more than
      ``M + L - (M - b) - L = b``.

    Args:
        capacity: number of rows.

    Examples:
        >>> ring = Ring(5)
        >>> ring.push(2), ring.push(2), ring.push(2)
        (0, 2, None)
        >>> ring.pop(next_start=2)
        >>> ring.push(2)
        0
    """

    capacity: int
    head: int = 0
    """First row of the oldest block."""
    tail: int = 0
    """One past the newest block."""
    upper_end: int = 0
    """One past the newest block that lies at or after ``head``."""
    wrapped: bool = False
    """Whether the newest block lies before the oldest."""

    def copy(self) -> Ring:
        """Copy the ring."""
        new = object.__new__(Ring)
        new.__dict__.update(self.__dict__)
        return new

    def push(self, size: int) -> int | None:
        """Place a block of ``size`` rows; return its first row, or None if no gap is long enough."""
        limit = self.head if self.wrapped else self.capacity
        if self.tail + size <= limit:
            start = self.tail
        elif not self.wrapped and size <= self.head:
            start, self.wrapped = 0, True
        else:
            return None
        self.tail = start + size
        if not self.wrapped:
            self.upper_end = self.tail
        return start

    def push_all(self, sizes: Sequence[int]) -> list[int] | None:
        """Place all blocks or none; return their first rows, or None if one does not fit."""
        if len(sizes) == 1:
            start = self.push(sizes[0])
            return None if start is None else [start]
        before = replace(self)
        starts: list[int] = []
        for size in sizes:
            place = self.push(size)
            if place is None:
                self.__dict__.update(before.__dict__)
                return None
            starts.append(place)
        return starts

    def pop(self, *, next_start: int | None) -> None:
        """Free the oldest blocks.

        Args:
            next_start: first row of the block that is now the oldest; None if none is left.
        """
        if next_start is None:
            self.clear()
            return
        if next_start < self.head:
            self.wrapped = False
            self.upper_end = self.tail
        self.head = next_start

    def clear(self) -> None:
        """Free every block."""
        self.head = self.tail = self.upper_end = 0
        self.wrapped = False

    def layout(self) -> Moves:
        """Return the moves that would lay the live rows out from row 0."""
        return Moves(self.head, self.upper_end - self.head, self.tail if self.wrapped else 0)

    def resize(self, capacity: int) -> Moves:
        """Change the number of rows; the live rows are laid out from row 0.

        Args:
            capacity: the new number of rows, at least the live ones.

        Returns:
            The moves to apply to the data of the rows.
        """
        moves = self.layout()
        live = moves.upper + moves.lower
        self.capacity, self.head, self.wrapped = capacity, 0, False
        self.tail = self.upper_end = live
        return moves
