"""The critic's loss: squared error per token, optionally clipped around the old values."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask, check_positive, check_shape


def value_loss(
    value: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_value: Tensor | None = None,
    clip_value: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute half the squared error of values, the larger of the plain and the clipped one.

    With ``v = clip(value, old_value - clip_value, old_value + clip_value)``::

        loss = max((value - returns) ** 2, (v - returns) ** 2) / 2

    (https://arxiv.org/abs/2005.12729, section 3; used by https://arxiv.org/abs/2203.02155).

    Args:
        value: ``[N, S]`` floating, under the value network being trained.
        returns: ``[N, S]`` floating targets, constants.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        old_value: ``[N, S]`` floating, under the network before its updates; needed to clip.
        clip_value: Largest change of the value that can lower the loss, in units of return;
            ``None`` for the plain error.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens, and whether the value is further than
        ``clip_value`` from the old one, ``[N, S]`` bool.

    Examples:
        >>> value, returns = torch.tensor([[1.0]]), torch.tensor([[2.0]])
        >>> mask = torch.tensor([[True]])
        >>> value_loss(value, returns, mask, old_value=torch.tensor([[0.0]]), clip_value=0.5)
        (tensor([[1.1250]]), tensor([[True]]))
    """
    check_mask("mask", mask, value.shape)
    check_shape("returns", returns, value.shape)
    returns = torch.where(mask, returns.float(), 0.0)
    value = torch.where(mask, value.float(), 0.0)
    error = (value - returns).square()
    if clip_value is None:
        return 0.5 * error, torch.zeros_like(mask)
    check_positive("clip_value", clip_value)
    if old_value is None:
        raise ValueError(f"old_value must be given with clip_value={clip_value}, got None.")
    check_shape("old_value", old_value, value.shape)
    old_value = torch.where(mask, old_value.float(), 0.0)
    change = value - old_value
    bounded = old_value + change.clamp(-clip_value, clip_value)
    loss = 0.5 * torch.maximum(error, (bounded - returns).square())
    return loss, change.detach().abs() > clip_value
