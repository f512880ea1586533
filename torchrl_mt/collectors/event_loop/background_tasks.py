"""Background tasks of an event loop, such as closing environments.

No episode waits for them. Closing the loop does, for a limited time. Errors are logged once per cause.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Coroutine, Iterable
from contextvars import ContextVar
from typing import Any

__all__ = ["BackgroundTasks", "cancel_all"]

_logger = logging.getLogger("torchrl_mt")


class BackgroundTasks:
    """The background tasks of one event loop.

    Examples:
        >>> async def main():
        ...     background = BackgroundTasks.of(asyncio.get_running_loop())
        ...     background.start(asyncio.sleep(0), "a nap")
        ...     return await background.settle(None)
        >>> asyncio.run(main())
        True
    """

    def __init__(self) -> None:
        self.pending: set[asyncio.Task[None]] = set()
        """Running tasks that :meth:`start` began."""
        self._members: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._logged: set[tuple[str, str]] = set()

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> BackgroundTasks:
        """Background tasks of a loop."""
        return _of_loop.setdefault(loop, BackgroundTasks())

    @staticmethod
    def make_task(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Task factory of a loop that remembers which tasks were begun by background tasks."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **kwargs)
        if (background := _begun_by.get()) is not None:
            background._members.add(task)
        return task

    def __contains__(self, task: asyncio.Task[Any]) -> bool:
        """Whether a task is a background task or, with :meth:`make_task`, was begun by one."""
        return task in self.pending or task in self._members

    def start(self, work: Coroutine[Any, Any, object], what: str) -> None:
        """Run a coroutine in the background, named ``what`` in the log. Call this in the loop."""
        task = asyncio.ensure_future(self._run(work, what))
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)

    async def wait(self, seconds: float | None) -> None:
        """Wait until all have ended, at most ``seconds``; without a limit if ``None``."""
        if self.pending:
            await asyncio.wait(set(self.pending), timeout=seconds)

    async def settle(self, seconds: float | None) -> bool:
        """Wait like :meth:`wait`, cancel the rest, and return whether there was none."""
        await self.wait(seconds)
        left = set(self.pending)
        if left:
            _logger.warning(
                "%d environments did not close within %.2g seconds and are left behind.",
                len(left),
                seconds,
            )
            await cancel_all(left)
        return not left

    async def _run(self, work: Coroutine[Any, Any, object], what: str) -> None:
        """Run a coroutine and log its error, also ``SystemExit``."""
        _begun_by.set(self)
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            cause = (what, type(error).__name__)
            if cause not in self._logged:
                self._logged.add(cause)
                _logger.warning(
                    "%s failed; further errors of this type are not logged.", what, exc_info=error
                )


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, BackgroundTasks] = (
    weakref.WeakKeyDictionary()
)
_begun_by: ContextVar[BackgroundTasks | None] = ContextVar("torchrl_mt_background", default=None)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
