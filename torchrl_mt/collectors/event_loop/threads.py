"""Daemon threads: for calls that block, beside an event loop, and for work that goes on by itself.

A thread that never returns keeps neither the process from ending nor other threads from starting.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["WatchedThread", "call_in_thread", "settle", "start_daemon"]

_T = TypeVar("_T")
_logger = logging.getLogger("torchrl_mt")


def start_daemon(function: Callable[..., object], *args: Any) -> None:
    """Call a function in a thread that dies with the process."""
    threading.Thread(target=function, args=args, name="torchrl_mt-call", daemon=True).start()


async def call_in_thread(
    function: Callable[..., _T], *args: Any, unclaimed: Callable[[_T], object] | None = None
) -> _T:
    """Call a blocking function in a daemon thread of its own.

    ``asyncio.to_thread`` shares a pool: calls that never return use it up, and the process waits for
    them at its end. The function runs in a copy of the caller's context.

    Args:
        function: what to call.
        *args: its arguments.
        unclaimed: called, in a thread too, with a result that came after the caller was cancelled.

    Returns:
        What the function returned.

    Raises:
        RuntimeError: if it raised ``StopIteration``, which no future can carry.

    Examples:
        >>> asyncio.run(call_in_thread(sum, [1, 2]))
        3
    """
    # Not a future of concurrent.futures, whose lock and whose wrapping cost a fifth of a short call.
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[_T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *args)
        except StopIteration as error:
            stopped = RuntimeError("the function raised StopIteration.")
            stopped.__cause__ = error
            hand_back(returned.set_exception, stopped)
        except BaseException as error:
            hand_back(returned.set_exception, error)
        else:
            hand_back(returned.set_result, result, unclaimed)

    def hand_back(
        setter: Callable[[Any], None], value: Any, too_late: Callable[[Any], object] | None = None
    ) -> None:
        def set_or_hand_over() -> None:
            if not returned.done():
                setter(value)
            elif too_late is not None:
                start_daemon(too_late, value)

        try:
            loop.call_soon_threadsafe(set_or_hand_over)
        except RuntimeError:  # the loop is closed: nobody waits any more
            if too_late is not None:
                too_late(value)

    start_daemon(work)
    try:
        return await returned
    except asyncio.CancelledError:
        # The result may have come in the same iteration as the cancellation.
        arrived = returned.done() and not returned.cancelled() and returned.exception() is None
        if unclaimed is not None and arrived:
            start_daemon(unclaimed, returned.result())
        raise


def settle(result: Future[Any], function: Callable[..., Any], *args: Any) -> None:
    """Call a function and hand what it returns or raises to a future."""
    try:
        value = function(*args)
    except StopIteration as error:
        stopped = RuntimeError("the function raised StopIteration.")
        stopped.__cause__ = error
        result.set_exception(stopped)
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(value)


class WatchedThread(threading.Thread):
    """A daemon thread that keeps what its function raises; it starts at once.

    Args:
        function: what to call.
        is_expected: whether an error is of no concern, such as that of what was closed meanwhile.
        name: the name of the thread.
    """

    def __init__(
        self, function: Callable[[], object], is_expected: Callable[[], bool], name: str
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        """What the function raised."""
        self._function = function
        self._is_expected = is_expected
        self.start()

    def run(self) -> None:
        """Call the function."""
        try:
            self._function()
        except BaseException as error:
            if not self._is_expected():
                self.error = error
                _logger.warning("the thread %s has ended.", self.name, exc_info=error)
