"""The plain policy gradient, per token."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask, check_shape


def reinforce(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Score-function objective ``-A * log_prob`` (Williams, 1992), for data of the current policy.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: Ignored.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: Ignored.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens, and clip sides, all 0.

    Examples:
        >>> log_prob, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, False]])
        >>> reinforce(log_prob, log_prob, torch.tensor([[2.0, 3.0]]), mask)[0].sum()
        tensor(2.)
    """
    check_mask("mask", mask, log_prob.shape)
    check_shape("advantage", advantage, log_prob.shape)
    loss = -torch.where(mask, advantage.float(), 0.0) * torch.where(mask, log_prob.float(), 0.0)
    return loss, torch.zeros_like(mask, dtype=torch.int8)
