"""Discounted returns over sampled tokens or turns, and their normalisation by turn.

Masked tokens take no time: removing them, once their rewards are on sampled tokens, changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask, check_unit_interval
from torchrl_mt.objectives.functional.group import group_advantage
from torchrl_mt.objectives.functional.time.episodes import index_turns
from torchrl_mt.objectives.functional.time.recurrence import (
    accumulation_dtype,
    from_the_end_,
    reverse_linear_recurrence,
    sampled_so_far,
)
from torchrl_mt.objectives.functional.time.sampled import only_sampled_, rewards_on_sampled


def masked_returns(reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Compute the return-to-go ``G[i] = r[i] + gamma * G[i + 1]`` over a row's sampled tokens ``i``.

    A reward on a masked token moves to the last sampled token before it, or else to the row's first. A
    row without sampled tokens gets zeros.

    Args:
        reward: ``[..., S]`` floating.
        mask: ``[..., S]`` bool, true on sampled tokens.
        gamma: Discount per sampled token, in [0, 1].

    Returns:
        ``[..., S]`` float32, zero on masked tokens.

    Examples:
        >>> import torch
        >>> reward = torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0]])
        >>> mask = torch.tensor([[True, False, False, True, True]])
        >>> masked_returns(reward, mask, gamma=0.5)
        tensor([[1.5000, 0.0000, 0.0000, 1.0000, 2.0000]])
    """
    check_mask("mask", mask, reward.shape)
    check_unit_interval("gamma", gamma)
    if not reward.numel():
        return reward.float()
    dtype = accumulation_dtype(reward.device)
    if gamma == 0.0:
        return rewards_on_sampled(reward, mask, dtype=dtype).float()
    # Flipping is cheaper before the conversion.
    x = reward.flip(-1).to(dtype, copy=True)
    y = from_the_end_(x, mask, sampled_so_far(mask), gamma).to(torch.float32).flip(-1)
    return only_sampled_(y, mask)


def turn_returns(
    reward: Tensor,
    mask: Tensor,
    turns: Tensor,
    gamma: float,
    *,
    episode: Tensor | None = None,
) -> Tensor:
    """Compute the return-to-go of every turn, repeated on its sampled tokens.

    With ``r[u]`` the sum of the rewards of turn ``u`` of the episode::

        G[t] = sum over u >= t of gamma ** (u - t) * r[u]

    The exponent is the difference of turn *ids*: turns without sampled tokens take time, too. A reward
    on a masked token counts for the turn of the last sampled token before it, or else of the row's
    first. So the reward of a turn without sampled tokens is discounted as if that turn had earned it.
    Where this matters, store the returns of :class:`~torchrl_mt.transforms.DiscountedReturn`, which
    are exact for all turns.

    Args:
        reward: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding); ids may skip numbers.
        gamma: Discount per turn, in [0, 1].
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.

    Returns:
        ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> import torch
        >>> reward = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0]])
        >>> mask = torch.tensor([[True, True, False, True, True]])
        >>> turns = torch.tensor([[0, 0, 1, 1, 1]])
        >>> turn_returns(reward, mask, turns, gamma=0.5)
        tensor([[2., 2., 0., 2., 2.]])
    """
    check_mask("mask", mask, reward.shape)
    check_unit_interval("gamma", gamma)
    index = index_turns(mask, turns, episode)
    # Equal returns must come out equal in any order of summation: their spread is a divisor later.
    dtype = accumulation_dtype(reward.device)
    earned = index.total(rewards_on_sampled(reward, mask, dtype=dtype))
    return index.write(reverse_linear_recurrence(earned, index.discount_to_next(gamma)).float())


def turn_normalize(
    returns: Tensor,
    mask: Tensor,
    turns: Tensor,
    *,
    episode: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Compare the return of each turn with the batch's other turns of the same turn id.

    ``(G - mean_t) / (std + eps)``: ``mean_t`` over the turns with id ``t``, and one ``std`` for the
    whole batch, of ``G - mean_t`` over all turns but those alone at their id. Each turn counts once,
    however many tokens it has. A turn alone at its id, and turns of an id with equal returns, get 0.

    One divisor keeps the direction of the policy gradient. A standard deviation for each turn id would
    weight turns with small differences as much as those with large ones; a policy that shares its
    parameters between turns could then get worse.

    Args:
        returns: ``[N, S]`` floating: each turn's return, read at its first sampled token.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.
        eps: Added to the standard deviation (unbiased).

    Returns:
        ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> import torch
        >>> returns = torch.tensor([[1.0, 1.0, 9.0], [3.0, 5.0, 0.0]])
        >>> turns = torch.tensor([[0, 0, 1], [0, 1, -1]])
        >>> turn_normalize(returns, turns >= 0, turns)
        tensor([[-0.5477, -0.5477,  1.0954],
                [ 0.5477, -1.0954,  0.0000]])
    """
    check_mask("mask", mask, returns.shape)
    index = index_turns(mask, turns, episode)
    return index.write(
        group_advantage(index.read(returns), index.turn, "reinforce_baseline", eps=eps)
    )
