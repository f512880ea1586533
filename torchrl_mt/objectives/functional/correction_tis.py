"""Truncated importance sampling: the weight of a token or of a sequence, but no more than a cap."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_positive
from torchrl_mt.objectives.functional.correction_metrics import correction_metrics
from torchrl_mt.objectives.functional.importance import MAX_RATIO, sampler_log_ratio, sequence_sum


@torch.no_grad()
def token_tis(
    old_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor, *, cap: float = 2.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh each token by ``min(w, cap)``, with ``w = exp(old_log_prob - sampler_log_prob)``.

    From Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (https://fengyao.notion.site/off-policy-rl).

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        cap: Largest weight.

    Returns:
        Weights ``[N, S]`` float32 without gradient, zero on masked tokens, and
        :func:`~torchrl_mt.objectives.functional.correction_metrics` of them.

    Raises:
        ValueError: If shapes differ or ``cap`` is not positive.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> old, mask = torch.tensor([[0.5, 9.0]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> token_tis(old, torch.zeros(1, 2), mask)[0]
        tensor([[0.5000, 2.0000]])
    """
    return _truncate(sampler_log_ratio(old_log_prob, sampler_log_prob, mask), mask, cap)


@torch.no_grad()
def sequence_tis(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    turns: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh each sequence by ``min(w, cap)``, ``w`` being the product of its tokens' ratios.

    From Liu et al., 2025, "When speed kills stability" (https://richardli.xyz/rl-collapse). A
    sequence is a row, or with ``turns`` a turn of a row.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        cap: Largest weight.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        As :func:`token_tis`; the tokens of a sequence have one weight.

    Raises:
        ValueError: If shapes differ, ``cap`` is not positive or a sampled token has no turn.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> old, mask = torch.tensor([[0.5, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> sequence_tis(old, torch.zeros(1, 2), mask)[0]
        tensor([[0.2500, 0.2500]])
    """
    difference = sampler_log_ratio(old_log_prob, sampler_log_prob, mask)
    return _truncate(sequence_sum(difference, mask, turns), mask, cap)


def _truncate(log_weight: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Cut weights off at the cap."""
    check_positive("cap", cap)
    ratio = log_weight.exp()
    weight = torch.where(mask, ratio.clamp(max=min(cap, MAX_RATIO)), 0.0)
    return weight, correction_metrics(weight, mask, ratio > cap)
