"""The clipped surrogate of PPO, per token."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional.kl import MAX_LOG_RATIO


def ppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: tuple[float, float] = (0.2, 0.2),
) -> tuple[Tensor, Tensor]:
    """Pessimistic clipped objective (Schulman et al., 2017, https://arxiv.org/abs/1707.06347).

    With ``w = exp(log_prob - old_log_prob)``::

        loss = -min(w * A, clip(w, 1 - low, 1 + high) * A)

    Different bounds are DAPO's "clip higher" (https://arxiv.org/abs/2503.14476). The log-ratio is
    cut off at 20 on either side, so that the loss and its gradient stay finite.

    Args:
        log_prob: ``[N, S]`` float32 under the policy being trained.
        old_log_prob: ``[N, S]`` float32 under the policy that sampled.
        advantage: ``[N, S]`` float32.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens, and whether the ratio lies outside
        the bounds, ``[N, S]`` bool.

    Examples:
        >>> log_prob, old = torch.tensor([[1.5, 0.9]]).log(), torch.zeros(1, 2)
        >>> ppo(log_prob, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
        (tensor([[-1.2000, -0.9000]]), tensor([[ True, False]]))
    """
    low, high = clip_epsilon
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    advantage = torch.where(mask, advantage, 0.0)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    return loss, (ratio != clipped).detach()
