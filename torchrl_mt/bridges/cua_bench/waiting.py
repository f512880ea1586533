"""Who waits for a loader, for how long, and whether anybody else could end the waiting.

A loader may raise only if its caller would wait for ever. Another thread that may answer makes waiting
legitimate; then a warning tells what is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from weakref import WeakSet

__all__ = ["Callers", "Wait"]

_WARN_AFTER = 10.0
"""Seconds of waiting before a warning."""
_CERTAIN_AFTER = 0.2
"""Seconds for which nothing must be able to come, since an episode is in no slot between two steps."""

_logger = logging.getLogger("torchrl_mt")


class Callers:
    """The threads that take batches of a loader and answer them."""

    def __init__(self) -> None:
        self.takers: set[int] = set()
        self.answerers: set[int] = set()
        self._older = WeakSet(threading.enumerate())
        """Threads that were there before the loader and did not make it: they hardly know of it."""
        self._older.discard(threading.current_thread())

    @property
    def is_alone(self) -> bool:
        """Whether this thread is the only one that takes and answers, as far as can be told.

        Before it has answered, any other thread may still come to do so: the one that made the loader,
        and those that were started since.
        """
        me = threading.current_thread()
        if (self.takers | self.answerers) - {me.ident}:
            return False
        return me.ident in self.answerers or not any(
            thread is not me
            and thread not in self._older
            and not thread.name.startswith("torchrl_mt-")
            for thread in threading.enumerate()
        )


class Wait:
    """One call that waits.

    Args:
        warned: the kinds of warnings that were given; shared by the calls, so that each is given once.
    """

    def __init__(self, warned: set[str]) -> None:
        self._warned = warned
        self._begin = time.monotonic()
        self._stuck_since: float | None = None

    def is_stuck(self, stuck: bool) -> bool:
        """Record whether nothing can come; return whether it was so at all looks for a while."""
        now = time.monotonic()
        if not stuck:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        return self._stuck_since is not None and now - self._stuck_since >= _CERTAIN_AFTER

    def warn(self, kind: str, message: str) -> None:
        """Log a warning if the call has waited for long, once per kind."""
        waited = time.monotonic() - self._begin
        if waited >= _WARN_AFTER and kind not in self._warned:
            self._warned.add(kind)
            _logger.warning("a loader's caller has waited for %.0f s: %s", waited, message)
