"""GSPO: one length-normalised importance ratio per sequence, clipped as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_shape
from torchrl_mt.objectives.functional.importance import log_ratio, ratio_of, sequence_mean
from torchrl_mt.objectives.functional.policy.ppo import pessimistic


def gspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (3e-4, 4e-4),
    *,
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Group sequence policy optimisation (https://arxiv.org/abs/2507.18071, eq. 5 to 7).

    With ``s`` the geometric mean of the ratios of a sequence's sampled tokens::

        s = exp(mean over the sequence of (log_prob - old_log_prob))
        loss = -min(s * A, clip(s, 1 - low, 1 + high) * A)    on each of its tokens

    A sequence is a row, or with ``turns`` a turn of a row. The paper's loss has one advantage per
    sequence and the aggregation ``"seq_mean_token_mean"`` over rows.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``, or a number for both; the paper's are small because mean
            log-ratios are.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        Loss per token, and clip sides of each token's sequence, as of :func:`ppo`.

    Examples:
        >>> log_prob, old = torch.tensor([[0.1, -0.1]]), torch.zeros(1, 2)
        >>> gspo(log_prob, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))[0]
        tensor([[-1., -1.]])
    """
    check_shape("advantage", advantage, log_prob.shape)
    ratio = ratio_of(sequence_mean(log_ratio(log_prob, old_log_prob, mask), mask, turns))
    advantage = torch.where(mask, advantage.float(), 0.0)
    return pessimistic(ratio, advantage, clip_epsilon)


def gspo_token(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (3e-4, 4e-4),
    *,
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GSPO-token: the value of GSPO, with each token's gradient weighted by its own advantage.

    With ``s`` as for :func:`gspo` and ``sg`` the stop-gradient (https://arxiv.org/abs/2507.18071,
    eq. 13 and 14)::

        s_t = sg(s) * exp(log_prob - sg(log_prob))
        loss = -min(s_t * A, clip(s_t, 1 - low, 1 + high) * A)

    With one advantage per sequence, the loss and gradient summed over it are those of :func:`gspo`.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``, or a number for both.
        turns: See :func:`gspo`.

    Returns:
        As :func:`gspo`.

    Examples:
        >>> log_prob = torch.zeros(1, 2, requires_grad=True)
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> gspo_token(log_prob, torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]), mask)[0].sum().backward()
        >>> log_prob.grad
        tensor([[-1., -3.]])
    """
    check_shape("advantage", advantage, log_prob.shape)
    ratio = ratio_of(sequence_mean(log_ratio(log_prob, old_log_prob, mask), mask, turns)).detach()
    own = torch.where(mask, log_prob.float(), 0.0)
    advantage = torch.where(mask, advantage.float(), 0.0)
    return pessimistic(ratio * (own - own.detach()).exp(), advantage, clip_epsilon)
