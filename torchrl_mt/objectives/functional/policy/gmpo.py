"""GMPO: the geometric mean of a sequence's ratios, each clipped by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_mt.checks import check_clip_epsilon, check_shape
from torchrl_mt.objectives.functional.importance import (
    clip_side,
    log_ratio,
    ratio_of,
    sequence_mean,
)


def gmpo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (0.4, 0.4),
    *,
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Geometric-mean policy optimisation (https://arxiv.org/abs/2507.20673).

    With ``d = log_prob - old_log_prob``, clipped on the side that would lower the loss::

        e = min(d, high) where A > 0, max(d, -low) elsewhere
        loss = -A * exp(mean over the sequence of e)    on each of its tokens

    A sequence is a row, or with ``turns`` a turn of a row. The paper's loss has one advantage per
    sequence and the aggregation ``"seq_mean_token_mean"`` over rows.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``, or a number for both: the ratio's bounds are ``exp(-low)`` and
            ``exp(high)``.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        Loss per token and clip sides, as of :func:`ppo`.

    Examples:
        >>> log_prob, old = torch.tensor([[0.6, -0.4]]), torch.zeros(1, 2)
        >>> gmpo(log_prob, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
        (tensor([[-1., -1.]]), tensor([[1, 0]], dtype=torch.int8))
    """
    check_shape("advantage", advantage, log_prob.shape)
    low, high = check_clip_epsilon(clip_epsilon, most=math.inf)
    difference = log_ratio(log_prob, old_log_prob, mask)
    advantage = torch.where(mask, advantage.float(), 0.0)
    bounded = torch.where(advantage > 0, difference.clamp(max=high), difference.clamp(min=-low))
    loss = -advantage * ratio_of(sequence_mean(bounded, mask, turns))
    return loss, clip_side(difference.detach(), -low, high)
