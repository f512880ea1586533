"""Which steps of a batch belong together, by the ids that came with them.

Steps of one id are grouped in their order in time; nothing is lost and nothing doubled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["Segments", "group_steps", "segments"]


@dataclass
class Segments:
    """Runs of steps of one id each, which fill the grouped batch one after the other."""

    ids: np.ndarray
    """int64 ``[S]``: the id of each."""
    starts: np.ndarray
    """int64 ``[S]``"""
    stops: np.ndarray
    """int64 ``[S]``"""

    @cached_property
    def keys(self) -> list[int]:
        """The id of each."""
        return self.ids.tolist()

    @cached_property
    def differ(self) -> bool:
        """Whether no two have one id."""
        return len(set(self.keys)) == len(self.keys)

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 ``[S]``: steps of each."""
        return self.stops - self.starts


def group_steps(ids: np.ndarray, rows: np.ndarray | None) -> np.ndarray | None:
    """The order in which steps of one id follow each other, in time.

    Args:
        ids: int64 ``[N]``, the id of each step, row after row.
        rows: int64 ``[N]``, the row of each step; None if there is one row, or each has an id of its
            own.

    Returns:
        int64 ``[N]``; None if they do already.

    Raises:
        ValueError: if one id is in two rows.

    Examples:
        >>> group_steps(np.array([7, 4, 7, 4]), None)
        array([1, 3, 0, 2])
    """
    other = ids[1:] != ids[:-1]
    if other.all():
        first = ids.tolist()
    else:
        first = ids[np.concatenate(([0], np.flatnonzero(other) + 1))].tolist()
    alone = len(set(first)) == len(first)
    if rows is not None and not (alone and _runs(rows, other) == len(first)):
        by_id = np.lexsort((rows, ids))
        ids, rows = ids[by_id], rows[by_id]
        twice = ids[1:][(ids[1:] == ids[:-1]) & (rows[1:] != rows[:-1])]
        if len(twice):
            raise ValueError(
                f"each row of a [B, T] batch is one environment and needs ids of its own: id "
                f"{int(twice[0])} is in more than one row"
            )
        return by_id
    return None if alone else np.argsort(ids, kind="stable")


def segments(ids: np.ndarray, linked: np.ndarray) -> Segments:
    """Cut grouped steps where they do not go on.

    Args:
        ids: int64 ``[N]``, the id of each grouped step.
        linked: bool ``[N - 1]``: whether each step goes on with the following one.
    """
    if linked.all():
        return Segments(ids[:1], np.zeros(1, dtype=np.int64), np.array([len(ids)]))
    bounds = np.flatnonzero(~linked) + 1
    starts = np.concatenate(([0], bounds))
    return Segments(ids[starts], starts, np.concatenate((bounds, [len(ids)])))


def _runs(rows: np.ndarray, other: np.ndarray) -> int:
    """How many runs of steps of one row and one id there are; ``other`` is where the id changes."""
    return min(len(rows), 1) + int(np.count_nonzero(other | (rows[1:] != rows[:-1])))
