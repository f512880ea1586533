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
from functools import partial
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
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()  # Cancelling the caller does not cancel the call.
    start_daemon(settle, result, contextvars.copy_context().run, function, *args)
    try:
        return await asyncio.wrap_future(result)
    except asyncio.CancelledError:
        if unclaimed is not None:
            result.add_done_callback(partial(_hand_over, unclaimed))
        raise


def _hand_over(unclaimed: Callable[[Any], object], result: Future[Any]) -> None:
    """Hand a result over in a thread; an error is nobody's concern."""
    if result.exception() is None:
        start_daemon(unclaimed, result.result())


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
