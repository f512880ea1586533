"""Ids of groups and episodes that no other collector gives out, in this process or another.

An id is a random number times a million plus a count: those of one collector stand in the order in which
they were given out, and their last six digits can be read. All are below ``2 ** 53``, so that JSON and
float64 hold them exactly, and none is below a million, where people count by hand.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["RunIds", "unique_ids"]

_BLOCK = 10**6
_LAST_BLOCK = 2**53 // _BLOCK - 1


def unique_ids() -> Iterator[int]:
    """Count from a random multiple of a million, and from another one after a million ids.

    No seed has a say in it: a run that is repeated, or that goes on from a saved state, has ids of its
    own. Two iterators share some with a probability of about 1e-10; of a thousand, some two with 6e-5.

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
    """Ids for the groups and for the episodes of a run."""

    groups: Iterator[int] = field(default_factory=unique_ids)
    episodes: Iterator[int] = field(default_factory=unique_ids)
