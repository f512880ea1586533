"""An event loop in a background thread, driven from ordinary code.

It works inside another running loop (a notebook). Ctrl-C gets through even if a blocking call never
returns. Closing leaves nothing behind but such calls, in daemon threads. An error of a task, also
``SystemExit`` or ``KeyboardInterrupt``, does not end the loop.

``asyncio.Runner`` runs its loop in the caller's thread, and ``anyio``'s portal ends with the first
``SystemExit`` of a task and waits for its tasks without limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from torchrl_mt.collectors.event_loop.background_tasks import BackgroundTasks, cancel_all
from torchrl_mt.collectors.event_loop.watchdog import Watchdog
from torchrl_mt.threads import when_forgotten

__all__ = ["LoopClosedError", "LoopThread"]

_T = TypeVar("_T")
_logger = logging.getLogger("torchrl_mt")

CLOSE_SECONDS = 10.0
"""Seconds that :meth:`LoopThread.close` waits for background tasks by default."""
INTERRUPT_SECONDS = 5.0
"""Seconds that an interrupt waits for background tasks, which may go on longer."""
_FORGOTTEN_SECONDS = 5.0
"""Seconds for tasks to end at garbage collection or interpreter exit, without a call of ``close``."""
_STOP_SECONDS = 0.5
"""Seconds for a loop to stop after its tasks did not end in time."""


class LoopThread:
    """Run coroutines in a background thread.

    Args:
        name: name of the thread.
        then: called once the thread was ended without :meth:`close`: as this object was garbage
            collected, or at the interpreter's exit.

    Examples:
        >>> thread = LoopThread("example")
        >>> thread.run(asyncio.sleep(0, result="done"))
        'done'
        >>> thread.close()
        True
    """

    def __init__(self, name: str, then: Callable[[], object] = lambda: None) -> None:
        self._served = _ServedLoop()
        # A daemon, so that a script that fails before close() does not hang.
        self._thread = threading.Thread(target=self._served.serve, name=name, daemon=True)
        self._thread.start()
        self._closer = when_forgotten(self, _end_forgotten, self._thread, self._served, then)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop."""
        return self._served.loop

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._closer.alive

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine and return its result. An interrupt cancels the coroutine.

        Raises:
            LoopClosedError: if the thread is closed or ends by itself, before or while the coroutine
                runs; the error that ended it is the cause.
            RuntimeError: if called in the loop itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            self._raise_called_in_loop()
        job = _Job(coroutine)
        try:
            future = self._served.submit(job.run(self._served.jobs))
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
                with suppress(LoopClosedError):
                    concurrent.futures.wait([self._served.submit(job.end())])
            raise

    def close(self, timeout: float | None = None) -> bool:
        """Cancel running coroutines, wait for background tasks, and end the thread.

        Args:
            timeout: seconds to wait in all. ``None`` waits for coroutines as long as they take, and
                :data:`CLOSE_SECONDS` for background tasks.

        Returns:
            False if something still runs after ``timeout``; it is left in a daemon thread. Without a
            timeout, always true.

        Raises:
            RuntimeError: if called in the loop itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            self._raise_called_in_loop()
        if self._closer.detach() is not None:
            return _close(self._thread, self._served, timeout)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _raise_called_in_loop(self) -> None:
        raise RuntimeError(
            "this was called in the event loop that plays the episodes, which would wait for itself: "
            "call it from outside of workflows and inline environments, or in a thread."
        )


class LoopClosedError(RuntimeError):
    """The loop of a coroutine is closed or has ended."""


class _Job:
    """A coroutine that a thread waits for, and its task once it runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None

    async def run(self, running: set[asyncio.Task[Any]]) -> Any:
        """Run the coroutine; its task is in ``running`` meanwhile."""
        self._task = asyncio.current_task()
        assert self._task is not None
        running.add(self._task)
        try:
            return await self._coroutine
        finally:
            running.discard(self._task)

    async def end(self) -> None:
        """Cancel the task, wait for its end, and wait a while for background tasks."""
        await cancel_all([] if self._task is None else [self._task])
        await BackgroundTasks.of(asyncio.get_running_loop()).wait(INTERRUPT_SECONDS)


class _ServedLoop:
    """A loop and the futures of its coroutines.

    The thread refers to this, not to the :class:`LoopThread`, so that the latter can be garbage
    collected.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(BackgroundTasks.make_task)
        self.stopping = False
        """Whether the loop is to end."""
        self.waiting: set[concurrent.futures.Future[Any]] = set()
        self.jobs: set[asyncio.Task[Any]] = set()
        self.refusal: LoopClosedError | None = None
        """Error for further coroutines, once the loop closes or has ended."""
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Run the loop until it is stopped; then fail the futures that are left."""
        error = LoopClosedError("the event loop's thread was closed.")
        watchdog = Watchdog(self.loop, threading.current_thread())
        watchdog.start()
        try:
            while not self.stopping:
                # asyncio raises these out of the loop as well as to the caller who awaits the task.
                with suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
        except BaseException as cause:
            _logger.error("the event loop's thread has ended.", exc_info=cause)
            error = LoopClosedError(
                f"the event loop's thread has ended for {type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
        watchdog.stop()
        with self._lock:
            self.refusal = error
        for future in tuple(self.waiting):
            with suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)

    def submit(
        self, coroutine: Coroutine[Any, Any, _T], *, closes: bool = False
    ) -> concurrent.futures.Future[_T]:
        """Schedule a coroutine; after one that ``closes``, no other is accepted.

        Raises:
            LoopClosedError: if the loop closes or has ended.
        """
        with self._lock:
            if self.refusal is not None:
                coroutine.close()
                raise self.refusal
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self.waiting.add(future)
            if closes:
                self.refusal = LoopClosedError("the event loop's thread is closed.")
        future.add_done_callback(self.waiting.discard)
        return future

    async def settle(self, seconds: float) -> bool:
        """Cancel the jobs, then all other tasks, and wait ``seconds`` for background tasks.

        Returns:
            Whether the background tasks ended in time.
        """
        deadline = self.loop.time() + seconds
        background, me = BackgroundTasks.of(self.loop), asyncio.current_task()
        await cancel_all(set(self.jobs))
        await cancel_all(
            task for task in asyncio.all_tasks() if task not in background and task is not me
        )
        in_time = await background.settle(max(deadline - self.loop.time(), 0.0))
        await cancel_all(task for task in asyncio.all_tasks() if task is not me)
        return in_time


def _close(thread: threading.Thread, served: _ServedLoop, timeout: float | None) -> bool:
    """End a loop and its thread; return whether everything ended in time."""
    seconds = CLOSE_SECONDS if timeout is None else timeout
    try:
        settled = served.submit(served.settle(seconds), closes=True)
    except LoopClosedError:  # The loop has ended by itself; it stays open for the tasks it leaves.
        return True
    # Background tasks that were cancelled need time to end.
    concurrent.futures.wait([settled], None if timeout is None else timeout + _STOP_SECONDS)
    in_time = settled.done() and (timeout is None or settled.result())
    patience = None if settled.done() else _STOP_SECONDS
    for future in served.waiting - {settled}:
        future.cancel()
    served.stopping = True
    served.loop.call_soon_threadsafe(served.loop.stop)
    thread.join(patience)
    if not thread.is_alive():
        served.loop.close()
    return in_time


def _end_forgotten(
    thread: threading.Thread, served: _ServedLoop, then: Callable[[], object]
) -> None:
    """End a loop that nobody has closed."""
    _close(thread, served, _FORGOTTEN_SECONDS)
    then()
