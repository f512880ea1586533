"""Clip-Cov and KL-Cov, per token: held back where log-probability and advantage rise together.

Such tokens cost most of the entropy. The covariance is that of the rows of a call, so rows depend on
each other: in :class:`~torchrl_mt.objectives.MultiTurnLoss`, the rows of one forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_finite, check_shape
from torchrl_mt.objectives.functional.importance import log_ratio, ratio_of
from torchrl_mt.objectives.functional.policy.ppo import ppo


def clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (0.2, 0.2),
    *,
    share: float = 2e-4,
    bounds: tuple[float, float] = (1.0, 5.0),
) -> tuple[Tensor, Tensor]:
    """PPO without some tokens of high covariance (https://arxiv.org/abs/2505.22617).

    With the means over the sampled tokens of this call, a token's part of the covariance is
    ``(A - mean(A)) * (log_prob - mean(log_prob))``. Of the tokens whose part lies between ``bounds`` and
    which PPO does not clip, ``share`` times the number of all sampled tokens (rounded down, at least
    one) get loss 0. They are drawn at random from torch's global generator.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: See :func:`ppo`.
        share: Share of the sampled tokens, in (0, 1].
        bounds: The covariance's ``(low, high)``, exclusive.

    Returns:
        Loss per token and clip sides, as of :func:`ppo`.

    Examples:
        >>> log_prob, mask = torch.tensor([[-0.1, -4.1, -0.1]]), torch.ones(1, 3, dtype=torch.bool)
        >>> advantage = torch.tensor([[0.5, -3.0, 1.0]])
        >>> clip_cov(log_prob, log_prob, advantage, mask, bounds=(1.5, 5.0))[0]
        tensor([[-0.5000,  3.0000,  0.0000]])
    """
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds must be (low, high) with low < high, got {bounds}.")
    loss, clipped = ppo(log_prob, old_log_prob, advantage, mask, clip_epsilon)
    with torch.no_grad():
        covariance = _covariance(log_prob, advantage, mask)
        free = mask & ~(clipped * advantage > 0)
        found = (free & (covariance > low) & (covariance < high)).nonzero()
        drawn = torch.randperm(len(found), device=found.device)[: _count(share, mask)]
        dropped = torch.zeros_like(mask).index_put(
            tuple(found[drawn].unbind(-1)), torch.ones_like(drawn, dtype=torch.bool)
        )
    return torch.where(dropped, 0.0, loss), clipped


def kl_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: tuple[float, float] | None = None,
    *,
    share: float = 2e-4,
    coef: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Policy gradient with a KL penalty on tokens of high covariance (https://arxiv.org/abs/2505.22617).

    With ``d = log_prob - old_log_prob`` and the covariance of :func:`clip_cov`::

        loss = -exp(d) * A + coef * |d|    on the share of the sampled tokens with the highest
        loss = -exp(d) * A                 on the others

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: Ignored.
        share: Share of the sampled tokens (rounded down, at least one), in (0, 1].
        coef: Weight of the penalty.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens, and clip sides, all 0.

    Examples:
        >>> log_prob, mask = torch.tensor([[0.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> kl_cov(log_prob, log_prob - 0.5, torch.tensor([[0.0, -2.0]]), mask)[0]
        tensor([[0.5000, 3.2974]])
    """
    check_shape("advantage", advantage, log_prob.shape)
    check_finite("coef", coef)
    difference = log_ratio(log_prob, old_log_prob, mask)
    advantage = torch.where(mask, advantage.float(), 0.0)
    with torch.no_grad():
        covariance = _covariance(log_prob, advantage, mask)
        covariance = torch.where(mask, covariance, -torch.inf).flatten()
        count = min(_count(share, mask), len(covariance))
        held = torch.zeros_like(mask.flatten())
        held[covariance.topk(count).indices] = True
        held = held.view(mask.shape) & mask
    loss = -ratio_of(difference) * advantage + torch.where(held, coef * difference.abs(), 0.0)
    return loss, torch.zeros_like(mask, dtype=torch.int8)


def _covariance(log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Each sampled token's part of the covariance, ``[N, S]``; not finite if nothing is sampled."""
    log_prob, advantage = log_prob.float(), advantage.float()
    return (advantage - advantage[mask].mean()) * (log_prob - log_prob[mask].mean())


def _count(share: float, mask: Tensor) -> int:
    """Count the tokens of a share of the sampled ones: at least one."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must lie in (0, 1], got {share}.")
    return max(1, int(share * int(mask.count_nonzero())))
