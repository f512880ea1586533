"""Two generalised advantage estimates, one inside the other: over turns, then within each turn.

Credit crosses a turn's end as the advantage of the whole next turn, so its reach does not depend on
how many tokens the turns have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_gae
from torchrl_mt.objectives.functional.time.recurrence import (
    accumulation_dtype,
    reverse_linear_recurrence,
)
from torchrl_mt.objectives.functional.time.sampled import rewards_on_sampled
from torchrl_mt.objectives.functional.time.turn_gae import gae_over_turns
from torchrl_mt.objectives.functional.time.turns import index_turns


def bilevel_gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    turns: Tensor,
    gamma: float,
    lmbda: float,
    *,
    turn_gamma: float,
    turn_lmbda: float,
    episode: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Bi-level generalised advantage estimate of every sampled token.

    Bi-Level GAE of VAGEN (https://arxiv.org/abs/2510.16907). First over turns ``k``, with ``V[k]`` the
    value at the turn's *last* sampled token and ``r[k]`` the sum of the turn's rewards::

        delta[k] = r[k] + turn_gamma * V[k + 1] - V[k]
        A[k]     = delta[k] + turn_gamma * turn_lmbda * A[k + 1]

    then over the sampled tokens ``i`` of each turn, from its last one, ``J``, back::

        A[k, J]  = A[k]
        A[k, i]  = r[k, i] + gamma * V[k, i + 1] - V[k, i] + gamma * lmbda * A[k, i + 1]

    The paper has a turn's reward on its last token. What a turn earns earlier (a penalty per token)
    counts for the turns before it as part of ``r[k]``, and within the turn at its own token only: it
    is taken out of ``A[k, J]``, which comes after it.
    Where turn ids skip numbers, ``turn_gamma`` is raised to their difference. A reward on a masked
    token belongs to the last sampled token before it, or to the row's first sampled token.

    Args:
        reward: ``[N, S]`` floating.
        value: ``[N, S]`` floating; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        gamma: Discount per sampled token within a turn, in [0, 1].
        lmbda: Trace decay per sampled token within a turn, in [0, 1].
        turn_gamma: Discount per turn, in [0, 1].
        turn_lmbda: Trace decay per turn, in [0, 1].
        episode: ``[N]`` int64 episode id of each row: the rows of one episode are one sequence of
            turns. Without it every row stands alone.

    Returns:
        Advantage and return (advantage + value), ``[N, S]`` float32, zero on masked tokens.

    Raises:
        ValueError: If shapes differ, a discount is out of range, or a sampled token has no turn.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> reward = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
        >>> mask = torch.tensor([[True, True, False, True, True]])
        >>> turns = torch.tensor([[0, 0, 1, 1, 1]])
        >>> value = torch.zeros(1, 5)
        >>> bilevel_gae(reward, value, mask, turns, 1.0, 0.5, turn_gamma=0.9, turn_lmbda=1.0)[0]
        tensor([[0.4500, 0.9000, 0.0000, 0.5000, 1.0000]])
    """
    check_gae(
        reward,
        value,
        mask,
        gamma=gamma,
        lmbda=lmbda,
        turn_gamma=turn_gamma,
        turn_lmbda=turn_lmbda,
    )
    index = index_turns(mask, turns, episode)
    zeros = torch.zeros_like(mask, dtype=torch.float32)
    if not index.of_token.numel():
        return zeros, zeros.clone()
    dtype = accumulation_dtype(reward.device)
    reward = rewards_on_sampled(reward, mask, dtype=dtype)
    earned = index.total(reward)
    at_end = value.flatten()[index.last_token].to(dtype)
    of_turn = gae_over_turns(index, earned, at_end, turn_gamma, turn_lmbda)

    order = torch.argsort(index.of_token, stable=True)
    turn = index.of_token[order]
    reward, at_token = reward[mask][order], value[mask][order].to(dtype)
    ends = torch.ones_like(turn, dtype=torch.bool)
    ends[:-1] = turn[1:] != turn[:-1]
    next_value = torch.nn.functional.pad(at_token[1:], (0, 1))
    delta = torch.where(
        ends,
        of_turn[turn] - (earned[turn] - reward),
        reward + gamma * next_value - at_token,
    )
    decay = torch.where(ends, 0.0, gamma * lmbda).to(dtype)
    longest = int(torch.bincount(turn).max())
    in_order = reverse_linear_recurrence(delta, decay, longest=longest)
    advantage = torch.empty_like(in_order).scatter(0, order, in_order)
    returns = advantage + value[mask].to(dtype)
    return (
        zeros.masked_scatter(mask, advantage.float()),
        zeros.masked_scatter(mask, returns.float()),
    )
