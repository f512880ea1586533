"""Each episode's sampled tokens in the order in which they were sampled, whatever rows they lie in.

How a forked episode was cut into rows, and the order of the rows, change nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_mt.objectives.functional._checks import check_mask, check_shape


@dataclass(frozen=True)
class EpisodeTime:
    """The ``E`` episodes of a batch of rows, each as one sequence of at most ``L`` sampled tokens."""

    mask: Tensor
    """``[N, S]`` bool, true on sampled tokens."""
    token: Tensor
    """``[M]`` int64: the sampled tokens as indices into the flattened rows, by episode, then turn."""
    place: Tensor
    """``[M]`` int64: where each of them lies in the flattened ``[E, L]`` table."""
    table_mask: Tensor
    """``[E, L]`` bool: where the table has a token; they lie on the left."""
    of_row: Tensor
    """``[N]`` int64: each row's episode, numbered from 0."""
    last_token: Tensor
    """``[E]`` int64: the token that was sampled last, as in ``token``; -1 if none was sampled."""

    def gather(self, per_token: Tensor) -> Tensor:
        """Take ``[N, S]`` values to the table ``[E, L]``, zero where it has no token."""
        table = per_token.new_zeros(self.table_mask.shape)
        table.view(-1)[self.place] = per_token.flatten()[self.token]
        return table

    def scatter(self, table: Tensor) -> Tensor:
        """Take the table ``[E, L]`` back to the rows ``[N, S]``, zero on masked tokens."""
        rows = table.new_zeros(self.mask.shape)
        rows.view(-1)[self.token] = table.flatten()[self.place]
        return rows

    def total(self, per_token: Tensor) -> Tensor:
        """Sum ``[N, S]`` values over each episode's sampled tokens: ``[E]``."""
        zeros = per_token.new_zeros(self.last_token.shape)
        per_row = torch.where(self.mask, per_token, 0).sum(-1, dtype=zeros.dtype)
        return zeros.index_add(0, self.of_row, per_row)

    def outcome_rows(self) -> Tensor:
        """Find the rows that hold the last sampled token of their episode: ``[E']`` int64."""
        return self.last_token[self.last_token >= 0] // max(1, self.mask.shape[1])


def order_episodes(mask: Tensor, turns: Tensor, episode: Tensor) -> EpisodeTime:
    """Put the sampled tokens of each episode in order: by turn, and by position within a turn.

    Args:
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token, the rows of an episode (its forks) counting on;
            each turn lies in one row. Not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row.

    Returns:
        The order, and the ways to and fro.

    Raises:
        ValueError: If shapes differ.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> mask = torch.tensor([[True, True], [False, True]])
        >>> time = order_episodes(mask, torch.tensor([[0, 2], [1, 1]]), torch.tensor([7, 7]))
        >>> time.gather(torch.tensor([[1, 2], [3, 4]]))
        tensor([[1, 4, 2]])
    """
    check_mask("mask", mask, turns.shape)
    check_shape("episode", episode, mask.shape[:1])
    ids, of_row = torch.unique(episode, return_inverse=True)
    width = max(1, mask.shape[1])
    token = mask.flatten().nonzero().squeeze(-1)
    token = token[turns.flatten()[token].argsort(stable=True)]
    token = token[of_row[token // width].argsort(stable=True)]
    of_token = of_row[token // width]
    count = torch.bincount(of_token, minlength=len(ids))
    ends = count.cumsum(0)
    longest = int(count.max()) if len(count) else 0
    position = torch.arange(len(token), device=mask.device) - (ends - count)[of_token]
    table_mask = torch.arange(longest, device=mask.device) < count.unsqueeze(-1)
    last = torch.full_like(ids, -1, dtype=torch.long)
    last[count > 0] = token[ends[count > 0] - 1]
    return EpisodeTime(mask, token, of_token * longest + position, table_mask, of_row, last)
