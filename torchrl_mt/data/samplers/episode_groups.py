"""Groups of episodes: which episodes share one value, and finding the members of a group.

Where groups have a size, those of another are not dealt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_mt.data._store.steps import Column, Objects, Rows

__all__ = ["Groups"]


@dataclass(frozen=True)
class Groups:
    """Episodes in groups that are numbered from 0 by their first ones; ``len(groups)`` counts them.

    The values that they share do not matter: draws of groups are the same whatever ids these have.

    Examples:
        >>> groups = Groups.of_values(torch.tensor([9, 5, 9]), "group")
        >>> groups.members(torch.tensor([1, 0]))
        tensor([1, 0, 2])
    """

    of: Tensor
    """int64 ``[E]``: the group of each episode."""
    size: int | None = None
    """How many episodes a group must have to be dealt; None for any."""

    @staticmethod
    def of_values(column: Column, key: NestedKey, size: int | None = None) -> Groups:
        """Group episodes by one value each.

        Args:
            column: one value per episode.
            key: the entry that they come from.
            size: how many episodes a group must have to be dealt; None for any.

        Raises:
            ValueError: if an episode has more than one value, or one that cannot be hashed.
        """
        if isinstance(column, Tensor) and column[:1].numel() == 1:
            ids, of = torch.unique(column.reshape(-1).cpu(), return_inverse=True)
            places = torch.arange(len(of), device="cpu")
            first = torch.zeros_like(of[: len(ids)]).scatter_reduce_(
                0, of, places, "amin", include_self=False
            )
            return Groups(first.argsort().argsort()[of], size)
        if isinstance(column, Objects):
            numbers: dict[Any, int] = {}
            try:
                of = [numbers.setdefault(item, len(numbers)) for item in column.items]
            except TypeError as error:
                raise ValueError(
                    f"group_key {key!r} must hold values that can be told apart by hash, such as "
                    f"integers or strings: {error}."
                ) from error
            return Groups(torch.tensor(of, device="cpu"), size)
        got = "varying shapes" if isinstance(column, Rows) else f"shape {tuple(column.shape[1:])}"
        raise ValueError(f"group_key {key!r} must hold one value per step, got {got}.")

    def __len__(self) -> int:
        return len(self._sizes)

    def members(self, groups: Tensor) -> Tensor:
        """The episodes of the given groups, group after group, in order: int64 ``[N]``."""
        sizes = self._sizes[groups]
        total = sizes.cumsum(0)
        first = torch.repeat_interleave(self._ends[groups] - total, sizes)
        return self._by_group[first + torch.arange(len(first), device="cpu")]

    def left(self, given: Tensor) -> Tensor:
        """The groups that are left to be dealt, in order: int64 ``[G]``.

        Those with an episode that was not given out, or, where groups have a size, those of which
        none was.

        Args:
            given: int64 ``[n]``, the episodes that were given out.
        """
        is_given = torch.zeros(len(self.of), dtype=torch.bool, device="cpu")
        is_given[given] = True
        if self.size is None:
            return torch.unique(self.of[~is_given])
        begun = torch.zeros(len(self), dtype=torch.bool, device="cpu")
        begun[self.of[is_given]] = True
        return self.dealt[~begun[self.dealt]]

    @property
    def sizes(self) -> tuple[int, int]:
        """Episodes of the smallest and of the largest group."""
        return int(self._sizes.min()), int(self._sizes.max())

    @cached_property
    def dealt(self) -> Tensor:
        """The groups that may be dealt, in order: int64 ``[G]``."""
        if self.size is None:
            return torch.arange(len(self), device="cpu")
        return (self._sizes == self.size).nonzero().squeeze(1)

    @cached_property
    def _sizes(self) -> Tensor:
        return torch.bincount(self.of)

    @cached_property
    def _ends(self) -> Tensor:
        return self._sizes.cumsum(0)

    @cached_property
    def _by_group(self) -> Tensor:
        return torch.argsort(self.of, stable=True)
