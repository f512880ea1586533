"""Ids of groups and episodes that are unique across collectors and processes.

An id is a random number times a million plus a count, so a collector's first million ids are in order.
All are below ``2 ** 53``, so that JSON and float64 hold them exactly, and at least a million, out of the
range of ids counted by hand.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tensordict import NestedKey, TensorDictBase

__all__ = ["RunIds", "UniqueTrajIds", "unique_ids"]

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


class UniqueTrajIds:
    """Make the trajectory ids of a TorchRL collector unique, as its ``postproc``.

    Each of TorchRL's collectors counts trajectories from 0. If several write to one buffer, their
    episodes have the same ids, and unfinished ones can be told apart only by their observations. This
    moves the ids of each collector to a range of its own. Every copy, such as the one of another
    process, has other ranges.

    Args:
        traj_key: the entry with the ids, any integers of at least 0; negative ones stay.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> unique = UniqueTrajIds()
        >>> steps = TensorDict({"collector": {"traj_ids": torch.tensor([0, 0, 1])}}, [3])
        >>> first, same, second = unique(steps)["collector", "traj_ids"].tolist()
        >>> first == same == second - 1, first >= 1_000_000
        (True, True)
    """

    def __init__(self, traj_key: NestedKey = ("collector", "traj_ids")) -> None:
        self.traj_key = traj_key
        self._starts: defaultdict[int, int] = defaultdict(lambda: next(unique_ids()))
        """First new id of each million of the collector's."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace the ids of a batch.

        Raises:
            KeyError: if the batch has no such entry.
        """
        ids = tensordict.get(self.traj_key, None)
        if ids is None:
            raise KeyError(
                f"UniqueTrajIds found no {self.traj_key!r}: leave it out, or have the collector write "
                "ids (track_traj_ids=True)."
            )
        moved = ids.to(torch.int64, copy=True)
        for block in (ids[ids >= 0] // _BLOCK).unique().tolist():
            of_block = (ids >= 0) & (ids // _BLOCK == block)
            moved[of_block] += self._starts[block] - block * _BLOCK
        return tensordict.copy().set(self.traj_key, moved)  # The collector may use its own again.

    def __reduce__(self) -> tuple[type[UniqueTrajIds], tuple[NestedKey]]:
        """Copy the key only: a copy has ids of its own."""
        return type(self), (self.traj_key,)
