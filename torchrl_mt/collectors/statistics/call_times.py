"""What an episode is waiting for, and where its time went.

At any moment its time is the engine's if a call of the engine is under way, else the environment's if
one of those is; the rest it waited for others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["CallTimes"]

Kind = Literal["engine", "environment"]


class CallTimes:
    """The calls of an episode that are under way, and the seconds of those that were.

    Examples:
        >>> calls = CallTimes()
        >>> with calls.call("environment", "Calculator.step"):
        ...     calls.longest()[1]
        'Calculator.step'
        >>> calls.longest()
        (0.0, '')
    """

    def __init__(self) -> None:
        self.seconds: dict[Kind, float] = {"engine": 0.0, "environment": 0.0}
        self.told = False
        """Whether the log says that a call takes long."""
        self._under_way: dict[int, tuple[Kind, str, float]] = {}
        self._number = 0
        self._changed = time.monotonic()

    @contextmanager
    def call(self, kind: Kind, what: str) -> Iterator[None]:
        """Enter a call for as long as the context lasts.

        Args:
            kind: whose time it is.
            what: its name in the log.
        """
        self._count()
        self._number += 1
        number = self._number
        self._under_way[number] = (kind, what, self._changed)
        try:
            yield
        finally:
            self._count()
            del self._under_way[number]

    def longest(self) -> tuple[float, str]:
        """The call that is waited for longest: for how many seconds, and its name."""
        calls = list(self._under_way.values())
        engine = [(since, what) for kind, what, since in calls if kind == "engine"]
        # A workflow is waited for from when the engine's last answer came.
        others = [(max(since, self._changed), what) for _, what, since in calls]
        since, what = min(engine or others, default=(time.monotonic(), ""))
        return max(time.monotonic() - since, 0.0) if what else 0.0, what

    def _count(self) -> None:
        """Add the time since something last changed to where it belongs."""
        now = time.monotonic()
        kinds = {kind for kind, _, _ in self._under_way.values()}
        if kinds:
            self.seconds["engine" if "engine" in kinds else "environment"] += now - self._changed
        self._changed = now
