"""Whitening over all values under a mask, tokens or rows.

Finite for all finite values: equal ones, a single one and none give 0. NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask
from torchrl_mt.objectives.functional.moments import Moments, masked_moments
from torchrl_mt.objectives.functional.time.sampled import only_sampled_


def masked_whiten(
    x: Tensor,
    mask: Tensor,
    *,
    weight: Tensor | None = None,
    moments: Moments | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """Whiten the values under a mask: ``(x - mean) / (std + eps)``, std unbiased.

    The global advantage normalisation of REINFORCE++ (https://arxiv.org/abs/2501.03262), with ``x``
    the token advantages of the whole batch.

    Args:
        x: Floating, any shape; not read where ``mask`` is false.
        mask: Bool, the same shape.
        weight: The same shape: how often each value counts in the statistics, 0 or a number of at
            least 1.
        moments: The statistics, by default those of ``x``. Give the full batch's (:class:`Moments`
            merge) when ``x`` is a shard of it.
        eps: Added to the standard deviation.

    Returns:
        float32, zero where ``mask`` is false and where the statistics have no spread.

    Raises:
        ValueError: If shapes differ.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> advantage = torch.tensor([[1.0, 7.0], [3.0, 5.0]])
        >>> mask = torch.tensor([[True, False], [True, True]])
        >>> masked_whiten(advantage, mask)
        tensor([[-1.,  0.],
                [ 0.,  1.]])
    """
    check_mask("mask", mask, x.shape)
    if moments is None:
        moments = masked_moments(x, mask, weight=weight)
    x = x if x.dtype is torch.float64 else x.float()
    if x.requires_grad:
        # What is not read must not meet the slope of the spread either: 0 times NaN is NaN.
        x = torch.where(mask, x, 0.0)
    # The mean of large values of little spread needs more digits than the values have; and halves
    # are at most as far apart as the largest number.
    mean = (0.5 * moments.mean).to(x.dtype)
    rest = (0.5 * moments.mean - mean).to(x.dtype)
    whitened = (0.5 * x).sub_(mean).sub_(rest).mul_(2.0 / (moments.std + eps))
    return only_sampled_(whitened, mask & moments.spread).float()
