"""What a loop runs behind everything else: nobody waits for it but who ends the loop, and not for ever.

An error there is logged, once for each cause, and reaches nobody.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Coroutine, Iterable
from contextvars import ContextVar
from typing import Any

__all__ = ["Behind", "cancel_all", "make_task"]

_logger = logging.getLogger("torchrl_mt")


class Behind:
    """The background of one event loop.

    Examples:
        >>> async def main():
        ...     behind = Behind.of(asyncio.get_running_loop())
        ...     behind.begin(asyncio.sleep(0), "a nap")
        ...     return await behind.settle(None)
        >>> asyncio.run(main())
        True
    """

    def __init__(self) -> None:
        self._waited_for: set[asyncio.Task[None]] = set()
        self._logged: set[tuple[str, str]] = set()
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """Those of the background; where :func:`make_task` is the loop's factory, also those that they
        have begun themselves."""

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> Behind:
        """The background of a loop."""
        return _of_loop.setdefault(loop, Behind())

    def begin(self, work: Coroutine[Any, Any, object], what: str) -> None:
        """Run a coroutine in the background; to be called in the loop.

        Args:
            work: the coroutine.
            what: its name in the log.
        """
        token = _current.set(self)
        try:
            task = asyncio.ensure_future(self._watched(work, what))
        finally:
            _current.reset(token)
        self.tasks.add(task)
        self._waited_for.add(task)
        task.add_done_callback(self._waited_for.discard)

    async def wait(self, seconds: float | None) -> None:
        """Wait until all of it has ended, at most so long; as long as it takes if ``None``."""
        if self._waited_for:
            await asyncio.wait(set(self._waited_for), timeout=seconds)

    async def settle(self, seconds: float | None) -> bool:
        """Wait until all of it has ended; cancel what has not.

        Args:
            seconds: how long to wait; as long as it takes if ``None``.

        Returns:
            Whether all has ended by itself.
        """
        await self.wait(seconds)
        left = set(self._waited_for)
        if left:
            _logger.warning(
                "%d environments did not close within %.2g seconds and are left behind.",
                len(left),
                seconds,
            )
            await cancel_all(left)
        return not left

    async def _watched(self, work: Coroutine[Any, Any, object], what: str) -> None:
        """Run a coroutine and log what it raises, ``SystemExit`` too."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            cause = (what, type(error).__name__)
            if cause not in self._logged:
                self._logged.add(cause)
                _logger.warning(
                    "%s failed; more of this cause are not logged.", what, exc_info=error
                )


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Behind] = weakref.WeakKeyDictionary()
_current: ContextVar[Behind | None] = ContextVar("torchrl_mt_behind", default=None)


def make_task(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """A loop's task factory, by which tasks that the background begins belong to it."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **kwargs)
    behind = _current.get()
    if behind is not None:
        behind.tasks.add(task)
    return task


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
