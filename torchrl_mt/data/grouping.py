"""Which steps of a batch belong to which episode.

Steps of one id are grouped in their order in time; an id that comes back after its episode ended
starts another episode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Segment", "group_steps"]


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of one episode in the grouped batch."""

    key: int
    """Id of the episode."""
    start: int
    stop: int
    ended: bool
    """Whether the episode ends with the last of them."""


def group_steps(
    ids: Tensor, ended: Tensor, valid: Tensor | None = None
) -> tuple[Tensor | None, list[Segment]]:
    """Group the steps of a batch by episode.

    Args:
        ids: int64 ``[B, T]``: the episode of each step; time runs along ``T``.
        ended: bool ``[B, T]``: the steps that end their episode.
        valid: bool ``[B, T]``: the steps that are no padding; None if there is none.

    Returns:
        the order in which to take the valid steps of the flattened batch (int64 ``[N]``, None for
        all as they are), and the segments of the batch so ordered, listed in the order in which their
        last steps lie in the flattened batch.

    Raises:
        ValueError: if one id is in two rows.

    Examples:
        >>> order, segments = group_steps(
        ...     torch.tensor([[7, 4, 7, 4]]), torch.tensor([[False, False, True, False]])
        ... )
        >>> order
        tensor([1, 3, 0, 2])
        >>> [(s.key, s.start, s.stop, s.ended) for s in segments]
        [(7, 2, 4, True), (4, 0, 2, False)]
    """
    order = rows = None
    id_of, ends = ids.reshape(-1).numpy(), ended.reshape(-1).numpy()
    if len(ids) > 1:
        rows = np.repeat(np.arange(len(ids)), ids.shape[1])
    if valid is not None:
        order = valid.reshape(-1).numpy().nonzero()[0]
        id_of, ends = id_of[order], ends[order]
        rows = None if rows is None else rows[order]
    if rows is not None:
        _check_rows(id_of, rows)
    if not len(id_of):
        return _tensor(order), []
    if (id_of[1:] < id_of[:-1]).any():
        by_id = np.argsort(id_of, kind="stable")
        id_of, ends = id_of[by_id], ends[by_id]
        order = by_id if order is None else order[by_id]
    bounds = np.flatnonzero((id_of[1:] != id_of[:-1]) | ends[:-1]) + 1
    starts, stops = np.append(0, bounds), np.append(bounds, len(id_of))
    if order is not None:
        by_age = np.argsort(order[stops - 1])
        starts, stops = starts[by_age], stops[by_age]
    columns = (id_of[starts], starts, stops, ends[stops - 1])
    segments = map(Segment, *(column.tolist() for column in columns))
    return _tensor(order), list(segments)


def _tensor(order: np.ndarray | None) -> Tensor | None:
    return None if order is None else torch.from_numpy(order)


def _check_rows(ids: np.ndarray, rows: np.ndarray) -> None:
    """Refuse an id that runs in two rows of the batch."""
    by_id = np.lexsort((rows, ids))
    ids, rows = ids[by_id], rows[by_id]
    twice = ids[1:][(ids[1:] == ids[:-1]) & (rows[1:] != rows[:-1])]
    if len(twice):
        raise ValueError(
            f"each row of a [B, T] batch is one environment and needs ids of its own: id "
            f"{int(twice[0])} is in more than one row"
        )
