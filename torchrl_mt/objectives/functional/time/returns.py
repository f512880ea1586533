"""Discounted returns, counted in sampled tokens or in turns, and returns compared turn by turn.

Dropping all masked-out tokens of a row, once their rewards have gone to their owners, changes
nothing.
"""

from __future__ import annotations

from torch import Tensor

from torchrl_mt.checks import check_mask, check_unit_interval
from torchrl_mt.objectives.functional.group import group_advantage
from torchrl_mt.objectives.functional.time.episodes import index_turns
from torchrl_mt.objectives.functional.time.recurrence import (
    accumulation_dtype,
    reverse_linear_recurrence,
    sampled_recurrence,
)
from torchrl_mt.objectives.functional.time.sampled import rewards_on_sampled


def masked_returns(reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted return-to-go ``G[i] = r[i] + gamma * G[i + 1]`` over a row's sampled tokens ``i``.

    A reward on a masked token belongs to the last sampled token before it, or to the row's first
    sampled token if none is before; a row without sampled tokens has zeros.

    Args:
        reward: ``[..., S]`` floating.
        mask: ``[..., S]`` bool, true on sampled tokens; holes and padding may lie anywhere.
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
    return sampled_recurrence(reward, mask, gamma)


def turn_returns(
    reward: Tensor,
    mask: Tensor,
    turns: Tensor,
    gamma: float,
    *,
    episode: Tensor | None = None,
) -> Tensor:
    """Discounted return-to-go of every turn, repeated on the turn's sampled tokens.

    With ``r[u]`` the sum of the rewards that belong to turn ``u`` of the episode::

        G[t] = sum over u >= t of gamma ** (u - t) * r[u]

    The exponent is the difference of turn *ids*: a turn without a sampled token took its time. So a
    turn's discount does not depend on the row that a fork put it in, and where every turn of the
    episode sampled a token the result is that of the plain recurrence over steps.
    A reward on a masked token belongs to the turn of the last sampled token before it, or of the
    row's first sampled token if none is before. So does that of a turn that sampled nothing: it is
    discounted as if the turn that it lies on had earned it. Where this matters, store the returns of
    :class:`~torchrl_mt.transforms.DiscountedReturn`, which are exact for all turns.

    Args:
        reward: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding); ids may skip numbers.
        gamma: Discount per turn, in [0, 1].
        episode: ``[N]`` int64 episode id of each row: the rows of one episode (its forks) are one
            sequence of turns. Without it every row stands alone.

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
    # Equal returns must come out equal whatever the order of the sums: group statistics divide by
    # their spread.
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
    """Normalise per-turn returns among all turns of the batch that have the same turn id.

    ``(G - mean_t) / (std_t + eps)``, the statistics of turn id ``t`` being taken over the batch's
    turns, each counted once however many tokens it has. A turn alone at its id and turns without
    spread get 0: there is nothing to compare them with.

    Args:
        returns: ``[N, S]`` floating: each turn's return, repeated on its sampled tokens (the value
            at a turn's first sampled token is read).
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.
        eps: Added to the standard deviation (unbiased).

    Returns:
        ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> import torch
        >>> returns = torch.tensor([[1.0, 1.0, 5.0], [3.0, 7.0, 0.0]])
        >>> turns = torch.tensor([[0, 0, 1], [0, 1, -1]])
        >>> turn_normalize(returns, turns >= 0, turns)
        tensor([[-0.7071, -0.7071, -0.7071],
                [ 0.7071,  0.7071,  0.0000]])
    """
    check_mask("mask", mask, returns.shape)
    index = index_turns(mask, turns, episode)
    return index.write(group_advantage(index.read(returns), index.turn, "grpo", eps=eps))
