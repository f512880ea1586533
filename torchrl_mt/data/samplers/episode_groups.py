"""Groups of episodes that share one value, such as the id of their item.

With a group size, only groups of exactly that size are drawn.
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
    """Groups of episodes, numbered from 0 in the order of their first episodes.

    Draws of groups do not depend on the shared values themselves. ``len(groups)`` counts the groups.

    Examples:
        >>> groups = Groups.of_values(torch.tensor([9, 5, 9]), "group")
        >>> groups.members(torch.tensor([1, 0]))
        tensor([1, 0, 2])
    """

    of: Tensor
    """int64 ``[E]``: group of each episode."""
    size: int | None = None
    """Episodes that a group must have to be drawn; None for any number."""

    @staticmethod
    def of_values(column: Column, key: NestedKey, size: int | None = None) -> Groups:
        """Group episodes by their values.

        Args:
            column: one value per episode.
            key: the entry of these values.
            size: episodes that a group must have to be drawn; None for any number.

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
        """Return the episodes of ``groups``, group after group, oldest first: int64 ``[N]``."""
        sizes = self._sizes[groups]
        total = sizes.cumsum(0)
        first = torch.repeat_interleave(self._ends[groups] - total, sizes)
        return self._by_group[first + torch.arange(len(first), device="cpu")]

    def left(self, given: Tensor) -> Tensor:
        """Return the groups that are left to draw, in order: int64 ``[G]``.

        A group is left while one of its episodes is. With a group size, it is left until one of its
        episodes is given out.

        Args:
            given: int64 ``[n]``, the episodes that were given out.
        """
        is_given = torch.zeros(len(self.of), dtype=torch.bool, device="cpu")
        is_given[given] = True
        if self.size is None:
            return torch.unique(self.of[~is_given])
        begun = torch.zeros(len(self), dtype=torch.bool, device="cpu")
        begun[self.of[is_given]] = True
        return self.drawable[~begun[self.drawable]]

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the smallest and of the largest group."""
        return int(self._sizes.min()), int(self._sizes.max())

    @cached_property
    def drawable(self) -> Tensor:
        """int64 ``[G]``: the groups that may be drawn, in order."""
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
