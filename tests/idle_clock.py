"""Event loops whose clock jumps ahead where something hangs and nothing else is left to do.

So a limit of time that no machine is slow enough to reach is reached at once by what hangs, and by
nothing else.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

LIMIT = 36_000.0
"""Seconds of a jump, and of a limit that is reached by a jump only."""


class Loop(asyncio.SelectorEventLoop):
    """What ``asyncio.new_event_loop`` is to make."""

    def __init__(self) -> None:
        self.ahead, self.hanging = 0.0, 0
        self.lock = threading.Lock()
        super().__init__(_Selector(self))

    def time(self) -> float:
        return super().time() + self.ahead

    def jump(self, seconds: float = LIMIT) -> None:
        """Let time pass; to be called in another thread."""
        self.call_soon_threadsafe(self._jump, seconds)

    def _jump(self, seconds: float) -> None:
        self.ahead += seconds

    @contextmanager
    def hangs(self) -> Iterator[None]:
        """Time may go on while the caller, in whatever thread, hangs."""
        with self.lock:
            self.hanging += 1
        self.call_soon_threadsafe(lambda: None)  # to look at the clock anew
        try:
            yield
        finally:
            with self.lock:
                self.hanging -= 1


class _Selector(selectors.DefaultSelector):
    """Waits for events; in place of waiting for a point of time, it may jump."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None):
        if not timeout or not self.loop.hanging:
            return super().select(timeout)
        events = super().select(0)
        if not events:
            self.loop.ahead += LIMIT
        return events


async def hang() -> None:
    """Never return."""
    loop = asyncio.get_running_loop()
    with loop.hangs() if isinstance(loop, Loop) else nullcontext():
        await asyncio.Event().wait()
