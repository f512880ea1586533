"""Credit by outcome: every sampled token of an episode gets the episode's advantage in its group.

Each episode counts once in its group's statistics, however many rows its forks made of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional._checks import check_mask, check_shape
from torchrl_mt.objectives.functional.group import GroupKind, group_advantage
from torchrl_mt.objectives.functional.turns import index_turns


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
) -> Tensor:
    """Compare whole episodes within their groups, by the return-to-go of their first turns.

    Args:
        returns: ``[N, S]`` floating: each turn's return-to-go, repeated on its sampled tokens, as
            :func:`turn_returns` makes them.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token (-1 on padding).
        episode: ``[N]`` int64 episode id of each row.
        group: ``[N]`` int64 group id of each row; one per episode.
        kind: How an episode is compared with its group; see :func:`group_advantage`.
        scored: ``[N, S]`` bool: the sampled tokens that ``"opo"`` counts as an episode's length, by
            default all; those that are trained.
        lone_value: What an episode alone in its group gets.
        eps: Added to the standard deviation.

    Returns:
        ``[N, S]`` float32, zero on masked tokens. An episode without a sampled token enters no
        statistic.

    Raises:
        ValueError: If shapes differ, rows of one episode name different groups, or ``kind`` is
            unknown.
        TypeError: If ``mask`` is not boolean.

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
    check_mask("mask", mask, returns.shape)
    check_shape("group", group, mask.shape[:1])
    check_shape("episode", episode, mask.shape[:1])
    pairs = torch.unique(torch.stack([episode, group]), dim=1)
    if pairs.shape[1] != torch.unique(episode).numel():
        raise ValueError("group must be the same on all rows of an episode.")
    index = index_turns(mask, turns, episode)
    opening = index.first_token[index.opens_episode()]
    group_of_episode = group[opening // max(1, mask.shape[1])]
    # Only opo weighs by length: elsewhere an episode counts once, however long it is.
    counted = index.of_token
    if scored is not None:
        check_mask("scored", scored, mask.shape)
        counted = counted[scored[mask]]
    tokens = torch.bincount(index.episode[counted], minlength=len(opening))
    advantage = group_advantage(
        returns.flatten()[opening],
        group_of_episode,
        kind,
        lengths=tokens if kind == "opo" else None,
        lone_value=lone_value,
        eps=eps,
    )
    return index.write(advantage[index.episode])
