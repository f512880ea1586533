"""Generalised advantage estimates over whole episodes, through all the rows that forks made of them.

How an episode was cut into rows changes nothing: what it earned at its end reaches the turns of its
earlier rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.episode_time import EpisodeTime
from torchrl_mt.objectives.functional import group_advantage, masked_gae, rewards_on_sampled


def episode_gae(
    reward: Tensor,
    value: Tensor,
    time: EpisodeTime,
    gamma: float,
    lmbda: float,
    *,
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages over each episode's sampled tokens, or over its turns.

    :func:`~torchrl_mt.objectives.functional.masked_gae` on each episode's sampled tokens in the order
    in which they were sampled. With ``turns`` a turn is one step of it: its value is that at its first
    sampled token, its reward the sum over its tokens, and all of its tokens get its advantage.

    Args:
        reward: ``[N, S]`` floating. As everywhere, a reward on a masked token belongs to the last
            sampled token before it in its row.
        value: ``[N, S]`` floating: of the state before each sampled token.
        time: The rows' episodes.
        gamma: Discount per sampled token, or per turn with ``turns``, in [0, 1].
        lmbda: Trace decay, per the same.
        turns: ``[N, S]`` int64 turn id of each token.

    Returns:
        Advantage and return (advantage + value), ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> from torchrl_mt.objectives.episode_time import order_episodes
        >>> mask = torch.tensor([[True, True], [False, True]])
        >>> time = order_episodes(mask, torch.tensor([[0, 0], [1, 1]]), torch.tensor([7, 7]))
        >>> reward = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
        >>> episode_gae(reward, torch.zeros(2, 2), time, gamma=1.0, lmbda=0.5)[0]
        tensor([[0.2500, 0.5000],
                [0.0000, 1.0000]])
    """
    reward, value = (time.gather(x.float()) for x in (rewards_on_sampled(reward, time.mask), value))
    mask = time.table_mask
    if turns is None or not mask.numel():
        advantage, returns = masked_gae(reward, value, mask, gamma, lmbda)
        return time.scatter(advantage), time.scatter(returns)
    turn = time.gather(turns)
    opens = mask.clone()
    opens[:, 1:] &= turn[:, 1:] != turn[:, :-1]
    # To a mask of the opening tokens a turn's other tokens are masked ones, whose rewards are its own.
    estimates = masked_gae(reward, value, opens, gamma, lmbda)
    position = torch.arange(mask.shape[1], device=mask.device)
    opening = torch.where(opens, position, 0).cummax(-1).values
    advantage, returns = (time.scatter(each.gather(-1, opening)) for each in estimates)
    return advantage, returns


def whiten(advantage: Tensor, mask: Tensor) -> Tensor:
    """Normalise advantages over all sampled tokens of the batch.

    Args:
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens.

    Returns:
        ``[N, S]`` float32 of mean 0 and standard deviation 1, zero on masked tokens; all zero if
        there is one token, or all are equal.

    Examples:
        >>> whiten(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]]))
        tensor([[-0.7071,  0.0000,  0.7071]])
    """
    values = advantage[mask].float()
    batch = torch.zeros_like(values, dtype=torch.long)
    out = torch.zeros_like(advantage, dtype=torch.float32)
    return out.masked_scatter(mask, group_advantage(values, batch, "batch"))
