"""Filters that refuse groups with nothing to learn from, as they are collected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase

from torchrl_mt.collectors.episode import Episode, episodes_to_tensordict
from torchrl_mt.collectors.workflow import Rejected
from torchrl_mt.threads import call_user

__all__ = ["AcceptGroup", "has_spread", "refusal_of"]

AcceptGroup: TypeAlias = Callable[[Sequence[TensorDictBase]], Any]
"""Called with the episodes of a group in TED, ``[T]`` each; false refuses it. May be ``async``."""

_TOLERANCE = 1e-6
_VALID = torch.ones(1, dtype=torch.bool, device="cpu")


def has_spread(episodes: Sequence[TensorDictBase]) -> bool:
    """Whether the returns of a group's episodes differ; if not, every advantage is 0.

    This is dynamic sampling (https://arxiv.org/abs/2503.14476) at collection. Episodes with ``"valid"``
    false do not count; without any other, the result is false.

    Args:
        episodes: the episodes of one group in TED, ``[T]`` each.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> won, lost = (
        ...     TensorDict({("next", "reward"): torch.tensor([[0.0], [r]])}, [2]) for r in (1.0, 0.0)
        ... )
        >>> has_spread([won, lost, won]), has_spread([won, won]), has_spread([lost])
        (True, False, False)
    """
    earned = [
        float(episode["next", "reward"].double().sum())
        for episode in episodes
        if bool(episode.get("valid", default=_VALID).all())
    ]
    if not earned:
        return False
    return max(earned) - min(earned) > _TOLERANCE * max(1.0, *map(abs, earned))


async def refusal_of(
    accept_group: AcceptGroup, episodes: Sequence[Episode]
) -> BaseException | None:
    """Apply ``accept_group`` to a group's finished episodes; return why it refuses, or ``None``."""
    try:
        ted = [episodes_to_tensordict([episode]) for episode in episodes]
        accepted = await call_user(accept_group, ted)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None if accepted else Rejected("group_not_accepted")
