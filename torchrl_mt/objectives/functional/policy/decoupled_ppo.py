"""Decoupled PPO: clipped around one policy, corrected for sampling from another."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_positive
from torchrl_mt.objectives.functional.importance import MAX_RATIO, sampler_log_ratio
from torchrl_mt.objectives.functional.policy.ppo import ppo


def decoupled_ppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (0.2, 0.2),
    *,
    sampler_log_prob: Tensor,
    weight_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO with its trust region around a recent (proximal) policy, on samples of an older one.

    The proximal policy is the actor just before its updates on these rows (Hilton et al., 2021,
    https://arxiv.org/abs/2110.00641; AReaL, https://arxiv.org/abs/2505.24298)::

        u = exp(log_prob - old_log_prob)
        v = exp(old_log_prob - sampler_log_prob)    a constant
        loss = -v * min(u * A, clip(u, 1 - low, 1 + high) * A)

    If the sampler is the proximal policy, this is :func:`ppo`.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the proximal policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``, or a number for both; bounds ``u``.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        weight_cap: Largest ``v``; tokens above it get loss 0. ``None`` keeps all.

    Returns:
        Loss per token and clip sides, as of :func:`ppo`.

    Examples:
        >>> zero, one = torch.zeros(1, 1), torch.ones(1, 1)
        >>> sampler = torch.tensor([[0.5]]).log()
        >>> decoupled_ppo(zero, zero, one, one.bool(), sampler_log_prob=sampler)[0]
        tensor([[-2.]])
    """
    loss, clipped = ppo(log_prob, old_log_prob, advantage, mask, clip_epsilon)
    weight = sampler_log_ratio(old_log_prob, sampler_log_prob, mask).exp()
    if weight_cap is not None:
        check_positive("weight_cap", weight_cap)
        weight = torch.where(weight > weight_cap, 0.0, weight)
    return weight.clamp(max=MAX_RATIO) * loss, clipped
