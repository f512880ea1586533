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


def group_steps(ids: Tensor, ended: Tensor) -> tuple[Tensor | None, list[Segment]]:
    """Group the steps of a batch by episode.

    Args:
        ids: int64 ``[B, T]``: the episode of each step; time runs along ``T``.
        ended: bool ``[B, T]``: the steps that end their episode.

    Returns:
        the order in which to take the steps of the flattened batch (int64 ``[B * T]``, None for
        as they are), and the segments of the batch so ordered, listed in the order in which their
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
    rows, steps = ids.shape
    if rows > 1:
        _check_rows(ids)
    ids, ended = ids.reshape(-1), ended.reshape(-1)
    order: Tensor | None = None
    if bool((ids[1:] < ids[:-1]).any()):
        order = torch.argsort(ids, stable=True)
        ids, ended = ids[order], ended[order]
    first = torch.ones(rows * steps, dtype=torch.bool, device="cpu")
    first[1:] = (ids[1:] != ids[:-1]) | ended[:-1]
    starts = first.nonzero().squeeze(1)
    stops = torch.cat([starts[1:], torch.tensor([rows * steps], device="cpu")])
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


def _check_rows(ids: Tensor) -> None:
    """Refuse an id that runs in two rows of the batch."""
    rows = torch.arange(len(ids), device="cpu")[:, None].expand_as(ids)
    pairs = torch.unique(torch.stack([ids.reshape(-1), rows.reshape(-1)]), dim=1)
    twice = pairs[0, 1:][pairs[0, 1:] == pairs[0, :-1]]
    if len(twice):
        raise ValueError(
            f"each row of a [B, T] batch is one environment and needs ids of its own: id "
            f"{int(twice[0])} is in more than one row"
        )
