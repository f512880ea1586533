"""The thread that takes a scheduler's steps: requests come in between two of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from torchrl_mt.engines.engine_thread import EngineThread, closed_error, settle
from torchrl_mt.engines.transformers.batch_scheduler import BatchScheduler
from torchrl_mt.engines.transformers.batches import Request

__all__ = ["Generation"]

_LULL = 0.002
"""Seconds without a prompt after which no more are waited for."""


class Generation(EngineThread):
    """The thread.

    Args:
        scheduler: takes the steps; it is touched by the thread, or while that is held.
    """

    def __init__(self, scheduler: BatchScheduler) -> None:
        super().__init__("torchrl_mt-generation")
        self._scheduler = scheduler
        self._inbox: dict[Request, None] = {}
        self._num_answered = 0

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RuntimeError: if the engine is closed.
        """
        with self._queueing():
            self._inbox[request] = None

    def withdraw(self, request: Request) -> None:
        """Take a request back; what it sampled is thrown away."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        """What the scheduler counts and holds."""
        with self._changed:
            usage = self._scheduler.usage()
            usage["waiting"] += len(self._inbox)
            return {**vars(self._scheduler.counts), **usage}

    def close(self) -> None:
        """End the thread and fail what has no answer."""
        super().close()
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
