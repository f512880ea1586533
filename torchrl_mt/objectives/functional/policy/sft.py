"""Supervised fine-tuning: the cross-entropy of the trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask


def sft(
    log_prob: Tensor,
    old_log_prob: Tensor | None = None,
    advantage: Tensor | None = None,
    mask: Tensor | None = None,
    clip_epsilon: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood ``-log_prob``: imitation of the tokens, whoever wrote them.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: Ignored.
        advantage: Ignored.
        mask: ``[N, S]`` bool, true on the tokens to imitate; nothing else is read. By default all.
        clip_epsilon: Ignored.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens, and clip sides, all 0.

    Examples:
        >>> log_prob, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, False]])
        >>> sft(log_prob, mask=mask)[0].sum()
        tensor(1.)
    """
    if mask is None:
        mask = torch.ones_like(log_prob, dtype=torch.bool)
    check_mask("mask", mask, log_prob.shape)
    loss = -torch.where(mask, log_prob.float(), 0.0)
    return loss, torch.zeros_like(mask, dtype=torch.int8)
