"""Generalised advantage estimation with the turn as the action: one value, one advantage per turn.

Time counts turns, however many tokens a turn has, and the rows of one episode (its forks) are one
sequence of turns.
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
from torchrl_mt.objectives.functional.time.turns import TurnIndex, index_turns


def turn_gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    turns: Tensor,
    gamma: float,
    lmbda: float,
    *,
    episode: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimate of every turn, repeated on the turn's sampled tokens.

    With ``r[k]`` the sum of the rewards that belong to turn ``k`` and ``V[k]`` the value at its first
    sampled token, which is that of the history up to and including the observation that the turn
    answers (Turn-PPO, https://arxiv.org/abs/2512.17008)::

        delta[k] = r[k] + gamma * V[k + 1] - V[k]
        A[k]     = delta[k] + gamma * lmbda * A[k + 1]

    with ``V = A = 0`` after the episode's last turn. Where turn ids skip numbers, ``gamma`` is raised
    to their difference: a turn without a sampled token took its time. A reward on a masked token
    belongs to the turn of the last sampled token before it, or of the row's first sampled token.

    Args:
        reward: ``[N, S]`` floating.
        value: ``[N, S]`` floating; read at each turn's first sampled token only.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        gamma: Discount per turn, in [0, 1].
        lmbda: Trace decay per turn, in [0, 1].
        episode: ``[N]`` int64 episode id of each row: the rows of one episode are one sequence of
            turns. Without it every row stands alone.

    Returns:
        Advantage and return (advantage + value) of each token's turn, ``[N, S]`` float32, zero on
        masked tokens.

    Raises:
        ValueError: If shapes differ, a discount is out of range, or a sampled token has no turn.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> reward = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
        >>> value = torch.tensor([[0.5, 9.0, 9.0, 0.5]])
        >>> mask = torch.tensor([[True, True, False, True]])
        >>> turns = torch.tensor([[0, 0, 1, 1]])
        >>> advantage, returns = turn_gae(reward, value, mask, turns, gamma=1.0, lmbda=0.5)
        >>> advantage, returns
        (tensor([[0.2500, 0.2500, 0.0000, 0.5000]]), tensor([[0.7500, 0.7500, 0.0000, 1.0000]]))
    """
    check_gae(reward, value, mask, gamma=gamma, lmbda=lmbda)
    index = index_turns(mask, turns, episode)
    dtype = accumulation_dtype(reward.device)
    earned = index.total(rewards_on_sampled(reward, mask, dtype=dtype))
    at_turn = index.read(value).to(dtype)
    advantage = gae_over_turns(index, earned, at_turn, gamma, lmbda)
    return index.write(advantage.float()), index.write((advantage + at_turn).float())


def gae_over_turns(
    index: TurnIndex, reward: Tensor, value: Tensor, gamma: float, lmbda: float
) -> Tensor:
    """Run the recursion over the ``[K]`` rewards and values of the turns of ``index``."""
    discount = index.discount_to_next(gamma)
    next_value = torch.nn.functional.pad(value[1:], (0, min(1, len(value))))
    # Masked, not multiplied by 0: another episode's value may be infinite.
    delta = reward + torch.where(discount == 0, 0.0, discount * next_value) - value
    return reverse_linear_recurrence(delta, discount * lmbda)
