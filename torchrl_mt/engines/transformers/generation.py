"""The generation thread: it takes the scheduler's steps and admits requests between them.

Before it admits any, it lets event loops run all that they can. So what is computed together does not
depend on how fast threads run, unless players themselves do, and equal runs have equal bits.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import torch

from torchrl_mt.engines.engine_thread import EngineThread, closed_error, failed_error, settle
from torchrl_mt.engines.transformers.batch_scheduler import BatchScheduler
from torchrl_mt.engines.transformers.batches import Request

__all__ = ["Generation"]

_MAX_GAP = 0.002
"""Seconds to wait for a further prompt before a batch begins."""
_MAX_CATCHING_UP = 0.25
"""Seconds to wait for loops to run all that they can."""
_ROUNDS, _ROUNDS_EACH = 16, 4
"""Rounds within which a loop turns answers into requests, at least and for each answer, if its players
wait for nothing else. Twice of what was seen."""


class Generation(EngineThread):
    """The generation thread.

    Args:
        scheduler: takes the steps; use it only in the thread, or while the thread is paused.
    """

    def __init__(self, scheduler: BatchScheduler) -> None:
        super().__init__("torchrl_mt-generation")
        self._scheduler = scheduler
        self._inbox: dict[Request, None] = {}
        self._rounds: dict[asyncio.AbstractEventLoop, int] = {}
        """Rounds that loops have still to run before the next requests are admitted."""
        self._num_answered = 0

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RuntimeError: if the engine is closed.
        """
        with self._queueing():
            self._inbox[request] = None
            if not self._scheduler.running:
                self._let_run(request.loop, _ROUNDS)

    def _let_run(self, loop: asyncio.AbstractEventLoop, rounds: int) -> None:
        """Have a loop count at least so many further rounds."""
        for closed in [each for each in self._rounds if each.is_closed()]:
            del self._rounds[closed]
        with suppress(RuntimeError):  # a closed loop submits nothing
            if loop not in self._rounds:
                loop.call_soon_threadsafe(self._run_round, loop)
            self._rounds[loop] = max(self._rounds.get(loop, 0), rounds)

    def _run_round(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count a round of a loop; this runs on it."""
        with self._changed:
            left = self._rounds.pop(loop, 0) - 1
            if left > 0:
                self._rounds[loop] = left
                loop.call_soon(self._run_round, loop)
            else:
                self._changed.notify_all()

    def withdraw(self, request: Request) -> None:
        """Cancel a request; its sampled tokens are dropped."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        """Counters and current sizes; see :meth:`TransformersEngine.stats`."""
        with self._changed:
            usage = self._scheduler.usage()
            usage["waiting"] += len(self._inbox)
            return {**vars(self._scheduler.counts), **usage}

    def close(self) -> None:
        """End the thread and fail all open requests."""
        super().close()
        self._fail(closed_error)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (not self._paused and self._num_open())
                )
                is_due = self._scheduler.is_due(len(self._inbox))
                if is_due:
                    self._gather()
                if self._closed:
                    return
                if self._paused:
                    continue
                if is_due:
                    self._scheduler.add(self._inbox)
                    self._inbox = {}
                self._busy = True
            try:
                with torch.inference_mode():
                    self._scheduler.step()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # frees the batches' memory
                self._fail(lambda error=error: failed_error(error))  # type: ignore[misc]
            finally:
                finished = self._scheduler.take_finished()
                self._num_answered = len(finished)
                settle(
                    (request, None if request.failure is None else failed_error(request.failure))
                    for request in finished
                )
                with self._changed:
                    for loop, answers in Counter(request.loop for request in finished).items():
                        rounds = self._rounds.get(loop, 0) + answers * _ROUNDS_EACH
                        self._let_run(loop, max(rounds, _ROUNDS))
                    self._busy = False
                    self._changed.notify_all()

    def _num_open(self) -> int:
        return len(self._inbox) + len(self._scheduler.waiting) + len(self._scheduler.running)

    def _gather(self) -> None:
        """Wait while loops catch up, or those arrive who were answered in the last step."""

        def more() -> bool:
            return self._catches_up() or (
                not self._scheduler.running and self._num_open() < self._num_answered
            )

        while not (self._closed or self._paused) and more():
            count, behind = self._num_open(), self._catches_up()
            if not self._changed.wait_for(
                lambda: (
                    self._num_open() > count or self._catches_up() < behind or not more()  # noqa: B023
                ),
                _MAX_CATCHING_UP if behind else _MAX_GAP,
            ):
                self._rounds.clear()  # something on a loop takes long
                break

    def _catches_up(self) -> bool:
        """Whether a loop may still submit at once; one that was stopped does not."""
        return any(loop.is_running() for loop in self._rounds)

    def _fail(self, error: Callable[[], BaseException]) -> None:
        """Fail all requests."""
        with self._changed:
            failed, self._inbox = [*self._scheduler.stop(), *self._inbox], {}
        settle((request, error()) for request in failed)
