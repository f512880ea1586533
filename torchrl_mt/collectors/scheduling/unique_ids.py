"""Ids of groups and episodes that are unique across collectors and processes.

An id is a random number times a million plus a count, so a collector's first million ids are in order.
All are below ``2 ** 53``, so that JSON and float64 hold them exactly, and at least a million, out of the
range of ids counted by hand.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["RunIds", "unique_ids"]

_BLOCK = 10**6
_LAST_BLOCK = 2**53 // _BLOCK - 1


def unique_ids() -> Iterator[int]:
    """Count from a random multiple of a million; after a million ids, from another one.

    No seed changes them, so a run that is repeated or resumed has new ids. Two iterators collide with
    a probability of about 1e-10, any two of a thousand with 6e-5.

    Examples:
        >>> ids = unique_ids()
        >>> first = next(ids)
        >>> next(ids) - first, first % 1_000_000
        (1, 0)
    """
    while True:
        start = (1 + secrets.randbelow(_LAST_BLOCK)) * _BLOCK
        yield from range(start, start + _BLOCK)


@dataclass(frozen=True)
class RunIds:
    """Id generators for the groups and the episodes of a run."""

    groups: Iterator[int] = field(default_factory=unique_ids)
    episodes: Iterator[int] = field(default_factory=unique_ids)
