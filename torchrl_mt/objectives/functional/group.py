"""Advantage of each member relative to its group, by group id.

Position never matters; a member with nothing to compare it with, and a group whose members are all
equal, get finite values and finite gradients.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_mt.objectives.functional._checks import check_choice, check_mask, check_shape

GroupKind = Literal["grpo", "dr_grpo", "rloo", "batch"]
"""How a member is compared with its group."""


def group_advantage(
    returns: Tensor,
    group: Tensor,
    kind: GroupKind = "grpo",
    *,
    valid: Tensor | None = None,
    lone_value: float = 0.0,
    eps: float = 1e-6,
) -> Tensor:
    """Compare each member's return with those of the members that share its group id.

    With the mean and the unbiased standard deviation of the group's ``n`` valid members:

    - ``"grpo"``: ``(G - mean) / (std + eps)`` (https://arxiv.org/abs/2402.03300);
    - ``"dr_grpo"``: ``G - mean`` (https://arxiv.org/abs/2503.20783);
    - ``"rloo"``: ``G`` minus the mean of the *others*, ``n / (n - 1) * (G - mean)``
      (https://arxiv.org/abs/2402.14740);
    - ``"batch"``: as ``"grpo"``, the whole batch being one group (``group`` is not read).

    Args:
        returns: ``[N]`` floating.
        group: ``[N]`` int64 group ids, in any order.
        kind: See above.
        valid: ``[N]`` bool; the others enter no statistic and get 0.
        lone_value: What a valid member alone in its group gets.
        eps: Added to the standard deviation.

    Returns:
        ``[N]`` float32; 0 for every member of a group whose valid members are all equal.

    Raises:
        ValueError: If shapes differ or ``kind`` is unknown.
        TypeError: If ``valid`` is not boolean.

    Examples:
        >>> returns = torch.tensor([1.0, 0.0, 3.0, 5.0])
        >>> group_advantage(returns, torch.tensor([7, 2, 7, 3]), "dr_grpo")
        tensor([-1.,  0.,  1.,  0.])
    """
    check_choice("kind", kind, get_args(GroupKind))
    if returns.ndim != 1:
        raise ValueError(f"returns must have shape [N], got {tuple(returns.shape)}.")
    check_shape("group", group, returns.shape)
    if valid is None:
        valid = torch.ones_like(group, dtype=torch.bool)
    check_mask("valid", valid, returns.shape)
    if not returns.numel():
        return returns.float()
    if kind == "batch":
        group = torch.zeros_like(group)

    ids, member = torch.unique(group, return_inverse=True)
    returns = torch.where(valid, returns.float(), 0.0)
    count, mean = _count_and_mean(returns, member, valid, len(ids))
    deviation = returns - mean[member]
    lone = (count <= 1)[member]
    # Equality is read from the data: a rounded mean would turn equal members into a tiny spread,
    # which the division by a tiny standard deviation then blows up.
    equal = _all_equal(returns.detach(), member, valid, len(ids))[member]
    if kind in ("grpo", "batch"):
        square = torch.where(valid, deviation, 0.0).square()
        variance = torch.zeros_like(mean).index_add(0, member, square) / (count - 1).clamp(min=1)
        # The square root's slope at 0 is infinite: keep the unused branch away from it.
        deviation = deviation / (torch.where(equal, 1.0, variance[member]).sqrt() + eps)
    elif kind == "rloo":
        deviation = deviation * (count / (count - 1).clamp(min=1))[member]
    advantage = torch.where(equal, 0.0, deviation)
    return torch.where(valid, torch.where(lone, lone_value, advantage), 0.0)


def _count_and_mean(
    returns: Tensor, member: Tensor, valid: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """Number and mean of each group's valid members."""
    zeros = returns.new_zeros(groups)
    count = zeros.index_add(0, member, valid.to(returns.dtype))
    return count, zeros.index_add(0, member, returns) / count.clamp(min=1)


def _all_equal(returns: Tensor, member: Tensor, valid: Tensor, groups: int) -> Tensor:
    """Whether each group's valid members have one and the same return."""
    start = returns.new_full((groups,), torch.inf)
    low = start.scatter_reduce(0, member, torch.where(valid, returns, torch.inf), "amin")
    high = (-start).scatter_reduce(0, member, torch.where(valid, returns, -torch.inf), "amax")
    return low >= high
