"""How far episodes may run ahead of training, and how old they may be at delivery.

Up to ``max_staleness`` batches may be played while the policy is trained, beside the one that the
trainer waits for. No delivered token is older than ``max_staleness`` updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from torchrl_mt.collectors.episode import Episode

__all__ = ["Lead", "StalenessLimit", "StalenessRule"]

StalenessRule = Literal["delivery", "admission"]
"""When staleness is bounded: as episodes are delivered, or only as they are begun."""


class StalenessLimit:
    """Tells which episodes are too old for delivery. An episode that is too old stays too old.

    Args:
        max_staleness: maximum age of a token, in weight versions.
        version: returns the current weight version.

    Examples:
        >>> from torchrl_mt.collectors.episode import Turn
        >>> from torchrl_mt.engines import Completion
        >>> played = Episode(None, turns=[Turn([1], Completion([2], [-0.5], [3], "stop"))])
        >>> [StalenessLimit(1, lambda: version).is_exceeded([played]) for version in (3, 4, 5)]
        [False, False, True]
    """

    def __init__(self, max_staleness: int, version: Callable[[], int]) -> None:
        self.max_staleness = max_staleness
        self.version = version

    def is_exceeded(self, episodes: Iterable[Episode]) -> bool:
        """Whether one of the episodes, running or finished, is too old."""
        version = self.version()
        return any((episode.age(version) or 0) > self.max_staleness for episode in episodes)


class Lead:
    """How many episodes may be begun, by the number of deliveries and of weight updates.

    The trainer has finished with the batches that were delivered before its last update or before it
    asked for the next batch. An update without a batch of its own (such as the second update for one
    batch) allows no further episodes.

    Args:
        max_staleness: number of batches that episodes may be ahead of training.
        batch_size: episodes per batch.
        version: the weight version at the beginning.

    Examples:
        >>> lead = Lead(max_staleness=1, batch_size=4, version=0)
        >>> lead.allowed(version=0), lead.allowed(version=1)
        (8, 8)
        >>> lead.deliver(4, version=1)
        >>> lead.allowed(version=1), lead.allowed(version=2), lead.allowed(version=3)
        (8, 12, 12)
    """

    def __init__(self, max_staleness: int, batch_size: int, version: int) -> None:
        self.max_staleness = max_staleness
        self.batch_size = batch_size
        self._first_version = self._last_version = version
        self._delivered = self._done_with = 0

    def ask(self) -> None:
        """Record that the trainer asks for the next batch."""
        self._done_with = self._delivered

    def deliver(self, delivered: int, version: int) -> None:
        """Record a delivery: episodes delivered so far, and the weight version."""
        self._done_with, self._last_version = self._delivered, version
        self._delivered = delivered

    def allowed(self, version: int) -> int:
        """Number of episodes that may be begun in all, at a weight version."""
        done_with = self._delivered if version > self._last_version else self._done_with
        by_updates = self.updates(version) * self.batch_size
        return (self.max_staleness + 1) * self.batch_size + min(by_updates, done_with)

    def updates(self, version: int) -> int:
        """Number of updates since the beginning, at a weight version."""
        return version - self._first_version
