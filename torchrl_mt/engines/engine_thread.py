"""The one thread that an engine samples in, and how it answers the event loops that wait for it.

Between two steps the thread can be held, so that weights may change. Every request is answered, fails,
or is taken back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

__all__ = ["EngineThread", "closed_error", "settle"]


class _Asked(Protocol):
    """A request that somebody waits for."""

    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class EngineThread:
    """A thread that is started by the first request and ended by :meth:`close`.

    A subclass waits and takes steps in :meth:`_work`. It holds ``_changed`` to look at what follows,
    takes no step while ``_held``, sets ``_busy`` during a step, and returns once ``_closed``.

    Args:
        name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._pausing = threading.Lock()
        self._held = self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the step that is being taken, and let no other begin meanwhile.

        Raises:
            RuntimeError: if the step itself asks for it, which would wait for itself.
        """
        if self._thread is threading.current_thread():
            raise RuntimeError("weights cannot be updated by the model while it samples.")
        with self._pausing:
            with self._changed:
                self._held = True
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._busy)
                yield
            finally:
                with self._changed:
                    self._held = False
                    self._changed.notify_all()

    def close(self) -> None:
        """End the thread, after the step that is being taken; closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @contextmanager
    def _queueing(self) -> Iterator[None]:
        """Put a request where the thread looks for it.

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


def settle(outcomes: Iterable[tuple[_Asked, object]]) -> None:
    """Hand answers and failures to the loops that wait for them, one wake-up per loop.

    Args:
        outcomes: requests, each with its answer or the error that it fails with.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future, object]]] = {}
    for asked, outcome in outcomes:
        by_loop.setdefault(asked.loop, []).append((asked.answer, outcome))
    for loop, settled in by_loop.items():
        with suppress(RuntimeError):  # a closed loop waits for nothing
            loop.call_soon_threadsafe(_resolve, settled)


def closed_error() -> RuntimeError:
    """What requests to a closed engine fail with."""
    return RuntimeError("the engine is closed: make a new one.")


def _resolve(settled: Iterable[tuple[asyncio.Future, object]]) -> None:
    """Settle futures on the loop that they belong to."""
    for future, outcome in settled:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
