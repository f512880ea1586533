"""Generalised advantage estimation over a row's sampled tokens, wherever they lie.

A masked-out token takes no time: gamma and lambda count sampled tokens, and the next value of a
token is that of the next sampled one, however many environment tokens lie in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_gae
from torchrl_mt.objectives.functional.time.recurrence import (
    accumulation_dtype,
    from_the_end_,
    sampled_so_far,
)
from torchrl_mt.objectives.functional.time.sampled import first_sampled_token, only_sampled_


def masked_gae(
    reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lmbda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimate of every sampled token.

    Over a row's sampled tokens ``i`` (Schulman et al., 2016, https://arxiv.org/abs/1506.02438)::

        delta[i] = r[i] + gamma * V[i + 1] - V[i]
        A[i]     = delta[i] + gamma * lmbda * A[i + 1]

    with ``V = A = 0`` after the last one. A reward on a masked token belongs to the last sampled
    token before it, or to the row's first sampled token if none is before.

    Args:
        reward: ``[..., S]`` floating.
        value: ``[..., S]`` floating; not read on masked tokens.
        mask: ``[..., S]`` bool, true on sampled tokens; holes and padding may lie anywhere.
        gamma: Discount per sampled token, in [0, 1].
        lmbda: Trace decay per sampled token, in [0, 1].

    Returns:
        Advantage and return (advantage + value), ``[..., S]`` float32, zero on masked tokens.

    Raises:
        ValueError: If shapes differ or a discount is out of range.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> reward = torch.tensor([[0.0, 0.0, 1.0]])
        >>> value = torch.tensor([[0.5, 9.0, 0.5]])
        >>> mask = torch.tensor([[True, False, True]])
        >>> advantage, returns = masked_gae(reward, value, mask, gamma=1.0, lmbda=0.5)
        >>> advantage, returns
        (tensor([[0.2500, 0.0000, 0.5000]]), tensor([[0.7500, 0.0000, 1.0000]]))
    """
    check_gae(reward, value, mask, gamma=gamma, lmbda=lmbda)
    if not mask.numel():
        return reward.float(), reward.float()
    count = sampled_so_far(mask)
    value = only_sampled_(value.to(torch.float32, copy=True), mask)
    # In float64 to the end: of large values and small rewards a difference is left. The last
    # position comes first, and all is turned around while the numbers are small in memory.
    x = reward.float().flip(-1).to(accumulation_dtype(reward.device), copy=True)
    share = gamma * (1.0 - lmbda)
    if share:
        # The lambda-return is R[i] = r[i] + share * V[i + 1] + gamma * lmbda * R[i + 1]: each value
        # but a row's first counts at the sampled token before it, the owner of what stands there.
        later = value.scatter(-1, first_sampled_token(mask)[0], 0.0).flip(-1)
        x[..., 1:].add_(later[..., :-1], alpha=share)
    lambda_return = from_the_end_(x, mask, count, gamma * lmbda)
    returns = only_sampled_(lambda_return.to(torch.float32).flip(-1), mask)
    lambda_return.sub_(value.flip(-1))
    return only_sampled_(lambda_return.to(torch.float32).flip(-1), mask), returns
