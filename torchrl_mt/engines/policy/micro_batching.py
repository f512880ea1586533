"""Micro-batching: one background thread answers requests of many coroutines and event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchrl_mt.engines.engine_thread import EngineThread, closed_error, failed_error, settle

__all__ = ["MicroBatcher"]

_Q = TypeVar("_Q")
_A = TypeVar("_A")


@dataclass(eq=False, slots=True)
class _Ticket(Generic[_Q, _A]):
    """A queued request and the future of its response."""

    request: _Q
    answer: asyncio.Future[_A]
    loop: asyncio.AbstractEventLoop
    arrived: float


class MicroBatcher(EngineThread, Generic[_Q, _A]):
    """Gathers requests into batches.

    When the thread becomes free, it takes the oldest request and then, oldest first, all that fit with
    it. If answering a batch raises, only the requests of that batch fail.

    Args:
        answer: called in the thread with the requests of a batch; returns their responses in order.
        fits: whether requests may share a batch; called with at least two.
        max_batch_size: maximum number of requests in a batch.
        max_wait: seconds that the oldest request waits at most for a batch to fill up.
        name: name of the thread.
    """

    def __init__(
        self,
        answer: Callable[[list[_Q]], Sequence[_A]],
        fits: Callable[[list[_Q]], bool],
        *,
        max_batch_size: int,
        max_wait: float,
        name: str,
    ) -> None:
        super().__init__(name)
        self._answer = answer
        self._fits = fits
        self._max_batch_size = max_batch_size
        self._max_wait = max_wait
        self._waiting: dict[_Ticket[_Q, _A], None] = {}

    async def ask(self, request: _Q) -> _A:
        """Queue a request and wait for its response; cancelling removes it from the queue.

        Raises:
            RuntimeError: if the batch failed (the cause is its error) or the batcher is closed.
        """
        loop = asyncio.get_running_loop()
        ticket: _Ticket[_Q, _A] = _Ticket(request, loop.create_future(), loop, time.monotonic())
        with self._queueing():
            self._waiting[ticket] = None
        try:
            return await ticket.answer
        except asyncio.CancelledError:
            with self._changed:
                self._waiting.pop(ticket, None)
            raise

    def close(self) -> None:
        """Fail all open requests and end the thread."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        settle((ticket, closed_error()) for ticket in waiting)
        super().close()

    def _work(self) -> None:
        while self._answer_next():
            pass

    def _answer_next(self) -> bool:
        """Wait for a batch and answer it; false once closed."""
        batch = self._next_batch()
        if not batch:
            return False
        outcomes: list[_A | BaseException]
        try:
            outcomes = list(self._answer([ticket.request for ticket in batch]))
        except BaseException as error:
            outcomes = [failed_error(error) for _ in batch]
        if self._closed:
            outcomes = [closed_error() for _ in batch]
        settle(zip(batch, outcomes, strict=True))
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        return True

    def _next_batch(self) -> list[_Ticket[_Q, _A]]:
        """Wait for a batch and take it; empty once closed."""
        with self._changed:
            while not self._closed:
                seconds = self._seconds_to_wait()
                if seconds == 0:
                    self._busy = True
                    return self._take()
                self._changed.wait(seconds)
        return []

    def _seconds_to_wait(self) -> float | None:
        """Seconds until a batch is due; ``None`` if none is until something changes."""
        if self._paused or not self._waiting:
            return None
        if len(self._waiting) >= self._max_batch_size:
            return 0
        oldest = next(iter(self._waiting))
        return max(0.0, oldest.arrived + self._max_wait - time.monotonic())

    def _take(self) -> list[_Ticket[_Q, _A]]:
        """Take the oldest requests that fit together off the queue."""
        batch: list[_Ticket[_Q, _A]] = []
        for ticket in self._waiting:
            if len(batch) == self._max_batch_size:
                break
            # Later requests may overtake one that does not fit, but the oldest is always taken.
            if not batch or self._fits([*(taken.request for taken in batch), ticket.request]):
                batch.append(ticket)
        for ticket in batch:
            del self._waiting[ticket]
        return batch
