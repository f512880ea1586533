"""When an episode ends: the limits that a collector sets, and one name for every reason."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

__all__ = ["Limits", "StopReason"]


class StopReason(str, Enum):
    """Why an episode ended; the value is what episodes carry under ``"stop_reason"``."""

    DONE = "done"
    """The environment came to its end: ``terminated``."""
    TRUNCATED = "truncated"
    """The environment cut the episode short."""
    MAX_TURNS = "max_turns"
    """The turn was the last that :attr:`Limits.max_turns` allows."""
    MAX_RESPONSE_TOKENS = "max_response_tokens"
    """The response was cut before the model ended it; the environment was not asked."""
    MAX_EPISODE_TOKENS = "max_episode_tokens"
    """The conversation has no room for a further token."""

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut rather than finished."""
        return self is not StopReason.DONE


@dataclass(frozen=True)
class Limits:
    """What an episode may use; ``None`` is no limit. Reaching one ends the episode as truncated.

    Args:
        max_turns: most model calls in an episode.
        max_response_tokens: most tokens sampled in one turn; without it, the engine's own limit holds.
        max_episode_tokens: most tokens of the conversation, prompt and responses together.

    Raises:
        ValueError: if a limit is below 1.

    Examples:
        >>> Limits(max_turns=5, max_response_tokens=2)
        Limits(max_turns=5, max_response_tokens=2, max_episode_tokens=None)
    """

    max_turns: int | None = None
    max_response_tokens: int | None = None
    max_episode_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(
                    f"{field.name} must be at least 1, or None for no limit, got {value}."
                )

    def response_budget(self, prompt_length: int) -> tuple[int | None, StopReason]:
        """How many tokens the next response may have, and which limit a cut response has reached.

        Args:
            prompt_length: tokens of the conversation so far.

        Returns:
            The budget (``None``: no limit of ours; 0: no room) and the limit that sets it.
        """
        if self.max_episode_tokens is None:
            return self.max_response_tokens, StopReason.MAX_RESPONSE_TOKENS
        room = max(self.max_episode_tokens - prompt_length, 0)
        if self.max_response_tokens is None or room < self.max_response_tokens:
            return room, StopReason.MAX_EPISODE_TOKENS
        return self.max_response_tokens, StopReason.MAX_RESPONSE_TOKENS
