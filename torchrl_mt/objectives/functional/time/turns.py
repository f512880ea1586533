"""Turns as the unit of time and of credit: index, returns, and normalisation per turn.

A turn is one (episode, turn id) pair with at least one sampled token, whichever rows its tokens lie
in; it counts once however many tokens it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_mt.checks import (
    check_mask,
    check_rows,
    check_sampled_turns,
    check_shape,
    check_unit_interval,
)
from torchrl_mt.objectives.functional.group import group_advantage
from torchrl_mt.objectives.functional.time.recurrence import (
    accumulation_dtype,
    reverse_linear_recurrence,
)
from torchrl_mt.objectives.functional.time.sampled import rewards_on_sampled


@dataclass(frozen=True)
class TurnIndex:
    """The ``K`` turns of a batch of rows, ordered by episode, then by turn id."""

    mask: Tensor
    """``[N, S]`` bool, true on sampled tokens."""
    of_token: Tensor
    """``[M]`` int64: the turn (0 to K - 1) of each of the ``M`` sampled tokens, row-major."""
    first_token: Tensor
    """``[K]`` int64: each turn's first sampled token, as an index into the flattened rows."""
    last_token: Tensor
    """``[K]`` int64: each turn's last sampled token, as an index into the flattened rows."""
    episode: Tensor
    """``[K]`` int64: episode of each turn; the episodes that have one, numbered from 0."""
    turn: Tensor
    """``[K]`` int64: turn id of each turn."""

    def total(self, per_token: Tensor) -> Tensor:
        """Sum ``[N, S]`` values over each turn's sampled tokens: ``[K]``."""
        zeros = per_token.new_zeros(self.turn.shape)
        return zeros.index_add(0, self.of_token, per_token[self.mask])

    def read(self, per_token: Tensor) -> Tensor:
        """Value at each turn's first sampled token: ``[N, S]`` to ``[K]``."""
        return per_token.flatten()[self.first_token]

    def write(self, per_turn: Tensor) -> Tensor:
        """Repeat each turn's value on its sampled tokens, zero elsewhere: ``[K]`` to ``[N, S]``."""
        out = per_turn.new_zeros(self.mask.shape)
        return out.masked_scatter(self.mask, per_turn[self.of_token])

    def opens_episode(self) -> Tensor:
        """Whether each turn is the first of its episode: ``[K]`` bool."""
        opens = torch.ones_like(self.episode, dtype=torch.bool)
        opens[1:] = self.episode[1:] != self.episode[:-1]
        return opens

    def discount_to_next(self, gamma: float) -> Tensor:
        """Discount from each turn to the next one of its episode, 0 if none is: ``[K]``.

        Time is the difference of turn ids: a turn without a sampled token took its time.
        """
        discount = torch.zeros(
            self.turn.shape, dtype=accumulation_dtype(self.turn.device), device=self.turn.device
        )
        wait = (self.turn[1:] - self.turn[:-1]).clamp(min=0)
        discount[:-1] = torch.where(self.opens_episode()[1:], 0.0, gamma ** wait.to(discount.dtype))
        return discount


def index_turns(mask: Tensor, turns: Tensor, episode: Tensor | None = None) -> TurnIndex:
    """Find the turns of a batch of rows.

    Args:
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.

    Returns:
        The turns, ordered by episode, then by turn id.

    Raises:
        ValueError: If shapes differ or a sampled token has a negative turn id.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> mask = torch.tensor([[True, True, False, True]])
        >>> index_turns(mask, torch.tensor([[0, 0, 1, 1]])).turn
        tensor([0, 1])
    """
    check_rows(mask)
    check_shape("turns", turns, mask.shape)
    if episode is None:
        row = torch.arange(mask.shape[0], device=mask.device)
    else:
        check_shape("episode", episode, mask.shape[:1])
        row = torch.unique(episode, return_inverse=True)[1]
    token = mask.flatten().nonzero().squeeze(-1)
    turn = turns.flatten()[token].long()
    if not token.numel():
        return TurnIndex(mask, token, token, token, turn, turn)
    check_sampled_turns(turn)
    high = int(turn.max())
    key = row[token // mask.shape[1]] * (high + 1) + turn
    # Tokens of a turn come in runs: sort the runs, which are few, not the tokens.
    runs, run_of_token = torch.unique_consecutive(key, return_inverse=True)
    key, turn_of_run = torch.unique(runs, return_inverse=True)
    of_token = turn_of_run[run_of_token]
    first = torch.full_like(key, mask.numel()).scatter_reduce(0, of_token, token, "amin")
    last = torch.zeros_like(key).scatter_reduce(0, of_token, token, "amax")
    # Episodes without a sampled token have no turn, and get no number.
    numbered = torch.unique_consecutive(key // (high + 1), return_inverse=True)[1]
    return TurnIndex(mask, of_token, first, last, numbered, key % (high + 1))


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

    Raises:
        ValueError: If shapes differ, ``gamma`` is out of range, or a sampled token has no turn.
        TypeError: If ``mask`` is not boolean.

    Examples:
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

    Raises:
        ValueError: If shapes differ or a sampled token has no turn.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> returns = torch.tensor([[1.0, 1.0, 5.0], [3.0, 7.0, 0.0]])
        >>> turns = torch.tensor([[0, 0, 1], [0, 1, -1]])
        >>> turn_normalize(returns, turns >= 0, turns)
        tensor([[-0.7071, -0.7071, -0.7071],
                [ 0.7071,  0.7071,  0.0000]])
    """
    check_mask("mask", mask, returns.shape)
    index = index_turns(mask, turns, episode)
    return index.write(group_advantage(index.read(returns), index.turn, "grpo", eps=eps))
