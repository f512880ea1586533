"""Generalised advantage estimation over rows, episodes, turns, and tokens within turns.

Masked tokens take no time: a token's next value is that of the next sampled token. The cuts of an
episode into rows change nothing: late rewards reach the tokens of earlier rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask, check_shape, check_unit_interval
from torchrl_mt.objectives.functional.time.episodes import (
    TurnIndex,
    index_episodes,
    index_turns,
    run_ends,
)
from torchrl_mt.objectives.functional.time.recurrence import (
    accumulation_dtype,
    from_the_end_,
    reverse_linear_recurrence,
    sampled_so_far,
)
from torchrl_mt.objectives.functional.time.sampled import (
    first_sampled_token,
    only_sampled_,
    rewards_on_sampled,
)


def masked_gae(
    reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lmbda: float
) -> tuple[Tensor, Tensor]:
    """Compute the generalised advantage estimate of every sampled token.

    Over a row's sampled tokens ``i`` (Schulman et al., 2016, https://arxiv.org/abs/1506.02438)::

        delta[i] = r[i] + gamma * V[i + 1] - V[i]
        A[i]     = delta[i] + gamma * lmbda * A[i + 1]

    with ``V = A = 0`` after the last one. A reward on a masked token moves to the last sampled token
    before it, or else to the row's first.

    Args:
        reward: ``[..., S]`` floating.
        value: ``[..., S]`` floating; not read on masked tokens.
        mask: ``[..., S]`` bool, true on sampled tokens.
        gamma: Discount per sampled token, in [0, 1].
        lmbda: Trace decay per sampled token, in [0, 1].

    Returns:
        Advantage and return (advantage + value), ``[..., S]`` float32, zero on masked tokens.

    Examples:
        >>> reward = torch.tensor([[0.0, 0.0, 1.0]])
        >>> value = torch.tensor([[0.5, 9.0, 0.5]])
        >>> mask = torch.tensor([[True, False, True]])
        >>> advantage, returns = masked_gae(reward, value, mask, gamma=1.0, lmbda=0.5)
        >>> advantage, returns
        (tensor([[0.2500, 0.0000, 0.5000]]), tensor([[0.7500, 0.0000, 1.0000]]))
    """
    _check_gae(reward, value, mask, gamma=gamma, lmbda=lmbda)
    if not mask.numel():
        return reward.float(), reward.float()
    count = sampled_so_far(mask)
    value = only_sampled_(value.to(torch.float32, copy=True), mask)
    # In float64 to the end, because large values cancel. The last position comes first; flipping is
    # cheaper before the conversion.
    x = reward.float().flip(-1).to(accumulation_dtype(reward.device), copy=True)
    share = gamma * (1.0 - lmbda)
    if share:
        # The lambda-return is R[i] = r[i] + share * V[i + 1] + gamma * lmbda * R[i + 1]: each value
        # but a row's first is added at the position before it, which belongs to token i.
        later = value.scatter(-1, first_sampled_token(mask)[0], 0.0).flip(-1)
        x[..., 1:].add_(later[..., :-1], alpha=share)
    lambda_return = from_the_end_(x, mask, count, gamma * lmbda)
    returns = only_sampled_(lambda_return.to(torch.float32).flip(-1), mask)
    lambda_return.sub_(value.flip(-1))
    return only_sampled_(lambda_return.to(torch.float32).flip(-1), mask), returns


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
    """Compute the generalised advantage estimate of every sampled token over its whole episode.

    The recursion of :func:`masked_gae` (https://arxiv.org/abs/1506.02438) over each episode's sampled
    tokens, by turn and by position within a turn. A reward on a masked token moves to the last sampled
    token before it in the row, or else to the row's first.

    Args:
        reward: ``[N, S]`` floating.
        value: ``[N, S]`` floating; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        gamma: Discount per sampled token, in [0, 1].
        lmbda: Trace decay per sampled token, in [0, 1].
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.

    Returns:
        Advantage and return (advantage + value), ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> mask = torch.tensor([[True, True], [False, True]])
        >>> turns, episode = torch.tensor([[0, 0], [1, 1]]), torch.tensor([7, 7])
        >>> reward, value = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 2)
        >>> episode_gae(reward, value, mask, turns, gamma=1.0, lmbda=0.5, episode=episode)[0]
        tensor([[0.2500, 0.5000],
                [0.0000, 1.0000]])
    """
    _check_gae(reward, value, mask, gamma=gamma, lmbda=lmbda)
    check_shape("turns", turns, reward.shape)
    index = index_episodes(mask, turns, episode)
    dtype = accumulation_dtype(reward.device)
    earned = rewards_on_sampled(reward, mask, dtype=dtype).flatten()[index.token]
    at_token = value.flatten()[index.token].to(dtype)
    delta = earned + torch.where(run_ends(index.of_token), 0.0, gamma * _next(at_token)) - at_token
    advantage = _within_runs(delta, index.of_token, gamma * lmbda)
    return index.write(advantage.float()), index.write((advantage + at_token).float())


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
    """Compute the generalised advantage estimate of every turn, repeated on its sampled tokens.

    With ``r[k]`` the sum of turn ``k``'s rewards and ``V[k]`` the value at its first sampled token,
    that is of the history up to the observation that the turn answers (Turn-PPO,
    https://arxiv.org/abs/2512.17008)::

        delta[k] = r[k] + gamma * V[k + 1] - V[k]
        A[k]     = delta[k] + gamma * lmbda * A[k + 1]

    with ``V = A = 0`` after the episode's last turn. Where turn ids skip numbers, ``gamma`` is raised
    to their difference: turns without sampled tokens take time, too. A reward on a masked token counts
    for the turn of the last sampled token before it, or else of the row's first.

    Args:
        reward: ``[N, S]`` floating.
        value: ``[N, S]`` floating; read at each turn's first sampled token only.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        gamma: Discount per turn, in [0, 1].
        lmbda: Trace decay per turn, in [0, 1].
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.

    Returns:
        Advantage and return (advantage + value) of each token's turn, ``[N, S]`` float32, zero on
        masked tokens.

    Examples:
        >>> reward = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
        >>> value = torch.tensor([[0.5, 9.0, 9.0, 0.5]])
        >>> mask = torch.tensor([[True, True, False, True]])
        >>> turns = torch.tensor([[0, 0, 1, 1]])
        >>> advantage, returns = turn_gae(reward, value, mask, turns, gamma=1.0, lmbda=0.5)
        >>> advantage, returns
        (tensor([[0.2500, 0.2500, 0.0000, 0.5000]]), tensor([[0.7500, 0.7500, 0.0000, 1.0000]]))
    """
    _check_gae(reward, value, mask, gamma=gamma, lmbda=lmbda)
    index = index_turns(mask, turns, episode)
    dtype = accumulation_dtype(reward.device)
    earned = index.total(rewards_on_sampled(reward, mask, dtype=dtype))
    at_turn = index.read(value).to(dtype)
    advantage = _gae_over_turns(index, earned, at_turn, gamma, lmbda)
    return index.write(advantage.float()), index.write((advantage + at_turn).float())


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
    """Compute the bi-level generalised advantage estimate of every sampled token.

    Bi-Level GAE of VAGEN (https://arxiv.org/abs/2510.16907). First over turns ``k``, with ``V[k]`` the
    value at the turn's *last* sampled token and ``r[k]`` the sum of its rewards::

        delta[k] = r[k] + turn_gamma * V[k + 1] - V[k]
        A[k]     = delta[k] + turn_gamma * turn_lmbda * A[k + 1]

    then over the sampled tokens ``i`` of each turn, from its last one, ``J``, back::

        A[k, J]  = A[k]
        A[k, i]  = r[k, i] + gamma * V[k, i + 1] - V[k, i] + gamma * lmbda * A[k, i + 1]

    In the paper a turn's reward is on its last token. Rewards on its earlier tokens (a penalty per
    token, say) count in ``r[k]`` for earlier turns, but not in ``A[k, J]``, which comes after them.
    Where turn ids skip numbers, ``turn_gamma`` is raised to their difference. A reward on a masked
    token moves to the last sampled token before it, or else to the row's first.

    Args:
        reward: ``[N, S]`` floating.
        value: ``[N, S]`` floating; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        gamma: Discount per sampled token within a turn, in [0, 1].
        lmbda: Trace decay per sampled token within a turn, in [0, 1].
        turn_gamma: Discount per turn, in [0, 1].
        turn_lmbda: Trace decay per turn, in [0, 1].
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.

    Returns:
        Advantage and return (advantage + value), ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> reward = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
        >>> mask = torch.tensor([[True, True, False, True, True]])
        >>> turns = torch.tensor([[0, 0, 1, 1, 1]])
        >>> value = torch.zeros(1, 5)
        >>> bilevel_gae(reward, value, mask, turns, 1.0, 0.5, turn_gamma=0.9, turn_lmbda=1.0)[0]
        tensor([[0.4500, 0.9000, 0.0000, 0.5000, 1.0000]])
    """
    _check_gae(
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
    of_turn = _gae_over_turns(index, earned, at_end, turn_gamma, turn_lmbda)

    order = torch.argsort(index.of_token, stable=True)
    turn = index.of_token[order]
    reward, at_token = reward[mask][order], value[mask][order].to(dtype)
    delta = torch.where(
        run_ends(turn),
        of_turn[turn] - (earned[turn] - reward),
        reward + gamma * _next(at_token) - at_token,
    )
    in_order = _within_runs(delta, turn, gamma * lmbda)
    advantage = torch.empty_like(in_order).scatter(0, order, in_order)
    returns = advantage + value[mask].to(dtype)
    return (
        zeros.masked_scatter(mask, advantage.float()),
        zeros.masked_scatter(mask, returns.float()),
    )


def _gae_over_turns(
    index: TurnIndex, reward: Tensor, value: Tensor, gamma: float, lmbda: float
) -> Tensor:
    """Compute the advantages of turns from their rewards and values, all ``[K]``."""
    discount = index.discount_to_next(gamma)
    # Select, do not multiply by 0: another episode's value may be infinite.
    delta = reward + torch.where(discount == 0, 0.0, discount * _next(value)) - value
    return reverse_linear_recurrence(delta, discount * lmbda)


def _within_runs(delta: Tensor, ids: Tensor, decay: float) -> Tensor:
    """Solve ``y[i] = delta[i] + decay * y[i + 1]`` over each run of equal ids, all ``[M]``."""
    decays = torch.where(run_ends(ids), 0.0, decay).to(delta.dtype)
    longest = int(torch.bincount(ids, minlength=1).max())
    return reverse_linear_recurrence(delta, decays, longest=longest)


def _next(x: Tensor) -> Tensor:
    """The entry after each, 0 after the last: ``[M]``."""
    return torch.nn.functional.pad(x[1:], (0, min(1, len(x))))


def _check_gae(reward: Tensor, value: Tensor, mask: Tensor, **discounts: float) -> None:
    check_mask("mask", mask, reward.shape)
    check_shape("value", value, reward.shape)
    for name, discount in discounts.items():
        check_unit_interval(name, discount)
