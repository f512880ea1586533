"""Which groups are worth learning from, told as they are collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase

__all__ = ["AcceptGroup", "has_spread"]

AcceptGroup: TypeAlias = Callable[[Sequence[TensorDictBase]], Any]
"""Given the episodes of a group in TED, ``[T]`` each; false refuses it. May be ``async``."""

_TOLERANCE = 1e-6
_VALID = torch.ones(1, dtype=torch.bool)


def has_spread(episodes: Sequence[TensorDictBase]) -> bool:
    """Whether the episodes of a group differ in what they earned: without that, every advantage is 0.

    Dynamic sampling (https://arxiv.org/abs/2503.14476) as groups are collected. Episodes with
    ``"valid"`` false do not count.

    Args:
        episodes: those of one group in TED, ``[T]`` each.

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
