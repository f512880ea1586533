"""Sampled tokens as the only clock of a row: who owns a reward.

Nothing here assumes where the sampled tokens lie. A masked-out token takes no time, and a reward
that lies on one belongs to the last sampled token before it (to the row's first if none is before).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional._checks import check_mask


def rewards_on_sampled(reward: Tensor, mask: Tensor) -> Tensor:
    """Move every reward to the sampled token that it belongs to.

    Args:
        reward: ``[..., S]`` floating; a row's rewards may lie anywhere.
        mask: ``[..., S]`` bool, true on sampled tokens.

    Returns:
        ``[..., S]`` float32, zero on masked tokens; each row keeps its sum, or loses it if it has
        no sampled token.

    Examples:
        >>> mask = torch.tensor([[False, True, True, False, True]])
        >>> rewards_on_sampled(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), mask)
        tensor([[0., 3., 7., 0., 5.]])
    """
    check_mask("mask", mask, reward.shape)
    if not mask.numel():
        return reward.float()
    number = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    per_token = torch.zeros_like(reward, dtype=torch.float32)
    per_token = per_token.scatter_add(-1, number, reward.float())
    return torch.where(mask, per_token.gather(-1, number), 0.0)
