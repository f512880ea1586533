"""An event loop in a thread of its own, driven from ordinary code.

Works where a loop runs already (a notebook), lets Ctrl-C through even where a blocking call never
returns, and leaves nothing when closed but such calls, in threads that die with the process. What a task
raises is the task's own, ``SystemExit`` and ``KeyboardInterrupt`` too: it does not end the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from torchrl_mt.collectors.behind import Behind, cancel_all, make_task

__all__ = ["LoopClosedError", "LoopThread", "call_in_thread", "start_daemon"]

_T = TypeVar("_T")
_logger = logging.getLogger("torchrl_mt")

CLOSE_SECONDS = 10.0
"""Seconds for the background to end where who closes a loop does not say how many."""
INTERRUPT_SECONDS = 5.0
"""Seconds for the background to end before an interrupt goes on; it may take longer."""
_PATIENCE = 5.0
"""Seconds for tasks to end when nobody asked to close: at garbage collection or interpreter exit."""
_GRACE = 0.5
"""Seconds for a loop to stop whose tasks did not end in time."""
_FROM_WITHIN = (
    "this was called in the event loop that plays the episodes, which would wait for itself: call it "
    "from outside of workflows and inline environments, or in a thread."
)


async def call_in_thread(
    function: Callable[..., _T], *args: Any, unclaimed: Callable[[_T], object] | None = None
) -> _T:
    """Call a blocking function in a thread of its own.

    Unlike ``asyncio.to_thread``, a call that never returns keeps neither the process from ending nor
    other calls from beginning. It runs in a copy of the caller's context.

    Args:
        function: what to call.
        *args: its arguments.
        unclaimed: called, in a thread too, with a result that came after the caller was cancelled or
            its loop closed.

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
            hand_back(returned.set_result, result, unclaimed)

    def hand_back(
        setter: Callable[[Any], None], value: Any, too_late: Callable[[Any], object] | None = None
    ) -> None:
        def settle() -> None:
            if not returned.done():
                setter(value)
            elif too_late is not None:
                start_daemon(too_late, value)

        try:
            loop.call_soon_threadsafe(settle)
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


def start_daemon(function: Callable[..., object], *args: Any) -> None:
    """Call a function in a thread that dies with the process."""
    threading.Thread(target=function, args=args, name="torchrl_mt-call", daemon=True).start()


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
        self._loop.set_task_factory(make_task)
        self._jobs = _Jobs(self._loop)
        # A daemon, so that a script which dies without closing does not hang on it.
        self._thread = threading.Thread(target=self._jobs.serve, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._closer = weakref.finalize(self, _close, self._thread, self._jobs, _PATIENCE)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._closer.alive

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end and return its result; an interrupt cancels it first.

        Raises:
            LoopClosedError: if the thread is closed, or has ended by itself, before or while the
                coroutine runs; what has ended it is the cause.
            RuntimeError: if called in the loop itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(_FROM_WITHIN)
        job = _Job(coroutine)
        try:
            with self._lock:
                if self.closed:
                    raise LoopClosedError("the event loop's thread is closed.")
                future = self._jobs.submit(self._jobs.run(job))
        except LoopClosedError:
            coroutine.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self.closed:
                raise LoopClosedError("the event loop's thread was closed.") from None
            raise
        except BaseException:
            if not future.done():
                # Cancellation is only requested, so wait for the task.
                ending = []
                with self._lock, suppress(LoopClosedError):
                    ending += [] if self.closed else [self._jobs.submit(job.end())]
                concurrent.futures.wait(ending)
            raise

    def close(self, timeout: float | None = None) -> bool:
        """Cancel what runs, wait for the background, and end the thread.

        Args:
            timeout: seconds to wait for both; if ``None``, as long as it takes for what runs and
                :data:`CLOSE_SECONDS` for the background.

        Returns:
            Whether everything has ended in time, or was given up after :data:`CLOSE_SECONDS`. What has
            not is left behind in a daemon thread.

        Raises:
            RuntimeError: if called in the loop itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(_FROM_WITHIN)
        with self._lock:
            first = self._closer.detach() is not None
        if first:
            return _close(self._thread, self._jobs, timeout)
        self._thread.join(timeout)
        return not self._thread.is_alive()


class LoopClosedError(RuntimeError):
    """The loop that was to run a coroutine, or was running it, is closed."""


class _Job:
    """A coroutine that somebody waits for, and the task that runs it once it has begun."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.coroutine = coroutine
        self.task: asyncio.Task[Any] | None = None

    async def end(self) -> None:
        """Cancel the task and wait until it has ended, and what it left behind."""
        await cancel_all([] if self.task is None else [self.task])
        await Behind.of(asyncio.get_running_loop()).wait(INTERRUPT_SECONDS)


class _Jobs:
    """A loop, the coroutines that it was given, and those who wait for them.

    Args:
        loop: a loop that does not run yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.stopping = False
        """Whether the loop is to end."""
        self.waiting: set[concurrent.futures.Future[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._error: LoopClosedError | None = None
        """What those get who come when the loop has ended."""

    def serve(self) -> None:
        """Run the loop until it is to end; who still waits then gets an error."""
        error = LoopClosedError("the event loop's thread was closed.")
        try:
            while not self.stopping:
                # asyncio lets these out of the loop, beside giving them to whoever waits for the task.
                with suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
        except BaseException as cause:
            _logger.error("the event loop's thread has ended", exc_info=cause)
            error = LoopClosedError(
                f"the event loop's thread has ended for {type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
        with self._lock:
            self._error = error
        for future in tuple(self.waiting):
            with suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Have the loop run a coroutine.

        Raises:
            LoopClosedError: if the loop has ended.
        """
        with self._lock:
            if self._error is not None:
                coroutine.close()
                raise self._error
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self.waiting.add(future)
        future.add_done_callback(self.waiting.discard)
        return future

    async def run(self, job: _Job) -> Any:
        """Run a coroutine that :meth:`settle` can end."""
        task: Any = asyncio.current_task()
        job.task = task
        self._tasks.add(task)
        try:
            return await job.coroutine
        finally:
            self._tasks.discard(task)

    async def settle(self, seconds: float) -> bool:
        """Let the coroutines end what they began, cancel what is left, and wait for the background.

        Returns:
            Whether the background has ended by itself, in so many seconds.
        """
        deadline = self.loop.time() + seconds
        behind = Behind.of(self.loop)
        await cancel_all(set(self._tasks))
        await cancel_all(asyncio.all_tasks() - set(behind.tasks) - {asyncio.current_task()})
        in_time = await behind.settle(max(deadline - self.loop.time(), 0.0))
        await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})
        return in_time


def _close(thread: threading.Thread, jobs: _Jobs, timeout: float | None) -> bool:
    """End a loop and its thread; tell whether all of it has ended in time."""
    in_time = True
    with suppress(LoopClosedError):
        settled = jobs.submit(jobs.settle(CLOSE_SECONDS if timeout is None else timeout))
        # A background that is given up still has to end.
        concurrent.futures.wait([settled], None if timeout is None else timeout + _GRACE)
        in_time = settled.done() and (timeout is None or settled.result())
        patience = None if settled.done() else _GRACE
        for future in jobs.waiting - {settled}:
            future.cancel()
        jobs.stopping = True
        jobs.loop.call_soon_threadsafe(jobs.loop.stop)
        thread.join(patience)
        if not thread.is_alive():
            jobs.loop.close()
    # A loop that has ended by itself stays open for the tasks that it leaves behind.
    return in_time
