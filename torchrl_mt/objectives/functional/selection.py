"""Selection of rows and tokens to learn from: groups with spread, uncertain tokens.

Statistics are taken over the whole batch. A group is degenerate, and teaches nothing by comparison, if
its valid members all have the same return or are fewer than two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask, check_positive
from torchrl_mt.objectives.functional.group import Groups, index_groups
from torchrl_mt.objectives.functional.time.recurrence import accumulation_dtype


def dynamic_sampling_mask(returns: Tensor, group: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Select the valid members of groups that are not degenerate.

    Dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476), for any returns.

    Args:
        returns: ``[N]`` floating.
        group: ``[N]`` int64 group ids, in any order.
        valid: ``[N]`` bool; members where it is false are neither read nor kept.

    Returns:
        ``[N]`` bool.

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
    """Weight degenerate groups by 0 and the others up in exchange.

    With ``B`` groups, ``D`` of them degenerate, members of the others get the weight
    ``min(B / (B - D), max_weight)``: the clip-filter-like weight of CPGD
    (https://arxiv.org/abs/2505.12504). Groups without a valid member do not count.

    Args:
        returns: ``[N]`` floating.
        group: ``[N]`` int64 group ids, in any order.
        valid: ``[N]`` bool; members where it is false are not read and get 0.
        max_weight: Largest weight, above 0.

    Returns:
        ``[N]`` float32.

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


def entropy_mask(entropy: Tensor, mask: Tensor, rho: float = 0.2) -> Tensor:
    """Select the share ``rho`` of the sampled tokens with the highest entropy.

    Of ``M`` sampled tokens in the batch, keep the ``ceil(rho * M)`` with the highest entropy, and all
    that tie with the last (Wang et al., 2025, https://arxiv.org/abs/2506.01939). Mask the objective
    with the result, not the advantage or the returns.

    Args:
        entropy: ``[N, S]`` floating: entropy of the distribution that each token was sampled from; not
            read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        rho: Share to keep, in (0, 1].

    Returns:
        ``[N, S]`` bool, false on masked tokens.

    Raises:
        ValueError: If a sampled token's entropy is NaN.

    Examples:
        >>> entropy = torch.tensor([[0.1, 9.0, 2.0], [0.3, 0.0, 0.2]])
        >>> mask = torch.tensor([[True, False, True], [True, False, True]])
        >>> entropy_mask(entropy, mask, rho=0.5)
        tensor([[False, False,  True],
                [ True, False, False]])
    """
    check_mask("mask", mask, entropy.shape)
    if not 0.0 < rho <= 1.0:
        raise ValueError(f"rho must lie in (0, 1], got {rho}; to keep no token, drop the term.")
    sampled = entropy.detach()[mask].float()
    total = sampled.numel()
    if not total:
        return mask.clone()
    if bool(sampled.isnan().any()):
        raise ValueError("entropy must not be NaN on sampled tokens: the model is at fault.")
    # Rounded, because 0.28 of 25 tokens are 7, not 8.
    kept = max(1, math.ceil(round(rho * total, 6)))
    threshold = sampled.kthvalue(total - kept + 1).values
    return mask & (entropy.detach().float() >= threshold)


def _teaches(returns: Tensor, groups: Groups) -> Tensor:
    """Whether each group is not degenerate: ``[K]`` bool."""
    returns = returns.detach().to(accumulation_dtype(returns.device))
    return groups.spread(returns) & (groups.count() > 1)
