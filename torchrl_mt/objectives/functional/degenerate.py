"""Groups without spread teach nothing by comparison: drop them, or weigh the others up.

A group is degenerate if its valid members all have the same return, or if it has fewer than two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_positive
from torchrl_mt.objectives.functional.groups import Groups, index_groups
from torchrl_mt.objectives.functional.time.recurrence import accumulation_dtype


def dynamic_sampling_mask(returns: Tensor, group: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Tell which members to keep: valid ones of groups whose returns differ.

    Dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476), for returns of any values.

    Args:
        returns: ``[N]`` floating.
        group: ``[N]`` int64 group ids, in any order.
        valid: ``[N]`` bool; the others are not read and not kept.

    Returns:
        ``[N]`` bool.

    Raises:
        ValueError: If shapes differ.
        TypeError: If ``group`` is not of integers or ``valid`` not boolean.

    Examples:
        >>> returns = torch.tensor([1.0, 0.0, 1.0, 1.0])
        >>> dynamic_sampling_mask(returns, torch.tensor([7, 7, 8, 8]))
        tensor([ True,  True, False, False])
    """
    groups = index_groups(returns, group, valid)
    return _teaches(returns, groups)[groups.member] & groups.valid


def clip_filter_weight(
    returns: Tensor,
    group: Tensor,
    *,
    valid: Tensor | None = None,
    max_weight: float = 3.0,
) -> Tensor:
    """Weigh the groups that have spread up by the share of those that have none, to a bound.

    With ``B`` groups, ``D`` of them degenerate, the weight of a member is
    ``min(B / (B - D), max_weight)`` in a group with spread and 0 in the others: the clip-filter-like
    weight of CPGD (https://arxiv.org/abs/2505.12504). Groups without a valid member do not count.

    Args:
        returns: ``[N]`` floating.
        group: ``[N]`` int64 group ids, in any order.
        valid: ``[N]`` bool; the others are not read and get 0.
        max_weight: The bound, above 0.

    Returns:
        ``[N]`` float32.

    Raises:
        ValueError: If shapes differ or ``max_weight`` is not positive.
        TypeError: If ``group`` is not of integers or ``valid`` not boolean.

    Examples:
        >>> returns = torch.tensor([1.0, 0.0, 1.0, 1.0])
        >>> clip_filter_weight(returns, torch.tensor([7, 7, 8, 8]))
        tensor([2., 2., 0., 0.])
    """
    check_positive("max_weight", max_weight)
    groups = index_groups(returns, group, valid)
    teaches = _teaches(returns, groups)
    everyone, kept = (groups.count() > 0).sum(), teaches.sum()
    weight = (everyone / kept.clamp(min=1)).clamp(max=max_weight).float()
    return torch.where(teaches[groups.member] & groups.valid, weight, 0.0)


def _teaches(returns: Tensor, groups: Groups) -> Tensor:
    """Whether each group is not degenerate: ``[K]`` bool."""
    returns = returns.detach().to(accumulation_dtype(returns.device))
    return groups.spread(returns) & (groups.count() > 1)
