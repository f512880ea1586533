"""Event loops whose clock stands still until something hangs and nothing else is left to do.

Then it jumps to the next point of time that somebody waits for. So a limit of time is reached at once
by what hangs and by nothing else, on a machine however slow.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

LIMIT = 3600.0
"""Seconds; a limit that only the loop's clock reaches."""


class Loop(asyncio.SelectorEventLoop):
    """What ``asyncio.new_event_loop`` is to make."""

    def __init__(self) -> None:
        self.now, self.hanging = 0.0, 0
        self.lock = threading.Lock()
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

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
    """Waits for events; where there are none, it does not wait for a point of time but goes there."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None):
        if timeout:
            found = super().select(0 if self.loop.hanging else None)
            if not found and self.loop.hanging:
                self.loop.now += timeout
            return found
        return super().select(timeout)


async def hang() -> None:
    """Never return."""
    loop = asyncio.get_running_loop()
    with loop.hangs() if isinstance(loop, Loop) else nullcontext():
        await asyncio.Event().wait()
