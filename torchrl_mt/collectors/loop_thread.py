"""An event loop in a thread of its own, driven from ordinary code.

Works where a loop runs already (a notebook), lets Ctrl-C through even where a blocking call never
returns, and leaves nothing behind when closed but such calls, in threads that die with the process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["LoopClosedError", "LoopThread", "call_in_thread", "cancel_all"]

_T = TypeVar("_T")
_PATIENCE = 5.0
"""Seconds for tasks to end when nobody asked to close: at garbage collection or interpreter exit."""
_GRACE = 0.5
"""Seconds for a loop to stop whose tasks did not end in time."""


async def call_in_thread(function: Callable[..., _T], *args: Any) -> _T:
    """Call a blocking function in a thread of its own.

    Unlike ``asyncio.to_thread``, a call that never returns keeps neither the process from ending nor
    other calls from beginning.

    Args:
        function: what to call.
        *args: its arguments.

    Returns:
        What it returned.

    Raises:
        RuntimeError: if it raised ``StopIteration``, which no future can carry.

    Examples:
        >>> asyncio.run(call_in_thread(sum, [1, 2]))
        3
    """
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
            hand_back(returned.set_result, result)

    def hand_back(setter: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if returned.done() else setter(value))

    threading.Thread(target=work, name="torchrl_mt-call", daemon=True).start()
    return await returned


class LoopThread:
    """Run coroutines in a background thread.

    Args:
        name: name of the thread.

    Examples:
        >>> import asyncio
        >>> thread = LoopThread("example")
        >>> thread.run(asyncio.sleep(0, result="done"))
        'done'
        >>> thread.close()
        True
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a script which dies without closing does not hang on it.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._jobs = _Jobs()
        self._closer = weakref.finalize(
            self, _close, self._loop, self._thread, self._jobs, _PATIENCE
        )

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._closer.alive

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end and return its result; an interrupt cancels it first.

        Raises:
            LoopClosedError: if the thread is closed, before or while the coroutine runs.
        """
        with self._lock:
            if self.closed:
                coroutine.close()
                raise LoopClosedError("the event loop's thread is closed.")
            job = _Job(coroutine)
            future = asyncio.run_coroutine_threadsafe(self._jobs.run(job), self._loop)
            self._jobs.waiting.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self.closed:
                raise LoopClosedError("the event loop's thread was closed.") from None
            raise
        except BaseException:
            if not future.done():
                # Cancellation is only requested, so wait for the task.
                with self._lock:
                    ended = None if self.closed else job.end_in(self._loop)
                concurrent.futures.wait([] if ended is None else [ended])
            raise
        finally:
            self._jobs.waiting.discard(future)

    def close(self, timeout: float | None = None) -> bool:
        """Cancel what runs and end the thread.

        Args:
            timeout: seconds to wait for what runs; as long as it takes if ``None``.

        Returns:
            Whether everything has ended. What has not is left behind in a daemon thread.
        """
        with self._lock:
            first = self._closer.detach() is not None
        if first:
            return _close(self._loop, self._thread, self._jobs, timeout)
        self._thread.join(timeout)
        return not self._thread.is_alive()


class LoopClosedError(RuntimeError):
    """The loop that was to run a coroutine, or was running it, is closed."""


class _Job:
    """A coroutine that somebody waits for, and the task that runs it once it has begun."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.coroutine = coroutine
        self.task: asyncio.Task[Any] | None = None

    def end_in(self, loop: asyncio.AbstractEventLoop) -> concurrent.futures.Future[None]:
        """Have the task cancelled; the future is done once it has ended."""
        return asyncio.run_coroutine_threadsafe(self._end(), loop)

    async def _end(self) -> None:
        await cancel_all([] if self.task is None else [self.task])


class _Jobs:
    """The coroutines that a loop was given, and those who wait for them."""

    def __init__(self) -> None:
        self.waiting: set[concurrent.futures.Future[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, job: _Job) -> Any:
        """Run a coroutine that :meth:`settle_in` can end."""
        task: Any = asyncio.current_task()
        job.task = task
        self._tasks.add(task)
        try:
            return await job.coroutine
        finally:
            self._tasks.discard(task)

    def settle_in(self, loop: asyncio.AbstractEventLoop) -> concurrent.futures.Future[None]:
        """Have everything in the loop cancelled; the future is done once it has ended."""
        return asyncio.run_coroutine_threadsafe(self._settle(), loop)

    async def _settle(self) -> None:
        """Let the coroutines end what they began, then cancel what is left."""
        await cancel_all(set(self._tasks))
        await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _close(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, jobs: _Jobs, timeout: float | None
) -> bool:
    """End a loop and its thread; tell whether all of it has ended in time."""
    settled = jobs.settle_in(loop)
    in_time = bool(concurrent.futures.wait([settled], timeout).done)
    for future in tuple(jobs.waiting):
        future.cancel()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(None if in_time else _GRACE)
    if not thread.is_alive():
        loop.close()
    return in_time
