"""Outcome credit: every sampled token of an episode gets the episode's advantage in its group.

Each episode counts once in its group's statistics, however many rows (forks) it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import (
    check_mask,
    check_rows,
    check_sampled_turns,
    check_shape,
)
from torchrl_mt.objectives.functional.group import GroupKind, group_advantage
from torchrl_mt.objectives.functional.time.sampled import first_sampled_token


def outcome_advantage(
    returns: Tensor,
    mask: Tensor,
    turns: Tensor,
    episode: Tensor,
    group: Tensor,
    kind: GroupKind = "grpo",
    *,
    scored: Tensor | None = None,
    lone_value: float = 0.0,
    eps: float = 1e-6,
    pass_k: int = 4,
) -> Tensor:
    """Compute episodes' advantages in their groups from the returns of their first turns.

    Args:
        returns: ``[N, S]`` floating: each turn's return-to-go, repeated on its sampled tokens, as of
            :func:`turn_returns`.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding); only read at each row's first
            sampled token.
        episode: ``[N]`` int64 episode id of each row.
        group: ``[N]`` int64 group id of each row; one per episode.
        kind: See :func:`group_advantage`.
        scored: ``[N, S]`` bool: the trained tokens, which ``"opo"`` counts as an episode's length; by
            default all sampled ones.
        lone_value: Advantage of an episode alone in its group.
        eps: Added to divisors.
        pass_k: ``k`` of ``"pass_at_k"``.

    Returns:
        ``[N, S]`` float32, zero on masked tokens. Episodes without sampled tokens enter no statistic.

    Raises:
        ValueError: If rows of one episode have different groups.

    Examples:
        >>> returns = torch.tensor([[1.0, 1.0], [1.0, 1.0], [4.0, 0.0]])
        >>> mask = torch.tensor([[True, True], [True, True], [True, False]])
        >>> turns = torch.tensor([[0, 0], [1, 1], [0, -1]])
        >>> episode, group = torch.tensor([8, 8, 9]), torch.tensor([0, 0, 0])
        >>> outcome_advantage(returns, mask, turns, episode, group, "dr_grpo")
        tensor([[-1.5000, -1.5000],
                [-1.5000, -1.5000],
                [ 1.5000,  0.0000]])
    """
    check_rows(mask)
    check_shape("returns", returns, mask.shape)
    check_shape("turns", turns, mask.shape)
    check_shape("group", group, mask.shape[:1])
    check_shape("episode", episode, mask.shape[:1])
    scored = mask if scored is None else scored
    check_mask("scored", scored, mask.shape)
    ids, of_row = torch.unique(episode, return_inverse=True)
    group_of_episode = _lowest(group, of_row, len(ids))
    if bool((group != group_of_episode[of_row]).any()):
        raise ValueError("group must be the same on all rows of an episode.")
    if not mask.numel():
        return returns.float()
    first, sampled = first_sampled_token(mask)
    turn = turns.gather(-1, first).squeeze(-1).long()
    check_sampled_turns(turn[sampled])
    opening = _lowest(torch.where(sampled, turn, _NEVER), of_row, len(ids))
    opens = sampled & (turn == opening[of_row])
    row = torch.arange(len(mask), device=mask.device)
    row = _lowest(torch.where(opens, row, _NEVER), of_row, len(ids)) % len(mask)
    lengths = None
    if kind == "opo":
        lengths = torch.zeros_like(opening).index_add(0, of_row, (mask & scored).sum(-1))
    advantage = group_advantage(
        returns.gather(-1, first).squeeze(-1)[row],
        group_of_episode,
        kind,
        valid=opening < _NEVER,
        lengths=lengths,
        lone_value=lone_value,
        eps=eps,
        pass_k=pass_k,
    )
    return torch.where(mask, advantage[of_row].unsqueeze(-1), 0.0)


_NEVER = torch.iinfo(torch.int64).max
"""Placeholder above every turn id and row index."""


def _lowest(x: Tensor, of_row: Tensor, episodes: int) -> Tensor:
    """Minimum over each episode's rows: ``[N]`` to ``[E]``."""
    return x.new_zeros(episodes).scatter_reduce(0, of_row, x, "amin", include_self=False)
