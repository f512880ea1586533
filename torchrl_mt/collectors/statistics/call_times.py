"""The calls of an episode: those that run, and the time spent in them.

Time counts for the engine while a call of the engine runs, else for the environment while one of its
calls runs; the rest is waiting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["CallTimes"]

Kind = Literal["engine", "environment"]


class CallTimes:
    """The running calls of an episode, and the seconds spent in calls.

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
        """Whether a warning was logged that a call takes long."""
        self.elsewhere: tuple[float, str] | None = None
        """Since when the call runs that has run longest in another process, and its name."""
        self._under_way: dict[int, tuple[Kind, str, float]] = {}
        self._number = 0
        self._changed = time.monotonic()

    @contextmanager
    def call(self, kind: Kind, what: str) -> Iterator[None]:
        """Record a call, named ``what`` in the log, for as long as the context lasts."""
        self._add_time()
        self._number += 1
        number = self._number
        self._under_way[number] = (kind, what, self._changed)
        try:
            yield
        finally:
            self._add_time()
            del self._under_way[number]

    def longest(self) -> tuple[float, str]:
        """Seconds and name of the call that has run longest; ``(0.0, "")`` if none runs."""
        calls = list(self._under_way.values())
        engine = [(since, what) for kind, what, since in calls if kind == "engine"]
        # A workflow's time counts from the engine's last response.
        others = [(max(since, self._changed), what) for _, what, since in calls]
        if self.elsewhere is not None:
            others.append(self.elsewhere)
        since, what = min(engine or others, default=(time.monotonic(), ""))
        return max(time.monotonic() - since, 0.0) if what else 0.0, what

    def _add_time(self) -> None:
        """Add the time since the last change to the engine or the environment."""
        now = time.monotonic()
        kinds = {kind for kind, _, _ in self._under_way.values()}
        if kinds:
            self.seconds["engine" if "engine" in kinds else "environment"] += now - self._changed
        self._changed = now
