"""When an episode ends: the limits that a collector sets, and one name for every reason."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, get_args

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
    TOOL_TIMEOUT = "tool_timeout"
    """The environment took longer than :attr:`Limits.tool_timeout` to answer."""
    TURN_TIMEOUT = "turn_timeout"
    """The turn took longer than :attr:`Limits.turn_timeout`."""
    EPISODE_TIMEOUT = "episode_timeout"
    """The episode took longer than :attr:`Limits.episode_timeout`."""

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut rather than finished."""
        return self is not StopReason.DONE

    @property
    def of_time(self) -> bool:
        """Whether time was up."""
        return self.value.endswith("timeout")


OnTimeout = Literal["reject", "mask"]
"""What becomes of an episode whose time was up."""


@dataclass(frozen=True)
class Limits:
    """What an episode may use; ``None`` is no limit. Reaching one ends the episode as truncated.

    What an episode whose time was up would have been worth is not known, so it is never learned from,
    whether an environment or a workflow played it: it is rejected, or kept with ``"valid"`` false.

    Args:
        max_turns: most model calls in an episode.
        max_response_tokens: most tokens sampled in one turn; without it, the engine's own limit holds.
        max_episode_tokens: most tokens of the conversation, prompt and responses together.
        turn_timeout: seconds for a turn: a model call and the environment's answer to it.
        episode_timeout: seconds for an episode, from when it begins to run.
        tool_timeout: seconds for the environment to begin, or to answer a response.
        on_timeout: what becomes of an episode whose time was up. ``"reject"``: it is rejected, its cause
            is the limit's name. ``"mask"``: it is accepted with the turns that were answered in time,
            truncated, and every turn of the collector's batches says under ``"valid"`` whether its
            episode counts; :class:`~torchrl_mt.transforms.MergeTurns` hands that to the rows, where it
            keeps the episode out of the loss and of its group's statistics. An episode without such a
            turn is rejected all the same.

    Raises:
        ValueError: if a limit is below 1, a timeout not positive, or ``on_timeout`` unknown.

    Examples:
        >>> Limits(max_turns=5, max_response_tokens=2)
        Limits(max_turns=5, max_response_tokens=2, max_episode_tokens=None, turn_timeout=None,
            episode_timeout=None, tool_timeout=None, on_timeout='reject')
    """

    max_turns: int | None = None
    max_response_tokens: int | None = None
    max_episode_tokens: int | None = None
    turn_timeout: float | None = None
    episode_timeout: float | None = None
    tool_timeout: float | None = None
    on_timeout: OnTimeout = "reject"

    def __post_init__(self) -> None:
        if self.on_timeout not in get_args(OnTimeout):
            raise ValueError(
                f"on_timeout must be one of {get_args(OnTimeout)}, got {self.on_timeout!r}."
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name == "on_timeout":
                continue
            if field.name.endswith("timeout"):
                if not value > 0:
                    raise ValueError(
                        f"{field.name} must be a positive number of seconds, or None for no "
                        f"limit, got {value}."
                    )
            elif value < 1:
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

    def within(self, engine: Any) -> Limits:
        """The limits, and an engine's own where those are tighter or where there are none.

        Args:
            engine: may have ``max_total_tokens``, most tokens of prompt and response together, and
                ``max_new_tokens``, most tokens of a response.
        """
        total = getattr(engine, "max_total_tokens", None)
        bounds = [bound for bound in (self.max_episode_tokens, total) if bound is not None]
        response = self.max_response_tokens or getattr(engine, "max_new_tokens", None)
        return replace(
            self, max_episode_tokens=min(bounds, default=None), max_response_tokens=response
        )
