"""Which of several servers takes the next request: the one with the fewest.

A server that failed is left alone for a while, and then tried by one request. Meanwhile it is chosen
only if there is no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

__all__ = ["ServerLoad", "choose"]

_numbers = itertools.count(1)


@dataclass(eq=False)
class ServerLoad:
    """One server, as far as requests have shown. Not thread-safe.

    Examples:
        >>> servers = [ServerLoad("http://a"), ServerLoad("http://b")]
        >>> servers[0].begin()
        >>> choose(servers).address
        'http://b'
        >>> servers[1].fail(60.0)
        >>> choose(servers).address
        'http://a'
    """

    address: str
    running: int = 0
    """Number of open requests."""
    last: int = 0
    """Number of the request that it took last."""
    away_until: float = 0.0
    """When to try it again; 0 while it answers."""
    pause: float = 0.0
    """Seconds for which it was left alone last; 0 while it answers."""
    is_tried: bool = False
    """Whether a request is finding out if it answers again."""

    @property
    def is_away(self) -> bool:
        """Whether its pause lasts."""
        return self.away_until > monotonic()

    @property
    def is_open(self) -> bool:
        """Whether it takes requests, or the one that tries it."""
        return not self.away_until or not (self.is_tried or self.is_away)

    def begin(self) -> None:
        """A request goes to it."""
        self.running += 1
        self.last = next(_numbers)
        self.is_tried = bool(self.away_until)

    def end(self) -> None:
        """A request has ended, however."""
        self.running -= 1
        self.is_tried = False

    def fail(self, pause: float, longest: float | None = None) -> None:
        """Leave it alone for ``pause`` seconds, doubled with each failure in a row up to ``longest``."""
        self.pause = min(2 * self.pause or pause, longest or pause)
        self.away_until = monotonic() + self.pause

    def works(self) -> None:
        """It answers."""
        self.away_until = self.pause = 0.0


_S = TypeVar("_S", bound=ServerLoad)


def choose(servers: Sequence[_S]) -> _S:
    """The server with the fewest requests, in turns; if none is open, the one to be tried first."""
    free = [each for each in servers if each.is_open]
    if not free:
        return min(servers, key=lambda each: each.away_until)
    return min(free, key=lambda each: (each.running, each.last))
