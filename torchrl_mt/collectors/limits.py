"""Limits of episodes, and the reasons why episodes end."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, get_args

from torchrl_mt.checks import check_choice

__all__ = ["Limits", "StopReason"]


class StopReason(str, Enum):
    """Why an episode ended; the values are those under ``"stop_reason"`` in batches."""

    DONE = "done"
    """The environment ended the episode: ``terminated``."""
    TRUNCATED = "truncated"
    """The environment truncated the episode."""
    MAX_TURNS = "max_turns"
    """The turn was the last that :attr:`Limits.max_turns` allows."""
    MAX_RESPONSE_TOKENS = "max_response_tokens"
    """The response was cut, and :attr:`Limits.on_cut` is ``"end"``: the environment does not see it."""
    MAX_EPISODE_TOKENS = "max_episode_tokens"
    """The conversation has no room for a further token."""
    TOOL_TIMEOUT = "tool_timeout"
    """The environment took longer than :attr:`Limits.tool_timeout` to reply."""
    TURN_TIMEOUT = "turn_timeout"
    """The turn took longer than :attr:`Limits.turn_timeout`."""
    EPISODE_TIMEOUT = "episode_timeout"
    """The episode took longer than :attr:`Limits.episode_timeout`."""

    @property
    def truncated(self) -> bool:
        """Whether the episode was truncated, not terminated."""
        return self is not StopReason.DONE

    @property
    def of_time(self) -> bool:
        """Whether it is a timeout."""
        return self.value.endswith("timeout")


OnTimeout = Literal["reject", "mask"]
"""What becomes of an episode that timed out."""
OnCut = Literal["end", "continue"]
"""What becomes of an episode after a response that was cut."""


@dataclass(frozen=True)
class Limits:
    """Limits of an episode; ``None`` is no limit. Reaching one truncates the episode.

    An episode that times out is never learned from, since its reward is unknown: it is rejected, or
    kept with ``"valid"`` false.

    Args:
        max_turns: maximum number of model calls in an episode.
        max_response_tokens: maximum tokens of a response; the engine's own limit if ``None``.
        max_episode_tokens: maximum tokens of the conversation, prompt and responses together.
        turn_timeout: seconds for a turn: a model call and the environment's reply to it.
        episode_timeout: seconds for an episode, from its start.
        tool_timeout: seconds for a ``reset`` or ``step`` of the environment.
        on_timeout: what becomes of an episode that times out. ``"reject"``: it is rejected; the cause is
            the limit's name. ``"mask"``: it is accepted as truncated, with the turns that were complete
            in time; without any, it is rejected. Batches then have ``"valid"``, false for the turns of
            such episodes. :class:`~torchrl_mt.transforms.MergeTurns` passes it to the rows, where it
            keeps them out of the loss and of group statistics.
        on_cut: what becomes of an environment's episode after a response that ``max_response_tokens``
            cut. ``"end"``: it is truncated; the environment does not see the response. ``"continue"``:
            the environment gets the response as it is and replies to it. The next prompt extends it
            token for token: what ends the turn there counts as the environment's, not as sampled.
            Workflows and agents always get cut responses, with ``finish_reason="length"``, and may go
            on.

    Raises:
        ValueError: if a limit is below 1, a timeout is not positive, or ``on_timeout`` or ``on_cut`` is
            unknown.

    Examples:
        >>> Limits(max_turns=5, max_response_tokens=2)
        Limits(max_turns=5, max_response_tokens=2, max_episode_tokens=None, turn_timeout=None,
            episode_timeout=None, tool_timeout=None, on_timeout='reject', on_cut='end')
    """

    max_turns: int | None = None
    max_response_tokens: int | None = None
    max_episode_tokens: int | None = None
    turn_timeout: float | None = None
    episode_timeout: float | None = None
    tool_timeout: float | None = None
    on_timeout: OnTimeout = "reject"
    on_cut: OnCut = "end"

    def __post_init__(self) -> None:
        check_choice("on_timeout", self.on_timeout, get_args(OnTimeout))
        check_choice("on_cut", self.on_cut, get_args(OnCut))
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name.startswith("on_"):
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
        """Maximum tokens of the next response, and the limit that sets it.

        Args:
            prompt_length: tokens of the conversation so far.

        Returns:
            The budget (``None`` for no limit, 0 for no room) and the limit that a cut response reached.
        """
        if self.max_episode_tokens is None:
            return self.max_response_tokens, StopReason.MAX_RESPONSE_TOKENS
        room = max(self.max_episode_tokens - prompt_length, 0)
        if self.max_response_tokens is None or room < self.max_response_tokens:
            return room, StopReason.MAX_EPISODE_TOKENS
        return self.max_response_tokens, StopReason.MAX_RESPONSE_TOKENS

    def within(self, engine: Any) -> Limits:
        """The limits, tightened by the engine's ``max_total_tokens``.

        Args:
            engine: may have ``max_total_tokens`` (prompt and response together) and
                ``max_new_tokens`` (a response), which holds if there is no ``max_response_tokens``.
        """
        total = getattr(engine, "max_total_tokens", None)
        bounds = [bound for bound in (self.max_episode_tokens, total) if bound is not None]
        response = self.max_response_tokens or getattr(engine, "max_new_tokens", None)
        return replace(
            self, max_episode_tokens=min(bounds, default=None), max_response_tokens=response
        )
