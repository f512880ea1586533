"""GDPO: each reward compared within the group by itself, so that none drowns another."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_shape
from torchrl_mt.objectives.functional.outcome import outcome_advantage


def gdpo_advantage(
    returns: Tensor,
    weight: Tensor,
    mask: Tensor,
    turns: Tensor,
    episode: Tensor,
    group: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """Group reward-decoupled advantage of ``K`` rewards (https://arxiv.org/abs/2601.05242).

    For each episode, with the statistics of its group, then of the batch (each episode counts once)::

        sum  = sum over k of weight[k] * (returns[k] - mean[k]) / (std[k] + eps)
        A    = (sum - mean) / (std + eps)

    Rewards that are equal in a group, and episodes alone in theirs, add 0 to the sum. An episode in
    which a reward has weight 0 does not enter this reward's statistics.

    Args:
        returns: ``[K, N, S]`` floating: each turn's return-to-go of each reward, without its weight.
        weight: ``[K, N]`` floating: weight of each reward in each row; one per episode.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row.
        group: ``[N]`` int64 group id of each row; one per episode.
        eps: Added to standard deviations.

    Returns:
        ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> returns = torch.tensor([[[0.0], [90.0], [0.0]], [[1.0], [0.0], [0.0]]])
        >>> mask, turns = torch.ones(3, 1, dtype=torch.bool), torch.zeros(3, 1).long()
        >>> group, weight = torch.zeros(3).long(), torch.ones(2, 3)
        >>> gdpo_advantage(returns, weight, mask, turns, torch.arange(3), group).flatten()
        tensor([ 0.5773,  0.5774, -1.1547])
    """
    check_shape("returns", returns, torch.Size((len(returns), *mask.shape)))
    check_shape("weight", weight, returns.shape[:2])
    total = torch.zeros_like(mask, dtype=torch.float32)
    for own, factor in zip(returns, weight.unsqueeze(-1), strict=True):
        counted = mask & (factor != 0)
        total += factor * outcome_advantage(own, counted, turns, episode, group, "grpo", eps=eps)
    group = torch.zeros_like(group)
    return outcome_advantage(total, mask, turns, episode, group, "batch", eps=eps)
