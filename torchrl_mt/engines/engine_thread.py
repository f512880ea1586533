"""The background thread of an engine, and how it answers event loops.

The thread can be paused between two steps, so that weights may change. Every request is answered, fails
or is cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

__all__ = ["EngineThread", "closed_error", "failed_error", "settle"]


class _Pending(Protocol):
    """A request and the future that a loop awaits."""

    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class EngineThread:
    """A thread that the first request starts and :meth:`close` ends.

    A subclass takes steps in :meth:`_work`. It holds ``_changed`` while it reads the flags, takes no
    step while ``_paused``, sets ``_busy`` during a step, and returns once ``_closed``.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._pausing = threading.Lock()
        self._paused = self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the current step to end, and let no other begin inside the context.

        Raises:
            RuntimeError: if it is called from within a step, which would deadlock.
        """
        if self._thread is threading.current_thread():
            raise RuntimeError("weights cannot be updated by the model while it samples.")
        with self._pausing:
            with self._changed:
                self._paused = True
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._busy)
                yield
            finally:
                with self._changed:
                    self._paused = False
                    self._changed.notify_all()

    def close(self) -> None:
        """End the thread after the current step; closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @contextmanager
    def _queueing(self) -> Iterator[None]:
        """Hold the lock while a request is queued, then wake the thread.

        Raises:
            RuntimeError: if the engine is closed.
        """
        with self._changed:
            if self._closed:
                raise closed_error()
            if self._thread is None:
                # A daemon, so that a script which dies without closing does not hang on it.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            yield
            self._changed.notify_all()

    def _work(self) -> None:
        """Take steps until closed."""
        raise NotImplementedError


def settle(outcomes: Iterable[tuple[_Pending, object]]) -> None:
    """Resolve requests on the loops that await them, with one wake-up per loop.

    Args:
        outcomes: requests, each with its answer or its exception.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future, object]]] = {}
    for request, outcome in outcomes:
        by_loop.setdefault(request.loop, []).append((request.answer, outcome))
    for loop, settled in by_loop.items():
        with suppress(RuntimeError):  # a closed loop waits for nothing
            loop.call_soon_threadsafe(_resolve, settled)


def closed_error() -> RuntimeError:
    """The error of a request to a closed engine."""
    return RuntimeError("the engine is closed: make a new one.")


def failed_error(cause: BaseException) -> RuntimeError:
    """The error of one request that failed, or whose step or batch did."""
    error = RuntimeError(f"generation failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _resolve(settled: Iterable[tuple[asyncio.Future, object]]) -> None:
    """Resolve futures; runs on their loop."""
    for future, outcome in settled:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
