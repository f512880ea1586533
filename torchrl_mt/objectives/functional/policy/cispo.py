"""CISPO, per token: clips the importance weight, never the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_clip_epsilon, check_shape
from torchrl_mt.objectives.functional.importance import clip_side, log_ratio, ratio_of


def cispo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (1.0, 4.0),
) -> tuple[Tensor, Tensor]:
    """Clipped importance-sampling policy gradient (https://arxiv.org/abs/2506.13585, eq. 4 and 5).

    With ``w = exp(log_prob - old_log_prob)`` and ``sg`` the stop-gradient::

        loss = -sg(clip(w, 1 - low, 1 + high)) * A * log_prob

    So every sampled token has a gradient, even where ``w`` is outside the bounds.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``, or a number for both. A ``low`` of 1 means no lower bound, as in
            the paper; the default largest weight, 5, is that of https://arxiv.org/abs/2510.13786.

    Returns:
        Loss per token and clip sides, as of :func:`ppo`.

    Examples:
        >>> log_prob = torch.tensor([[-0.5]], requires_grad=True)
        >>> mask = torch.tensor([[True]])
        >>> loss, clipped = cispo(log_prob, torch.tensor([[-9.0]]), torch.ones(1, 1), mask)
        >>> loss.backward()
        >>> clipped, log_prob.grad
        (tensor([[1]], dtype=torch.int8), tensor([[-5.]]))
    """
    check_shape("advantage", advantage, log_prob.shape)
    low, high = check_clip_epsilon(clip_epsilon)
    low, high = 1.0 - low, 1.0 + high
    ratio = ratio_of(log_ratio(log_prob, old_log_prob, mask)).detach()
    weight = ratio.clamp(low, high) * torch.where(mask, advantage.float(), 0.0)
    loss = -weight * torch.where(mask, log_prob.float(), 0.0)
    return loss, clip_side(ratio, low, high)
