"""One thread that answers requests step by step.

Two promises: between two steps the thread can be held, so that weights may change; and every request
that is submitted is answered, fails, or is taken back.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchrl_mt.engines.answers import closed_error, settle
from torchrl_mt.engines.transformers.batch_scheduler import BatchScheduler
from torchrl_mt.engines.transformers.batches import Request

__all__ = ["Generation"]

_LULL = 0.002
"""Seconds without a prompt after which no more are waited for."""


class Generation:
    """The thread.

    Args:
        scheduler: takes the steps; it is touched by the thread, or while that is held.
    """

    def __init__(self, scheduler: BatchScheduler) -> None:
        self._scheduler = scheduler
        self._inbox: dict[Request, None] = {}
        self._num_answered = 0
        self._changed = threading.Condition()
        self._pausing = threading.Lock()
        self._held = self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RuntimeError: if the engine is closed.
        """
        with self._changed:
            if self._closed:
                raise closed_error()
            if self._thread is None:
                # A daemon, so that a script which dies without closing does not hang on it.
                thread = threading.Thread(
                    target=self._work, name="torchrl_mt-generation", daemon=True
                )
                thread.start()
                self._thread = thread
            self._inbox[request] = None
            self._changed.notify_all()

    def withdraw(self, request: Request) -> None:
        """Take a request back; what it sampled is thrown away."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[BatchScheduler]:
        """Wait for the step that is being computed, and let no other begin meanwhile.

        Raises:
            RuntimeError: if the step itself asks for it.
        """
        if self._thread is threading.current_thread():
            raise RuntimeError("weights cannot be updated from within a forward pass.")
        with self._pausing:
            with self._changed:
                self._held = True
                self._changed.wait_for(lambda: not self._busy)
            try:
                yield self._scheduler
            finally:
                with self._changed:
                    self._held = False
                    self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        """What the scheduler counts and holds."""
        with self._changed:
            usage = self._scheduler.usage()
            usage["waiting"] += len(self._inbox)
            return {**vars(self._scheduler.tally), **usage}

    def close(self) -> None:
        """End the thread and fail what has no answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._fail(closed_error)

    def _work(self) -> None:
        """Take steps until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (not self._held and self._num_open())
                )
                if not self._scheduler.num_running:
                    self._gather()
                if self._closed:
                    return
                if self._held:
                    continue
                self._scheduler.add(self._inbox)
                self._inbox = {}
                self._busy = True
            try:
                with torch.inference_mode():
                    self._scheduler.step()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they hold memory of the batches
                self._fail(lambda error=error: _failed(error))  # type: ignore[misc]
            finally:
                finished = self._scheduler.take_finished()
                self._num_answered = len(finished)
                settle((request, None) for request in finished)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _num_open(self) -> int:
        """Requests without an answer."""
        return len(self._inbox) + self._scheduler.num_waiting + self._scheduler.num_running

    def _gather(self) -> None:
        """Wait for more prompts as long as those whom the last step answered keep coming back."""
        while not (self._closed or self._held) and self._num_open() < self._num_answered:
            count = self._num_open()
            if not self._changed.wait_for(lambda: self._num_open() > count, _LULL):  # noqa: B023
                break

    def _fail(self, error: Callable[[], BaseException]) -> None:
        """Fail all requests."""
        with self._changed:
            failed, self._inbox = [*self._scheduler.stop(), *self._inbox], {}
        settle((request, error()) for request in failed)


def _failed(cause: BaseException) -> RuntimeError:
    """What requests are told whose step failed."""
    error = RuntimeError(f"generation failed: {cause}")
    error.__cause__ = cause
    return error
