"""Index of the sampled tokens of episodes and turns, in order of time.

The order of the rows and the cuts of a forked episode change nothing. A turn is an (episode, turn id)
pair with at least one sampled token, in whichever rows; it counts once however many tokens it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_mt.checks import check_rows, check_sampled_turns, check_shape
from torchrl_mt.objectives.functional.time.recurrence import accumulation_dtype


@dataclass(frozen=True)
class EpisodeIndex:
    """The ``E`` episodes of a batch of rows with ``M`` sampled tokens."""

    mask: Tensor
    """``[N, S]`` bool, true on sampled tokens."""
    token: Tensor
    """``[M]`` int64 indices of the sampled tokens in the flattened rows, by episode, then by turn."""
    of_token: Tensor
    """``[M]`` int64 episode of each of these tokens."""
    of_row: Tensor
    """``[N]`` int64 episode of each row, numbered from 0."""
    last_token: Tensor
    """``[E]`` int64 index of each episode's last sampled token in the flattened rows; -1 if none."""

    def write(self, per_token: Tensor) -> Tensor:
        """Scatter values of the tokens to the rows: ``[M]`` to ``[N, S]``, zero on masked tokens."""
        out = per_token.new_zeros(self.mask.numel())
        return out.index_copy(0, self.token, per_token).view(self.mask.shape)

    def total(self, per_token: Tensor) -> Tensor:
        """Sum ``[N, S]`` values over each episode's sampled tokens: ``[E]``."""
        zeros = per_token.new_zeros(self.last_token.shape)
        per_row = torch.where(self.mask, per_token, 0).sum(-1, dtype=zeros.dtype)
        return zeros.index_add(0, self.of_row, per_row)

    def outcome_rows(self) -> Tensor:
        """Rows that hold the last sampled token of their episode: ``[E']`` int64."""
        return self.last_token[self.last_token >= 0] // max(1, self.mask.shape[1])


def index_episodes(mask: Tensor, turns: Tensor, episode: Tensor | None = None) -> EpisodeIndex:
    """Index the sampled tokens of each episode by turn, and by position within a turn.

    Args:
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token, counted through the rows (forks) of an episode;
            each turn lies in one row. Not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.

    Returns:
        The index.

    Examples:
        >>> mask = torch.tensor([[True, True], [False, True]])
        >>> index_episodes(mask, torch.tensor([[0, 2], [1, 1]]), torch.tensor([7, 7])).token
        tensor([0, 3, 1])
    """
    ids, of_row = _episodes(mask, turns, episode)
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


@dataclass(frozen=True)
class TurnIndex:
    """The ``K`` turns of a batch of rows, by episode, then by turn id."""

    mask: Tensor
    """``[N, S]`` bool, true on sampled tokens."""
    of_token: Tensor
    """``[M]`` int64 turn (0 to ``K - 1``) of each of the ``M`` sampled tokens, row-major."""
    first_token: Tensor
    """``[K]`` int64 index of each turn's first sampled token in the flattened rows."""
    last_token: Tensor
    """``[K]`` int64 index of each turn's last sampled token in the flattened rows."""
    episode: Tensor
    """``[K]`` int64 episode of each turn; episodes without turns get no number."""
    turn: Tensor
    """``[K]`` int64 turn id of each turn."""

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

    def discount_to_next(self, gamma: float) -> Tensor:
        """Discount from each turn to the next of its episode, 0 after the last: ``[K]``.

        The exponent is the difference of turn ids: turns without sampled tokens take time, too.
        """
        discount = torch.zeros(
            self.turn.shape, dtype=accumulation_dtype(self.turn.device), device=self.turn.device
        )
        wait = (self.turn[1:] - self.turn[:-1]).clamp(min=0)
        discount[:-1] = torch.where(
            run_ends(self.episode)[:-1], 0.0, gamma ** wait.to(discount.dtype)
        )
        return discount


def index_turns(mask: Tensor, turns: Tensor, episode: Tensor | None = None) -> TurnIndex:
    """Index the turns of a batch of rows.

    Args:
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row; without it every row is an episode.

    Returns:
        The turns, ordered by episode, then by turn id.

    Examples:
        >>> mask = torch.tensor([[True, True, False, True]])
        >>> index_turns(mask, torch.tensor([[0, 0, 1, 1]])).turn
        tensor([0, 1])
    """
    row = _episodes(mask, turns, episode)[1]
    token = mask.flatten().nonzero().squeeze(-1)
    turn = turns.flatten()[token].long()
    if not token.numel():
        return TurnIndex(mask, token, token, token, turn, turn)
    check_sampled_turns(turn)
    high = int(turn.max())
    key = row[token // mask.shape[1]] * (high + 1) + turn
    # A turn's tokens come in runs: sort the few runs, not the tokens.
    runs, run_of_token = torch.unique_consecutive(key, return_inverse=True)
    key, turn_of_run = torch.unique(runs, return_inverse=True)
    of_token = turn_of_run[run_of_token]
    first = torch.full_like(key, mask.numel()).scatter_reduce(0, of_token, token, "amin")
    last = torch.zeros_like(key).scatter_reduce(0, of_token, token, "amax")
    # Episodes without a sampled token have no turn, and get no number.
    numbered = torch.unique_consecutive(key // (high + 1), return_inverse=True)[1]
    return TurnIndex(mask, of_token, first, last, numbered, key % (high + 1))


def run_ends(ids: Tensor) -> Tensor:
    """Whether each entry ``[M]`` is the last of a run of equal ones: ``[M]`` bool.

    Examples:
        >>> run_ends(torch.tensor([7, 7, 3]))
        tensor([False,  True,  True])
    """
    ends = torch.ones_like(ids, dtype=torch.bool)
    ends[:-1] = ids[1:] != ids[:-1]
    return ends


def _episodes(mask: Tensor, turns: Tensor, episode: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sorted episode ids ``[E]`` and the index of each row's among them ``[N]``."""
    check_rows(mask)
    check_shape("turns", turns, mask.shape)
    if episode is None:
        each = torch.arange(mask.shape[0], device=mask.device)
        return each, each
    check_shape("episode", episode, mask.shape[:1])
    return torch.unique(episode, return_inverse=True)
