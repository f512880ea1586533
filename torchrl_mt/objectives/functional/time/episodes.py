"""Each episode's sampled tokens in the order in which they were sampled, whatever rows they lie in.

How a forked episode was cut into rows, and the order of the rows, change nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_mt.checks import (
    check_rows,
    check_sampled_turns,
    check_shape,
)


@dataclass(frozen=True)
class EpisodeIndex:
    """The ``E`` episodes of a batch of rows, ``M`` tokens of which were sampled."""

    mask: Tensor
    """``[N, S]`` bool, true on sampled tokens."""
    token: Tensor
    """``[M]`` int64: the sampled tokens as indices into the flattened rows, by episode, then turn."""
    of_token: Tensor
    """``[M]`` int64: the episode of each of them."""
    of_row: Tensor
    """``[N]`` int64: each row's episode, numbered from 0."""
    last_token: Tensor
    """``[E]`` int64: the token that was sampled last, as in ``token``; -1 if none was sampled."""

    def ends(self) -> Tensor:
        """Whether each token is the last of its episode: ``[M]`` bool."""
        ends = torch.ones_like(self.of_token, dtype=torch.bool)
        ends[:-1] = self.of_token[1:] != self.of_token[:-1]
        return ends

    def write(self, per_token: Tensor) -> Tensor:
        """Put values of the tokens on the rows: ``[M]`` to ``[N, S]``, zero on masked tokens."""
        out = per_token.new_zeros(self.mask.numel())
        return out.index_copy(0, self.token, per_token).view(self.mask.shape)

    def total(self, per_token: Tensor) -> Tensor:
        """Sum ``[N, S]`` values over each episode's sampled tokens: ``[E]``."""
        zeros = per_token.new_zeros(self.last_token.shape)
        per_row = torch.where(self.mask, per_token, 0).sum(-1, dtype=zeros.dtype)
        return zeros.index_add(0, self.of_row, per_row)

    def outcome_rows(self) -> Tensor:
        """Find the rows that hold the last sampled token of their episode: ``[E']`` int64."""
        return self.last_token[self.last_token >= 0] // max(1, self.mask.shape[1])


def index_episodes(mask: Tensor, turns: Tensor, episode: Tensor | None = None) -> EpisodeIndex:
    """Put the sampled tokens of each episode in order: by turn, and by position within a turn.

    Args:
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token, the rows of an episode (its forks) counting on;
            each turn lies in one row. Not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.

    Returns:
        The order, and what is read by it.

    Raises:
        ValueError: If shapes differ or a sampled token has a negative turn id.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> mask = torch.tensor([[True, True], [False, True]])
        >>> index_episodes(mask, torch.tensor([[0, 2], [1, 1]]), torch.tensor([7, 7])).token
        tensor([0, 3, 1])
    """
    check_rows(mask)
    check_shape("turns", turns, mask.shape)
    if episode is None:
        episode = torch.arange(mask.shape[0], device=mask.device)
    check_shape("episode", episode, mask.shape[:1])
    ids, of_row = torch.unique(episode, return_inverse=True)
    width = max(1, mask.shape[1])
    token = mask.flatten().nonzero().squeeze(-1)
    turn = turns.flatten()[token]
    check_sampled_turns(turn)
    token = token[turn.argsort(stable=True)]
    token = token[of_row[token // width].argsort(stable=True)]
    of_token = of_row[token // width]
    count = torch.bincount(of_token, minlength=len(ids))
    last = torch.full_like(ids, -1, dtype=torch.long)
    last[count > 0] = token[count.cumsum(0)[count > 0] - 1]
    return EpisodeIndex(mask, token, of_token, of_row, last)
