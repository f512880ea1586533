"""Members of a batch by group id: who is compared with whom, and sums, means and spread over them.

Position never matters, and a rejected member enters no sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_mt.checks import check_ids, check_mask, check_shape


@dataclass(frozen=True)
class Groups:
    """The ``K`` groups of ``N`` members; those without a valid member are groups of 0 members."""

    member: Tensor
    """``[N]`` int64: the group (0 to K - 1) of each member."""
    valid: Tensor
    """``[N]`` bool: whether the member counts."""
    number: int
    """How many groups there are, ``K``."""

    def total(self, x: Tensor) -> Tensor:
        """Sum over each group's valid members: ``[N]`` to ``[K]``."""
        return x.new_zeros(self.number).index_add(0, self.member, torch.where(self.valid, x, 0.0))

    def mean(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean over each group's valid members, by ``weight`` if given: ``[N]`` to ``[K]``.

        0 for a group without weight.
        """
        weight = torch.ones_like(x) if weight is None else weight
        total = self.total(weight)
        return self.total(x * weight) / torch.where(total > 0, total, 1.0)

    def count(self) -> Tensor:
        """Count each group's valid members: ``[K]`` int64."""
        zeros = torch.zeros(self.number, dtype=torch.long, device=self.valid.device)
        return zeros.index_add(0, self.member, self.valid.long())

    def spread(self, x: Tensor) -> Tensor:
        """Whether each group has two valid members that differ, or NaN: ``[N]`` to ``[K]`` bool.

        Read from the data: a rounded mean would turn equal members into a tiny spread, which the
        division by a tiny standard deviation would then blow up.
        """
        start = x.new_full((self.number,), torch.inf)
        low = torch.where(self.valid, x, torch.inf)
        high = torch.where(self.valid, x, -torch.inf)
        low = start.scatter_reduce(0, self.member, low, "amin")
        high = (-start).scatter_reduce(0, self.member, high, "amax")
        return ~(low >= high)


def index_groups(returns: Tensor, group: Tensor, valid: Tensor | None = None) -> Groups:
    """Find the groups of a batch.

    Args:
        returns: ``[N]`` floating; only its shape is read.
        group: ``[N]`` int64 group ids, in any order.
        valid: ``[N]`` bool; by default all.

    Returns:
        The groups.

    Raises:
        ValueError: If shapes differ.
        TypeError: If ``group`` is not of integers or ``valid`` not boolean.

    Examples:
        >>> groups = index_groups(torch.zeros(3), torch.tensor([7, 2, 7]))
        >>> groups.count()[groups.member]
        tensor([2, 1, 2])
    """
    if returns.ndim != 1:
        raise ValueError(f"returns must have shape [N], got {tuple(returns.shape)}.")
    check_shape("group", group, returns.shape)
    check_ids("group", group)
    if valid is None:
        valid = torch.ones_like(group, dtype=torch.bool)
    check_mask("valid", valid, returns.shape)
    ids, member = torch.unique(group, return_inverse=True)
    return Groups(member, valid, len(ids))
