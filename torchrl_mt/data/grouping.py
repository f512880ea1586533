"""Which steps of a batch belong to which episode.

Steps of one id are grouped in their order in time; an id that comes back after its episode ended
starts another episode.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    order: Tensor | None = None
    rows = torch.arange(len(ids), device="cpu")[:, None].expand_as(ids).reshape(-1)
    several = len(ids) > 1
    ids, ended = ids.reshape(-1), ended.reshape(-1)
    if valid is not None:
        order = valid.reshape(-1).nonzero().squeeze(1)
        ids, ended, rows = ids[order], ended[order], rows[order]
    if several:
        _check_rows(ids, rows)
    if bool((ids[1:] < ids[:-1]).any()):
        by_id = torch.argsort(ids, stable=True)
        ids, ended = ids[by_id], ended[by_id]
        order = by_id if order is None else order[by_id]
    first = torch.ones(len(ids), dtype=torch.bool, device="cpu")
    first[1:] = (ids[1:] != ids[:-1]) | ended[:-1]
    bounds = torch.cat([first.nonzero().squeeze(1), torch.tensor([len(ids)], device="cpu")])
    starts, stops = bounds[:-1], bounds[1:]
    last = stops - 1 if order is None else order[stops - 1]
    by_age = torch.argsort(last)
    starts, stops = starts[by_age], stops[by_age]
    segments = [
        Segment(*segment)
        for segment in zip(
            ids[starts].tolist(),
            starts.tolist(),
            stops.tolist(),
            ended[stops - 1].tolist(),
            strict=True,
        )
    ]
    return order, segments


def _check_rows(ids: Tensor, rows: Tensor) -> None:
    """Refuse an id that runs in two rows of the batch."""
    pairs = torch.unique(torch.stack([ids, rows]), dim=1)
    twice = pairs[0, 1:][pairs[0, 1:] == pairs[0, :-1]]
    if len(twice):
        raise ValueError(
            f"each row of a [B, T] batch is one environment and needs ids of its own: id "
            f"{int(twice[0])} is in more than one row"
        )
