"""What a collector and its workers send each other.

The pickle of a played episode is linear in the length of its conversations: the prompts of a
conversation share its tokens. Each image is in it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDictBase

from torchrl_mt.collectors.episode import Episode, Turn
from torchrl_mt.collectors.limits import StopReason
from torchrl_mt.processes import failure, pickled, received

__all__ = ["Played", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """An episode to play."""

    record: Episode
    """The episode without its item."""
    data: bytes
    """The item, pickled."""
    sampling: bytes
    """Arguments for the engine's ``generate``, pickled."""

    @classmethod
    def of(cls, episode: Episode, sampling: Mapping[str, Any]) -> Task:
        """The task to play a new episode.

        Raises:
            TypeError: if the item or a sampling argument cannot be pickled.
        """
        return cls(
            replace(episode, data=None),
            _sent("items of data", "the item", episode.data),
            _sent("arguments of sampling", "the arguments", sampling),
        )

    def episode(self) -> Episode:
        """The episode to fill.

        Raises:
            TypeError: if the item cannot be unpickled here.
        """
        return replace(self.record, data=received("the item", self.data))

    def arguments(self) -> Mapping[str, Any]:
        """Arguments for the engine's ``generate``.

        Raises:
            TypeError: if they cannot be unpickled here.
        """
        return received("sampling", self.sampling)


@dataclass(frozen=True, slots=True)
class Played:
    """How an episode went."""

    turns: list[Turn]
    """Its turns; none if it failed."""
    stop_reason: StopReason | None
    entries: TensorDictBase | None
    valid: bool | None
    judged: bool
    seconds: Mapping[Any, float]
    """Seconds of its calls, by kind."""
    error: bytes | None
    """Why it failed, by :func:`~torchrl_mt.processes.failure`."""

    @classmethod
    def of(cls, episode: Episode, error: BaseException | None) -> Played:
        """What an episode that ended has to tell."""
        return cls(
            [] if error is not None else episode.turns,
            episode.stop_reason,
            None if error is not None else episode.entries,
            episode.valid,
            episode.judged,
            dict(episode.calls.seconds),
            None if error is None else failure(error),
        )

    def enter(self, episode: Episode) -> None:
        """Write it into the collector's record of the episode."""
        episode.turns = self.turns
        episode.stop_reason = self.stop_reason
        episode.entries = self.entries
        episode.valid = self.valid
        episode.judged = self.judged
        episode.oldest_elsewhere = episode.calls.elsewhere = None
        episode.calls.seconds.update(self.seconds)


def _sent(what: str, one: str, value: Any) -> bytes:
    """Pickle a part of a task; ``what`` is its kind, and ``one`` names it."""
    try:
        return pickled(value, with_main=True)
    except Exception as error:
        raise TypeError(
            f"{what} are sent to the workers, but pickling {one} {_shown(value)} raised "
            f"{type(error).__name__}: {error}. Give plain data (numbers, text, lists, dicts, arrays), "
            "and have the environment make the rest of it."
        ) from error


def _shown(value: Any) -> str:
    """The beginning of a value's ``repr``."""
    try:
        return repr(value)[:200]
    except Exception:
        return f"of type {type(value).__name__}"
