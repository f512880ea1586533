"""Daemon threads for blocking calls and for background work.

A thread that never returns does not keep the process from ending, nor other threads from starting.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = [
    "WatchedThread",
    "call_in_thread",
    "call_user",
    "close_env",
    "run_all",
    "settle",
    "start_daemon",
    "wait_all",
    "when_forgotten",
    "within",
]

_T = TypeVar("_T")
_logger = logging.getLogger("torchrl_mt")


def start_daemon(function: Callable[..., object], *args: Any) -> threading.Thread:
    """Call a function in a daemon thread."""
    thread = threading.Thread(target=function, args=args, name="torchrl_mt-call", daemon=True)
    thread.start()
    return thread


async def call_in_thread(
    function: Callable[..., _T], *args: Any, unclaimed: Callable[[_T], object] | None = None
) -> _T:
    """Call a blocking function in its own daemon thread, with a copy of the caller's context.

    ``asyncio.to_thread`` uses a shared pool, which calls that never return use up, and which the process
    waits for at its end.

    Args:
        function: the function to call.
        *args: arguments of the function.
        unclaimed: called in a thread with a result that came after the caller was cancelled.

    Returns:
        The function's result.

    Raises:
        RuntimeError: if the function raised ``StopIteration``, which no future can carry.

    Examples:
        >>> asyncio.run(call_in_thread(sum, [1, 2]))
        3
    """
    # A future of concurrent.futures would cost a fifth of a short call, by its lock and its wrapping.
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[_T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(_call, function, *args)
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
        except RuntimeError:  # The loop is closed.
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


async def call_user(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function and await its result.

    An ``async`` function runs on the event loop, any other in a thread.

    Examples:
        >>> asyncio.run(call_user(sum, [1, 2]))
        3
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await call_in_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


async def wait_all(coroutines: Iterable[Awaitable[_T]]) -> list[_T]:
    """Await all and return their results in order; if one fails, cancel the others and raise."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_all(awaitables: Sequence[Awaitable[_T]]) -> list[_T]:
    """Run :func:`wait_all` on an event loop of its own; in another thread if a loop runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait_all(awaitables))
    outcome: Future[list[_T]] = Future()
    # A daemon, so that an interrupt (in a notebook, say) does not wait for the awaitables.
    start_daemon(settle, outcome, lambda: asyncio.run(wait_all(awaitables)))
    return outcome.result()


def settle(result: Future[Any], function: Callable[..., Any], *args: Any) -> None:
    """Call a function and settle a future with its result or error."""
    try:
        value = _call(function, *args)
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(value)


def _call(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function; ``StopIteration``, which no future can carry, becomes a ``RuntimeError``."""
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration.") from error


def when_forgotten(owner: Any, function: Callable[..., object], *args: Any) -> weakref.finalize:
    """Call a function, which may block, once its owner is garbage, or as the interpreter exits.

    Garbage is collected in any thread, such as that of an event loop, which must not wait: outside of
    the main thread, the function is called in a thread of its own.
    """

    def call() -> None:
        if threading.current_thread() is threading.main_thread():
            function(*args)
        else:
            start_daemon(function, *args)

    return weakref.finalize(owner, call)


class WatchedThread(threading.Thread):
    """A daemon thread that keeps and logs the error of its function. It starts at once.

    Args:
        function: the function to call.
        is_expected: returns true if an error is to be ignored, such as after closing.
        name: name of the thread.
    """

    def __init__(
        self, function: Callable[[], object], is_expected: Callable[[], bool], name: str
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        """The function's error, unless it was expected."""
        self._function = function
        self._is_expected = is_expected
        self.start()

    def run(self) -> None:
        """Call the function; keep and log its error."""
        try:
            self._function()
        except BaseException as error:
            if not self._is_expected():
                self.error = error
                _logger.warning("the thread %s has ended.", self.name, exc_info=error)


async def within(
    work: Coroutine[Any, Any, _T],
    seconds: float | None,
    error: Exception,
    *,
    time_is_up: Callable[[], object] | None = None,
) -> _T:
    """Await a coroutine for at most ``seconds``; without a limit if ``None``.

    On a timeout, ``time_is_up`` is called before the coroutine is cancelled. The coroutine runs in its
    own task, so that its own cancellations and timeouts are not taken for ours.

    Raises:
        Exception: ``error``, on a timeout.
    """
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    # Retrieve errors after a timeout, or asyncio logs them.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return task.result()
        if time_is_up is not None:
            time_is_up()
        raise error
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def close_env(env: Any) -> None:
    """Close an environment of any class that can be closed; an error is logged. Call it in a thread."""

    async def wait_for(closing: Awaitable[Any]) -> None:
        await closing

    try:
        closing = env.close() if callable(getattr(env, "close", None)) else None
        if inspect.isawaitable(closing):
            asyncio.run(wait_for(closing))
    except BaseException as error:
        _logger.warning("closing %s failed.", type(env).__name__, exc_info=error)
