"""Moments of the values under a mask, and whitening by them: tokens, rows or rewards.

The moments of a batch are those of its shards merged, in any order and however it was cut. Whitened
values are finite for all finite ones: equal ones, a single one and none give 0. NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask, check_shape
from torchrl_mt.objectives.functional.time.recurrence import accumulation_dtype
from torchrl_mt.objectives.functional.time.sampled import first_sampled_token, only_sampled_


@dataclass(frozen=True)
class Moments:
    """What statistics of a set of values need; scalars, float64 where the device has it."""

    count: Tensor
    """How many values, or the sum of their weights."""
    mean: Tensor
    """Their mean; 0 if there is none."""
    m2: Tensor
    """The sum of their squared distances from the mean."""
    low: Tensor
    """The lowest; infinity if there is none."""
    high: Tensor
    """The highest; minus infinity if there is none."""

    @property
    def spread(self) -> Tensor:
        """Whether two values differ, or one is NaN: bool, from the values, not from rounded sums."""
        return ~(self.low >= self.high)

    @property
    def std(self) -> Tensor:
        """The unbiased standard deviation; 1 without spread, where its slope would be infinite."""
        variance = self.m2 / (self.count - 1).clamp(min=1)
        return torch.where(self.spread, variance, torch.ones_like(variance)).sqrt()

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets together.

        Chan, Golub and LeVeque, 1979, "Updating formulae and a pairwise algorithm for computing
        sample variances".
        """
        count = self.count + other.count
        share = other.count / torch.where(count > 0, count, 1.0)
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * share,
            self.m2 + other.m2 + step.square() * self.count * share,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
        )


def masked_moments(x: Tensor, mask: Tensor, *, weight: Tensor | None = None) -> Moments:
    """Compute the moments of the values under a mask.

    Args:
        x: Floating, any shape; not read where ``mask`` is false.
        mask: Bool, the same shape.
        weight: The same shape: how often each value counts, 0 or a number of at least 1.

    Returns:
        The moments; of no value, if the mask is empty.

    Examples:
        >>> x, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
        >>> moments = masked_moments(x, mask)
        >>> moments.mean.item(), moments.m2.item()
        (2.0, 2.0)
    """
    check_mask("mask", mask, x.shape)
    dtype = accumulation_dtype(x.device)
    if weight is not None:
        check_shape("weight", weight, x.shape)
        mask = mask & (weight > 0)
    if not x.numel():
        zero = torch.zeros((), dtype=dtype, device=x.device)
        return Moments(zero, zero, zero, zero + torch.inf, zero - torch.inf)
    # Distances from one of the values: exact where all are equal, and small where all are large.
    first, some = first_sampled_token(mask.flatten())
    anchor = x.detach().take(first).squeeze(0).to(dtype)
    distance = only_sampled_(x.to(dtype, copy=True).sub_(anchor), mask)
    if weight is None:
        count, weighted = mask.count_nonzero().to(dtype), distance
    else:
        weight = torch.where(mask, weight.to(dtype), 0.0)
        count, weighted = weight.sum(), weight * distance
    offset = weighted.sum() / count.clamp(min=1)
    m2 = torch.dot(weighted.flatten(), distance.flatten()) - count * offset.square()
    low, high = distance.detach().aminmax()
    return Moments(
        count,
        torch.where(some, anchor + offset, 0.0),
        m2.clamp(min=0),
        torch.where(some, anchor + low, torch.inf),
        torch.where(some, anchor + high, -torch.inf),
    )


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
