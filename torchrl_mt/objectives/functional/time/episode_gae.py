"""Generalised advantage estimation over whole episodes, through all the rows that forks made of them.

How an episode was cut into rows changes nothing: what it earned at its end reaches the tokens of its
earlier rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_gae, check_shape
from torchrl_mt.objectives.functional.time.episodes import index_episodes
from torchrl_mt.objectives.functional.time.recurrence import (
    accumulation_dtype,
    reverse_linear_recurrence,
)
from torchrl_mt.objectives.functional.time.sampled import rewards_on_sampled


def episode_gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    turns: Tensor,
    gamma: float,
    lmbda: float,
    *,
    episode: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimate of every sampled token over its whole episode.

    The recursion of :func:`masked_gae` (https://arxiv.org/abs/1506.02438) over each episode's sampled
    tokens in the order in which they were sampled: by turn, and by position within a turn. A reward
    on a masked token belongs to the last sampled token before it in its row, or to the row's first.

    Args:
        reward: ``[N, S]`` floating.
        value: ``[N, S]`` floating; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        gamma: Discount per sampled token, in [0, 1].
        lmbda: Trace decay per sampled token, in [0, 1].
        episode: ``[N]`` int64 episode id of each row: the rows of one episode are one sequence of
            tokens. Without it every row stands alone.

    Returns:
        Advantage and return (advantage + value), ``[N, S]`` float32, zero on masked tokens.

    Raises:
        ValueError: If shapes differ, a discount is out of range, or a sampled token has no turn.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> mask = torch.tensor([[True, True], [False, True]])
        >>> turns, episode = torch.tensor([[0, 0], [1, 1]]), torch.tensor([7, 7])
        >>> reward, value = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 2)
        >>> episode_gae(reward, value, mask, turns, gamma=1.0, lmbda=0.5, episode=episode)[0]
        tensor([[0.2500, 0.5000],
                [0.0000, 1.0000]])
    """
    check_gae(reward, value, mask, gamma=gamma, lmbda=lmbda)
    check_shape("turns", turns, reward.shape)
    index = index_episodes(mask, turns, episode)
    dtype = accumulation_dtype(reward.device)
    earned = rewards_on_sampled(reward, mask, dtype=dtype).flatten()[index.token]
    at_token = value.flatten()[index.token].to(dtype)
    ends = index.ends()
    next_value = torch.nn.functional.pad(at_token[1:], (0, min(1, len(at_token))))
    delta = earned + torch.where(ends, 0.0, gamma * next_value) - at_token
    decay = torch.where(ends, 0.0, gamma * lmbda).to(dtype)
    longest = int(torch.bincount(index.of_token, minlength=1).max())
    advantage = reverse_linear_recurrence(delta, decay, longest=longest)
    return index.write(advantage.float()), index.write((advantage + at_token).float())
