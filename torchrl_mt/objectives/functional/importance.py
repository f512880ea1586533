"""Importance ratios of tokens and sequences, and their effective sample size.

Masked tokens are never read. Ratios in a loss are clamped to exp(±20), so that one extreme token cannot
make the loss or its gradient infinite. A sequence is a row, or a turn of a row if turn ids are given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask, check_shape
from torchrl_mt.objectives.functional.kl import MAX_LOG_RATIO
from torchrl_mt.objectives.functional.time.episodes import index_turns

MAX_RATIO = math.exp(MAX_LOG_RATIO)
"""Largest ratio."""


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Compute ``log_prob - old_log_prob``, ``[N, S]`` float32, zero on masked tokens."""
    check_mask("mask", mask, log_prob.shape)
    check_shape("old_log_prob", old_log_prob, log_prob.shape)
    return torch.where(mask, log_prob.float() - old_log_prob.float(), 0.0)


def sampler_log_ratio(old_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Compute the :func:`log_ratio` of the old policy to the sampler, without gradient."""
    check_shape("sampler_log_prob", sampler_log_prob, old_log_prob.shape)
    return log_ratio(old_log_prob, sampler_log_prob, mask).detach()


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Exponentiate a log-ratio clamped to ±20, beyond which the gradient is 0.

    Examples:
        >>> ratio_of(torch.tensor([0.0, 1000.0])).isfinite()
        tensor([True, True])
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()


def sequence_sum(per_token: Tensor, mask: Tensor, turns: Tensor | None = None) -> Tensor:
    """Sum over each sequence's sampled tokens, repeated on them.

    Args:
        per_token: ``[N, S]`` floating; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token, if a sequence is a turn; by default a row.

    Returns:
        ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> mask = torch.tensor([[True, True, False, True]])
        >>> sequence_sum(torch.ones(1, 4), mask)
        tensor([[3., 3., 0., 3.]])
        >>> sequence_sum(torch.ones(1, 4), mask, torch.tensor([[0, 0, 1, 1]]))
        tensor([[2., 2., 0., 1.]])
    """
    return _sums(mask, turns, per_token)[0]


def sequence_mean(per_token: Tensor, mask: Tensor, turns: Tensor | None = None) -> Tensor:
    """Mean over each sequence's sampled tokens, repeated on them.

    Args:
        per_token: ``[N, S]`` floating; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: See :func:`sequence_sum`.

    Returns:
        ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> mask = torch.tensor([[True, True, False]])
        >>> sequence_mean(torch.tensor([[1.0, 3.0, 9.0]]), mask)
        tensor([[2., 2., 0.]])
    """
    total, count = _sums(mask, turns, per_token, torch.ones_like(per_token))
    return total / count.clamp(min=1)


def _sums(mask: Tensor, turns: Tensor | None, *per_token: Tensor) -> list[Tensor]:
    """Compute :func:`sequence_sum` of several values."""
    check_mask("mask", mask, per_token[0].shape)
    values = [torch.where(mask, x.float(), 0.0) for x in per_token]
    if turns is None:
        return [torch.where(mask, x.sum(-1, keepdim=True), 0.0) for x in values]
    check_shape("turns", turns, mask.shape)
    index = index_turns(mask, turns)
    return [index.write(index.total(x)) for x in values]


def effective_sample_size(weight: Tensor, mask: Tensor) -> Tensor:
    """Effective sample size of weighted tokens, as a share of the sampled tokens.

    Kish's ``(sum w) ** 2 / (M * sum w ** 2)`` over the ``M`` sampled tokens (Kish, 1965, "Survey
    sampling"): 1 if all weights are equal, near 0 if few tokens have all the weight.

    Args:
        weight: ``[N, S]`` floating, not negative; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.

    Returns:
        Scalar float32 in [0, 1]; 0 if nothing is sampled.

    Examples:
        >>> mask = torch.ones(1, 4, dtype=torch.bool)
        >>> effective_sample_size(torch.tensor([[0.0, 2.0, 0.0, 2.0]]), mask)
        tensor(0.5000)
    """
    check_mask("mask", mask, weight.shape)
    weight = torch.where(mask, weight.float(), 0.0)
    # The result does not depend on the scale; unscaled, squares of large weights overflow.
    scale = weight.max() if weight.numel() else weight.sum()
    weight = weight / torch.where(scale > 0, scale, 1.0)
    count = mask.count_nonzero().clamp(min=1)
    return weight.sum().square() / (count * weight.square().sum()).clamp(min=1e-30)


def clip_side(ratio: Tensor, low: float, high: float) -> Tensor:
    """Side of the bounds that each ratio is on: int8, -1 below, 1 above, 0 within."""
    return (ratio - ratio.clamp(low, high)).sign_().to(torch.int8)
