"""DPPO, per token: a trust region by divergence instead of the ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_clip_epsilon, check_shape
from torchrl_mt.objectives.functional.importance import log_ratio, ratio_of

_LEAST = 1e-8
"""Smallest probability of all other tokens together."""


def dppo_tv(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (0.15, 0.15),
) -> tuple[Tensor, Tensor]:
    """Divergence PPO with the binary total variation (https://arxiv.org/abs/2602.04879).

    With ``p = exp(log_prob)``, ``q = exp(old_log_prob)``, ``w = p / q`` and the divergence of the two
    choices "this token" and "another one", ``D = |p - q|``::

        loss = -w * A    unless A > 0 and p > q and D > high, or A <= 0 and p < q and D > low
        loss = 0         there

    Rare tokens may change their ratio much, frequent ones may not. In the paper ``q`` is the sampler's,
    as with ``ExperienceMaker(old_log_probs="sampler")``. The default bounds are verl's example's.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``, or a number for both: largest ``D`` where ``p`` fell and rose.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens; and clip sides ``[N, S]`` int8: where
        ``D`` is above its bound, -1 if ``p < q``, else 1.

    Examples:
        >>> log_prob, old = torch.tensor([[0.9, 0.02]]).log(), torch.tensor([[0.7, 0.01]]).log()
        >>> dppo_tv(log_prob, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
        (tensor([[ 0., -2.]]), tensor([[1, 0]], dtype=torch.int8))
    """
    check_shape("old_log_prob", old_log_prob, log_prob.shape)
    with torch.no_grad():
        divergence = (log_prob.float().exp() - old_log_prob.float().exp()).abs()
    return _within(divergence, log_prob, old_log_prob, advantage, mask, clip_epsilon)


def dppo_kl(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (0.05, 0.05),
) -> tuple[Tensor, Tensor]:
    """Divergence PPO with the binary KL divergence (https://arxiv.org/abs/2602.04879).

    As :func:`dppo_tv`, with ``D = q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))``.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``, or a number for both: largest ``D`` where ``p`` fell and rose.

    Returns:
        Loss per token and clip sides, as of :func:`dppo_tv`.

    Examples:
        >>> log_prob, old = torch.tensor([[0.5, 0.02]]).log(), torch.tensor([[0.8, 0.01]]).log()
        >>> dppo_kl(log_prob, old, -torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
        (tensor([[0., 2.]]), tensor([[-1,  0]], dtype=torch.int8))
    """
    check_shape("old_log_prob", old_log_prob, log_prob.shape)
    with torch.no_grad():
        new, old = log_prob.float(), old_log_prob.float()
        other, other_old = (torch.expm1(x).neg_().clamp_(min=_LEAST) for x in (new, old))
        divergence = old.exp() * (old - new) + other_old * (other_old / other).log()
    return _within(divergence, log_prob, old_log_prob, advantage, mask, clip_epsilon)


def _within(
    divergence: Tensor,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Compute the loss of the tokens that are within their bound or come back, and the sides."""
    check_shape("advantage", advantage, log_prob.shape)
    low, high = check_clip_epsilon(clip_epsilon)
    difference = log_ratio(log_prob, old_log_prob, mask)
    rose = mask & (difference > 0) & (divergence > high)
    fell = mask & (difference < 0) & (divergence > low)
    advantage = torch.where(mask, advantage.float(), 0.0)
    dropped = torch.where(advantage > 0, rose, fell)
    loss = torch.where(dropped, 0.0, -advantage * ratio_of(difference))
    return loss, rose.to(torch.int8) - fell.to(torch.int8)
