"""How far ahead of the training episodes may be played, and how old they may be when they come.

However many updates there are, at most ``max_staleness + 1`` batches are begun beyond those that the
trainer has done with; and no more than one for each update beyond as many in the beginning. What is
delivered has no token that is more than ``max_staleness`` versions old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from torchrl_mt.collectors.episode import Episode

__all__ = ["Lead", "StalenessLimit", "StalenessRule"]

StalenessRule = Literal["delivery", "admission"]
"""When staleness is bounded: as episodes are delivered, or only as they are begun."""


class StalenessLimit:
    """Which episodes are too old to be delivered. Versions only grow, so they stay so.

    Args:
        max_staleness: most versions that a token may be old.
        version: tells the weight version now.

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
        """Whether one of the episodes, which may be under way, is too old."""
        version = self.version()
        return any((episode.age(version) or 0) > self.max_staleness for episode in episodes)


class Lead:
    """How many episodes may be begun, by what was delivered and how often weights were updated.

    The trainer has done with the batches before an update, or before it asked for another batch. An
    update that no batch stands against (the weights of a run that goes on, the second of two updates
    for one batch) lets nothing begin but what is asked for.

    Args:
        max_staleness: how many batches episodes may be ahead of the one that is being trained on.
        batch_size: episodes a batch.
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
        """Enter that the next batch is asked for."""
        self._done_with = self._delivered

    def deliver(self, delivered: int, version: int) -> None:
        """Enter a delivery: episodes so far, this batch included, and the weight version then."""
        self._done_with, self._last_version = self._delivered, version
        self._delivered = delivered

    def allowed(self, version: int) -> int:
        """How many episodes may be begun in all, at a weight version."""
        done_with = self._delivered if version > self._last_version else self._done_with
        by_updates = self.updates(version) * self.batch_size
        return (self.max_staleness + 1) * self.batch_size + min(by_updates, done_with)

    def updates(self, version: int) -> int:
        """How many updates there were since the beginning, at a weight version."""
        return version - self._first_version
