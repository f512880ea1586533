"""VESPO: a smooth weight on a sequence's whole importance ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_positive, check_shape
from torchrl_mt.objectives.functional.importance import log_ratio, ratio_of, sequence_sum


def vespo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: tuple[float, float] | None = None,
    *,
    shape_pos: tuple[float, float] = (2.0, 3.0),
    shape_neg: tuple[float, float] = (3.0, 2.0),
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Variational sequence-level soft policy optimisation (https://arxiv.org/abs/2602.10693).

    With ``w`` the product of a sequence's ratios ``exp(log_prob - old_log_prob)``, not shortened by its
    length, ``(a, b)`` the shape for the advantage's sign and ``sg`` the stop-gradient::

        phi  = w ** a * exp(b * (1 - w))    1 at w = 1, near 0 far from there
        loss = -sg(phi) * A * log_prob

    A sequence is a row, or with ``turns`` a turn of a row.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating; in the paper one for each sequence.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: Ignored.
        shape_pos: ``(a, b)`` for advantages of 0 or more, both above 0.
        shape_neg: ``(a, b)`` for negative ones.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens, and clip sides, all 0.

    Examples:
        >>> log_prob = torch.tensor([[0.0, 0.5]], requires_grad=True)
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> vespo(log_prob, torch.zeros(1, 2), torch.ones(1, 2), mask)[0].sum().backward()
        >>> log_prob.grad
        tensor([[-0.3882, -0.3882]])
    """
    check_shape("advantage", advantage, log_prob.shape)
    for name, shape in (("shape_pos", shape_pos), ("shape_neg", shape_neg)):
        for value in shape:
            check_positive(name, value)
    difference = log_ratio(log_prob, old_log_prob, mask).detach()
    ratio = ratio_of(sequence_sum(difference, mask, turns))
    advantage = torch.where(mask, advantage.float(), 0.0)
    a, b = (torch.where(advantage >= 0, *pair) for pair in zip(shape_pos, shape_neg, strict=True))
    phi = (a * ratio.log() + b * (1.0 - ratio)).exp()
    loss = -phi * advantage * torch.where(mask, log_prob.float(), 0.0)
    return loss, torch.zeros_like(mask, dtype=torch.int8)
