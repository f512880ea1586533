"""SAPO: a smooth gate on each token's importance ratio instead of a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_positive, check_shape
from torchrl_mt.objectives.functional.importance import log_ratio, ratio_of


def sapo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: tuple[float, float] | None = None,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, Tensor]:
    """Soft adaptive policy optimisation (https://arxiv.org/abs/2511.20347).

    With ``w = exp(log_prob - old_log_prob)`` and ``tau = tau_pos`` for positive advantages, else
    ``tau_neg``::

        loss = -A * 4 / tau * sigmoid(tau * (w - 1))

    The slope in ``w`` is ``-A`` at ``w = 1``, as without a gate, and fades away from there.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: Ignored.
        tau_pos: Temperature of the gate for positive advantages; larger fades faster.
        tau_neg: Temperature for the others; larger in the paper, because their gradients raise many
            unsampled tokens.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens, and clip sides, all 0.

    Examples:
        >>> log_prob = torch.tensor([[0.0, 2.0]], requires_grad=True)
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> sapo(log_prob, torch.zeros(1, 2), torch.ones(1, 2), mask)[0].sum().backward()
        >>> log_prob.grad
        tensor([[-1.0000, -0.0495]])
    """
    check_shape("advantage", advantage, log_prob.shape)
    check_positive("tau_pos", tau_pos)
    check_positive("tau_neg", tau_neg)
    ratio = ratio_of(log_ratio(log_prob, old_log_prob, mask))
    advantage = torch.where(mask, advantage.float(), 0.0)
    tau = torch.where(advantage > 0, tau_pos, tau_neg)
    loss = -advantage * 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
    return loss, torch.zeros_like(mask, dtype=torch.int8)
