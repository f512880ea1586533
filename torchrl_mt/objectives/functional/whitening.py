"""Moments of masked values, and whitening by them.

The merged moments of shards are those of the batch, in any order and for any cut. Finite values give
finite results: 0 if they are equal, a single one or none. NaN stays NaN.
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
    """Statistics of a set of values; scalars, float64 where the device has it."""

    count: Tensor
    """Number of values, or the sum of their weights."""
    mean: Tensor
    """Mean; 0 without values."""
    m2: Tensor
    """Sum of squared distances from the mean."""
    low: Tensor
    """Lowest value; infinity without values."""
    high: Tensor
    """Highest value; minus infinity without values."""

    @property
    def spread(self) -> Tensor:
        """Whether two values differ or one is NaN: bool, compared exactly."""
        return ~(self.low >= self.high)

    @property
    def std(self) -> Tensor:
        """Unbiased standard deviation; 1 without spread, where its slope would be infinite."""
        variance = self.m2 / (self.count - 1).clamp(min=1)
        return torch.where(self.spread, variance, torch.ones_like(variance)).sqrt()

    def merge(self, other: Moments) -> Moments:
        """Compute the moments of both sets together.

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
        weight: The same shape: how often each value counts, 0 or at least 1.

    Returns:
        The moments.

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
    # Relative to one of the values: exact if all are equal, and small if all are large.
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

    With ``x`` the token advantages of the whole batch, this is REINFORCE++'s global advantage
    normalisation (https://arxiv.org/abs/2501.03262).

    Args:
        x: Floating, any shape; not read where ``mask`` is false.
        mask: Bool, the same shape.
        weight: The same shape: how often each value counts in the statistics, 0 or at least 1.
        moments: The statistics, by default those of ``x``. For a shard, give the full batch's
            (:meth:`Moments.merge`).
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
        # Masked values must not enter the gradient either: 0 times NaN is NaN.
        x = torch.where(mask, x, 0.0)
    # The mean of large, close values needs more digits than the values have: it is subtracted in two
    # parts. Halved, the difference of two values cannot overflow.
    mean = (0.5 * moments.mean).to(x.dtype)
    rest = (0.5 * moments.mean - mean).to(x.dtype)
    whitened = (0.5 * x).sub_(mean).sub_(rest).mul_(2.0 / (moments.std + eps))
    return only_sampled_(whitened, mask & moments.spread).float()
