"""Groups of episodes: which episodes share one value, and finding the members of a group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_mt.data.steps import Column, Objects, Rows

__all__ = ["Groups"]


@dataclass(frozen=True)
class Groups:
    """Episodes in groups that are numbered from 0; ``len(groups)`` counts the groups.

    Examples:
        >>> groups = Groups.of_values(torch.tensor([5, 9, 5]), "group")
        >>> groups.members(torch.tensor([1, 0]))
        tensor([1, 0, 2])
    """

    of: Tensor
    """int64 ``[E]``: the group of each episode."""

    @staticmethod
    def of_values(column: Column, key: NestedKey) -> Groups:
        """Group episodes by one value each.

        Args:
            column: one value per episode.
            key: the entry that they come from.

        Raises:
            ValueError: if an episode has more than one value, or one that cannot be hashed.
        """
        if isinstance(column, Tensor) and column[:1].numel() == 1:
            return Groups(torch.unique(column.reshape(-1).cpu(), return_inverse=True)[1])
        if isinstance(column, Objects):
            numbers: dict[Any, int] = {}
            try:
                of = [numbers.setdefault(item, len(numbers)) for item in column.items]
            except TypeError as error:
                raise ValueError(
                    f"group_key {key!r} must hold values that can be told apart by hash, such as "
                    f"integers or strings: {error}"
                ) from error
            return Groups(torch.tensor(of, device="cpu"))
        got = "varying shapes" if isinstance(column, Rows) else f"shape {tuple(column.shape[1:])}"
        raise ValueError(f"group_key {key!r} must hold one value per step, got {got}")

    def __len__(self) -> int:
        return len(self._sizes)

    def members(self, groups: Tensor) -> Tensor:
        """The episodes of the given groups, group after group, in order: int64 ``[N]``."""
        sizes = self._sizes[groups]
        total = sizes.cumsum(0)
        first = torch.repeat_interleave(self._ends[groups] - total, sizes)
        return self._by_group[first + torch.arange(len(first), device="cpu")]

    @cached_property
    def _sizes(self) -> Tensor:
        return torch.bincount(self.of)

    @cached_property
    def _ends(self) -> Tensor:
        return self._sizes.cumsum(0)

    @cached_property
    def _by_group(self) -> Tensor:
        return torch.argsort(self.of, stable=True)
