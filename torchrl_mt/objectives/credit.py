"""From rewards to returns and advantages: which function gives which kind of credit."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch import Tensor

from torchrl_mt.objectives.functional import (
    bilevel_gae,
    episode_gae,
    outcome_advantage,
    turn_gae,
    turn_normalize,
    turn_returns,
)
from torchrl_mt.objectives.functional.group import OVER_BATCH, GroupKind
from torchrl_mt.objectives.row_batch import RowBatch

AdvantageKind = GroupKind | Literal["turn", "gae", "turn_gae", "bilevel_gae"]
"""How credit is given: to whole episodes by group, or over time."""

CRITIC_KINDS = ("gae", "turn_gae", "bilevel_gae")
"""The kinds that need a critic."""
GROUP_KINDS = tuple(kind for kind in get_args(GroupKind) if kind not in OVER_BATCH)
"""The kinds that read the group: to the others the whole batch is one."""
ADVANTAGE_KINDS = (*get_args(GroupKind), "turn", *CRITIC_KINDS)


def returns_to_go(
    batch: RowBatch, reward: Tensor | None, kl_reward: Tensor, gamma: float
) -> Tensor:
    """Return-to-go of each turn, the KL's part in the reward included.

    Args:
        batch: The rows.
        reward: ``[N, S]`` floating; ``None`` to take the returns that came with the rows.
        kl_reward: ``[N, S]`` float32: the KL's part in the reward.
        gamma: Discount per turn.

    Returns:
        ``[N, S]`` float32, zero on masked tokens.
    """
    total = kl_reward if reward is None else reward + kl_reward
    returns = turn_returns(total, batch.mask, batch.turns, gamma, episode=batch.episode)
    if reward is None:
        # Returns are linear in rewards: those of the KL add to those that came with the rows.
        returns = returns + batch.turn_returns()
    return returns


def advantage_without_critic(
    batch: RowBatch, returns: Tensor, kind: str, lone_value: float = 0.0
) -> Tensor:
    """Advantage of each token by comparison with other episodes.

    Args:
        batch: The rows.
        returns: ``[N, S]``: :func:`returns_to_go`.
        kind: One of ``ADVANTAGE_KINDS`` that needs no critic.
        lone_value: What an episode alone in its group gets; ``"turn"`` has no groups.

    Returns:
        ``[N, S]`` float32, zero on masked tokens and on rejected rows.
    """
    mask, turns, episode = batch.counted, batch.turns, batch.episode
    if kind == "turn":
        return turn_normalize(returns, mask, turns, episode=episode)
    group = batch.group() if kind in GROUP_KINDS else torch.zeros_like(episode)
    return outcome_advantage(
        returns,
        mask,
        turns,
        episode,
        group,
        cast(GroupKind, kind),
        scored=batch.scored,
        lone_value=lone_value,
    )


def advantage_with_critic(
    batch: RowBatch,
    reward: Tensor,
    value: Tensor,
    kind: str,
    gamma: float,
    lmbda: float,
    turn_gamma: float,
    turn_lmbda: float,
) -> tuple[Tensor, Tensor]:
    """Advantage of each token by comparison with what a critic expected.

    Args:
        batch: The rows.
        reward: ``[N, S]`` floating.
        value: ``[N, S]`` floating.
        kind: One of ``CRITIC_KINDS``.
        gamma: Discount per sampled token; with ``"turn_gae"`` per turn.
        lmbda: Trace decay per the same.
        turn_gamma: Discount per turn of ``"bilevel_gae"``.
        turn_lmbda: Trace decay per turn of ``"bilevel_gae"``.

    Returns:
        Advantage and return, ``[N, S]`` float32, zero on masked tokens.
    """
    entries = reward, value, batch.mask, batch.turns, gamma, lmbda
    if kind == "gae":
        return episode_gae(*entries, episode=batch.episode)
    if kind == "turn_gae":
        return turn_gae(*entries, episode=batch.episode)
    return bilevel_gae(
        *entries, turn_gamma=turn_gamma, turn_lmbda=turn_lmbda, episode=batch.episode
    )
