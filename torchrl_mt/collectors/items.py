"""What episodes are reset with: an endless stream of items, unless the data itself has an end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["cycle", "seeds"]


def cycle(data: Iterable[Any] | None) -> Iterator[Any]:
    """The items of ``data``, endlessly unless it is an iterator; refuses empty data at once."""
    if data is None:
        return seeds(0)
    items = iter(data)
    try:
        first = next(items)
    except StopIteration:
        raise ValueError("data must hold at least one item, got none.") from None
    if items is data:
        return itertools.chain([first], items)
    return itertools.chain([first], items, itertools.chain.from_iterable(itertools.repeat(data)))


def seeds(start: int) -> Iterator[dict[str, int]]:
    """What episodes are reset with when there is no data."""
    return ({"seed": seed} for seed in itertools.count(start * 1_000_003))
