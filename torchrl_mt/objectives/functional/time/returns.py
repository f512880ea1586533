"""Discounted return of every sampled token, counting sampled tokens as the only time.

Dropping all masked-out tokens of a row, once their rewards have gone to their owners, changes
nothing.
"""

from __future__ import annotations

from torch import Tensor

from torchrl_mt.checks import check_mask, check_unit_interval
from torchrl_mt.objectives.functional.time.recurrence import sampled_recurrence


def masked_returns(reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted return-to-go ``G[i] = r[i] + gamma * G[i + 1]`` over a row's sampled tokens ``i``.

    A reward on a masked token belongs to the last sampled token before it, or to the row's first
    sampled token if none is before; a row without sampled tokens has zeros.

    Args:
        reward: ``[..., S]`` floating.
        mask: ``[..., S]`` bool, true on sampled tokens; holes and padding may lie anywhere.
        gamma: Discount per sampled token, in [0, 1].

    Returns:
        ``[..., S]`` float32, zero on masked tokens.

    Raises:
        ValueError: If shapes differ or ``gamma`` is out of range.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> import torch
        >>> reward = torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0]])
        >>> mask = torch.tensor([[True, False, False, True, True]])
        >>> masked_returns(reward, mask, gamma=0.5)
        tensor([[1.5000, 0.0000, 0.0000, 1.0000, 2.0000]])
    """
    check_mask("mask", mask, reward.shape)
    check_unit_interval("gamma", gamma)
    return sampled_recurrence(reward, mask, gamma)
