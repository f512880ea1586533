"""Masked importance sampling: the weight of a token or of a sequence, or 0 outside the bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional.correction_metrics import correction_metrics
from torchrl_mt.objectives.functional.importance import MAX_RATIO, sampler_log_ratio, sequence_sum


@torch.no_grad()
def icepop(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] = (0.5, 5.0),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh each token by ``w = exp(old_log_prob - sampler_log_prob)`` if within bounds, else drop it.

    IcePop, of Ring-1T (https://arxiv.org/abs/2510.18855), also known as token-level masked
    importance sampling.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        bounds: Least and largest ratio that is kept, both included.

    Returns:
        Weights ``[N, S]`` float32 without gradient, zero on masked and on dropped tokens, and
        :func:`~torchrl_mt.objectives.functional.correction_metrics` of them.

    Raises:
        ValueError: If shapes differ or ``bounds`` are not in order.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> old, mask = torch.tensor([[0.4, 2.0]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> icepop(old, torch.zeros(1, 2), mask)[0]
        tensor([[0., 2.]])
    """
    ratio = sampler_log_ratio(old_log_prob, sampler_log_prob, mask).exp()
    return keep_within(ratio, ratio, mask, bounds)


@torch.no_grad()
def sequence_mis(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] = (0.0, 2.0),
    turns: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh each sequence by the product of its tokens' ratios if within bounds, else drop it.

    From Liu et al., 2025, "When speed kills stability" (https://richardli.xyz/rl-collapse). A
    sequence is a row, or with ``turns`` a turn of a row.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        bounds: Least and largest product that is kept, both included; the source has no least.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        As :func:`icepop`; the tokens of a sequence have one weight.

    Raises:
        ValueError: If shapes differ, ``bounds`` are not in order or a sampled token has no turn.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> old = torch.tensor([[0.5, 2.0], [2.0, 2.0]]).log()
        >>> sequence_mis(old, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool))[0]
        tensor([[1., 1.],
                [0., 0.]])
    """
    difference = sampler_log_ratio(old_log_prob, sampler_log_prob, mask)
    ratio = sequence_sum(difference, mask, turns).exp()
    return keep_within(ratio, ratio, mask, bounds)


def keep_within(
    weight: Tensor, ratio: Tensor, mask: Tensor, bounds: tuple[float, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Keep the weights whose ratio lies within bounds, both included; the others become 0.

    Args:
        weight: ``[N, S]`` float32; cut off at exp(20).
        ratio: ``[N, S]`` float32, infinite where it overflows.
        mask: ``[N, S]`` bool, true on sampled tokens.
        bounds: Least and largest ratio.

    Returns:
        Weights ``[N, S]``, zero on masked tokens too, and
        :func:`~torchrl_mt.objectives.functional.correction_metrics` of them.

    Raises:
        ValueError: If ``bounds`` are not in order.
    """
    low, high = bounds
    if not 0.0 <= low <= high:
        raise ValueError(f"bounds must be (low, high) with 0 <= low <= high, got {bounds}.")
    kept = mask & (ratio >= low) & (ratio <= high)
    weight = torch.where(kept, weight.clamp(max=MAX_RATIO), 0.0)
    return weight, correction_metrics(weight, mask, torch.zeros_like(mask))
