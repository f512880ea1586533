"""The context of the current episode, for environments, tools and workflows.

Each episode has its own, also in the threads that run its environment's methods.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["EpisodeContext", "get"]


@dataclass(frozen=True)
class EpisodeContext:
    """Facts about the episode that the running code belongs to."""

    task_id: Any
    """The ``"task_id"`` of the episode's item if it has one, else the id of its group."""
    group: int
    """Id of the group of episodes that share the item."""
    is_eval: bool
    """Whether the episode is played for evaluation."""
    version: int
    """The engine's weight version when the episode began."""
    sample_idx: int = 0
    """Index of the episode in its group, from 0; a retry keeps it."""
    traj_id: int = -1
    """Id of the episode, as in ``("collector", "traj_ids")``; a retry gets a new one."""


current: ContextVar[EpisodeContext] = ContextVar("torchrl_mt_episode")


def get() -> EpisodeContext:
    """Context of the current episode.

    Raises:
        LookupError: if the calling code runs outside of an episode.

    Examples:
        >>> token = current.set(EpisodeContext("task-7", 3, False, 0, sample_idx=1, traj_id=13))
        >>> get().task_id, get().sample_idx
        ('task-7', 1)
        >>> current.reset(token)
    """
    try:
        return current.get()
    except LookupError:
        raise LookupError(
            "no episode is being played here: context.get() is for environments, tools and "
            "workflows while a MultiTurnCollector plays them."
        ) from None
