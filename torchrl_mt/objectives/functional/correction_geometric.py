"""Rejection of whole sequences by the geometric mean of their ratios, whatever their length."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional.correction_mis import keep_within
from torchrl_mt.objectives.functional.importance import sampler_log_ratio, sequence_mean


@torch.no_grad()
def geometric(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] = (0.999, 1.001),
    turns: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Keep sequences whose tokens' ratios have a geometric mean within bounds, at weight 1.

    A product of ratios leaves any bounds as sequences grow; its ``L``-th root does not (Liu et al.,
    2025, "When speed kills stability", https://richardli.xyz/rl-collapse). It rejects without
    weighing: to weigh the rest as well, give
    :class:`~torchrl_mt.objectives.MultiTurnLoss` this and :func:`token_tis`. A sequence is a row, or
    with ``turns`` a turn of a row.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        bounds: Least and largest geometric mean that is kept, both included.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        Weights ``[N, S]`` float32, 1 on tokens of sequences that are kept, else 0, and
        :func:`~torchrl_mt.objectives.functional.correction_metrics` of them.

    Raises:
        ValueError: If shapes differ, ``bounds`` are not in order or a sampled token has no turn.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> old = torch.tensor([[0.5, 2.0], [2.0, 2.0]]).log()
        >>> geometric(old, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool))[0]
        tensor([[1., 1.],
                [0., 0.]])
    """
    difference = sampler_log_ratio(old_log_prob, sampler_log_prob, mask)
    ratio = sequence_mean(difference, mask, turns).exp()
    return keep_within(torch.ones_like(ratio), ratio, mask, bounds)
