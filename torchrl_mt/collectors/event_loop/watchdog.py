"""Says what blocks an event loop, from another thread: a loop that is blocked cannot say it itself."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback

__all__ = ["Watchdog"]

_logger = logging.getLogger("torchrl_mt")

_LOOK_SECONDS = 1.0
"""Seconds between two looks."""
_MOST_LOOKS = 5
"""Looks at which a loop may have not answered. Looks, not seconds: while native code holds the
interpreter's lock, nobody looks."""
_MOST_FRAMES = 40


class Watchdog:
    """Logs a warning, once per block, with the stack of a loop's thread that does not answer.

    Args:
        loop: the loop.
        thread: the thread that runs it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop, self._thread = loop, thread
        self._unanswered = 0
        self._ended = threading.Event()
        self._looking = threading.Thread(
            target=self._watch, name="torchrl_mt-watchdog", daemon=True
        )

    def start(self) -> None:
        """Look from now on, in a thread."""
        self._looking.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._looking.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Ask the loop for a sign of life; warn if it has not given one for some looks."""
        self._unanswered += 1
        if self._unanswered == 1:
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # It was closed in this moment.
                return
        elif self._unanswered == _MOST_LOOKS + 1:
            self._warn()

    def _answer(self) -> None:
        self._unanswered = 0

    def _warn(self) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame, limit=_MOST_FRAMES))
        _logger.warning(
            "something blocks the event loop of the thread %s for more than %.0f s: no episode goes on "
            "meanwhile, and no time limit ends one. An `async def` (of an agent, a workflow, an "
            "environment or a callable) must await what takes time; a plain `def` runs in a thread and "
            "may block, unless the environment is inline. A blocking client (openai.OpenAI, say) that "
            "asks the collector's own server from here waits for itself for ever. The thread is at:\n%s",
            *(self._thread.name, _MOST_LOOKS * _LOOK_SECONDS, stack.rstrip()),
        )
