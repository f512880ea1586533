"""Rewards moved to sampled tokens, whatever the environment said in between.

A reward on a masked token moves to the last sampled token before it, or else to the row's first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from torchrl_mt.checks import check_mask


def rewards_on_sampled(
    reward: Tensor, mask: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Move every reward to the last sampled token up to it, or else to the row's first.

    Args:
        reward: ``[..., S]`` floating.
        mask: ``[..., S]`` bool, true on sampled tokens.
        dtype: Type of the sums and of the result.

    Returns:
        ``[..., S]``, zero on masked tokens. A row without sampled tokens loses its rewards.

    Examples:
        >>> mask = torch.tensor([[False, True, True, False, True]])
        >>> rewards_on_sampled(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), mask)
        tensor([[0., 3., 7., 0., 5.]])
    """
    check_mask("mask", mask, reward.shape)
    if not mask.numel():
        return reward.to(dtype)
    number = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    per_token = torch.zeros_like(reward, dtype=dtype)
    per_token = per_token.scatter_add(-1, number, reward.to(dtype))
    return torch.where(mask, per_token.gather(-1, number), 0.0)


def only_sampled_(x: Tensor, mask: Tensor) -> Tensor:
    """Set masked values to zero, even infinity and NaN; in place on a CPU without autograd.

    ``x`` is float32 or float64. A new tensor is returned if ``x`` has a gradient or a tangent, or is
    not on a CPU.
    """
    differentiated = x.requires_grad or unpack_dual(x).tangent is not None
    if differentiated or x.device.type != "cpu":
        return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    # Bitwise: torch.where is many times slower, above all with an irregular mask.
    bits = torch.int64 if x.dtype is torch.float64 else torch.int32
    x.view(bits).bitwise_and_(mask.to(bits).neg_())
    return x


def first_sampled_token(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first sampled token of each row of a mask ``[..., S]`` with ``S >= 1``.

    Returns its position ``[..., 1]`` int64 (the row's last position if nothing is sampled), and
    whether anything is sampled, ``[...]`` bool.

    Examples:
        >>> first_sampled_token(torch.tensor([[False, True, True], [False, False, False]]))
        (tensor([[1],
                [2]]), tensor([ True, False]))
    """
    size = mask.shape[-1]
    # Many times faster than argmax, in the smallest type that holds a position.
    dtype = torch.int16 if size <= torch.iinfo(torch.int16).max else torch.int32
    left = (mask * torch.arange(size, 0, -1, dtype=dtype, device=mask.device)).amax(-1)
    return (size - left.long()).clamp_(max=size - 1).unsqueeze(-1), left > 0
