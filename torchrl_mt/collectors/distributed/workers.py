"""The workers of a collector: which one plays what, and what becomes of those that die.

A worker that dies is started again, and has the last weights and their version before it plays. The
members of a group are played by one worker.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchrl_mt.collectors.distributed.backend import Backend, Handle, WorkerDied
from torchrl_mt.collectors.distributed.messages import Played, Task
from torchrl_mt.collectors.distributed.worker import Report
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.collectors.workflow import Rejected
from torchrl_mt.engines.completions.updates_elsewhere import ServerStates
from torchrl_mt.engines.sampling import random_word
from torchrl_mt.processes import restart_pause
from torchrl_mt.threads import start_daemon

__all__ = ["Workers", "WorkersFailedError"]

_logger = logging.getLogger("torchrl_mt")

_CLOSE_SECONDS = 15.0
"""Seconds for the workers to close their environments and engines by default."""
WARN_SECONDS = 60.0
"""Seconds for the first workers to start before a warning."""
SILENT_SECONDS = 60.0
"""Seconds without a reply of a worker before a warning."""
SLOW_SECONDS = 5.0
"""Seconds for a reply of a worker that does not hang."""
_LONGEST_PAUSE = 5.0
"""Seconds between two starts of a worker that does not live."""


class WorkersFailedError(RuntimeError):
    """A worker died again and again."""


@dataclass(frozen=True)
class _Weights:
    """What a worker must have before it plays."""

    version: int
    shared: Any = None
    """The last weights that were sent, as the backend put them; ``None`` before the first update."""
    servers: ServerStates | None = None
    """Servers that the workers share; ``None`` if their weights are no affair of the collector."""


_UNKNOWN = _Weights(-1)


@dataclass(eq=False)
class _Slot:
    """The place of a worker, and the worker in it."""

    index: int
    handle: Handle | None = None
    """The worker, while it plays."""
    ready: Future[Handle] = field(default_factory=Future)
    """The worker, once it plays; or the error of its start."""
    load: int = 0
    """Its episodes."""
    in_a_row: int = 0
    """Deaths since it last finished an episode."""
    silent: float | None = None
    """Seconds for which a request for a report was not answered; ``None`` if none is open."""
    told: bool = False
    """Whether a warning was logged that it does not answer."""
    episodes: dict[int, tuple[float, asyncio.Future[StopReason]]] = field(default_factory=dict)
    """Start of each episode that it plays, by id, and a future to end the wait for it."""

    @property
    def hangs(self) -> bool:
        """Whether the worker does not answer."""
        return self.silent is not None and self.silent > SLOW_SECONDS


class Workers:
    """Starts workers, and waits until all of them can play. Thread-safe.

    Args:
        backend: starts the workers; closed with them.
        number: number of workers.
        max_restarts: number of times in a row that a worker is started again without having finished an
            episode.
        seed: seed of the workers' generators, which differ.

    Raises:
        Exception: the first error of a worker's start. Then none is left.
    """

    def __init__(
        self,
        backend: Backend,
        number: int,
        *,
        max_restarts: int,
        seed: int,
    ) -> None:
        self._backend = backend
        self._max_restarts = max_restarts
        self._seed = seed
        self.on_report: list[Callable[[Report], object]] = []
        """Called with what a worker reports."""
        self._starts = itertools.count()
        self._lock = threading.RLock()
        self._updating = threading.Lock()
        self._closed = False
        self._failure: WorkersFailedError | None = None
        self._handles: set[Handle] = set()
        """All workers that have not ended, also those that do not play yet."""
        self._weights = _UNKNOWN
        """The last weights; until the first worker has told its version, they are not known."""
        self._slots = [_Slot(index) for index in range(number)]
        self._groups: dict[int, tuple[_Slot, int]] = {}
        """Worker and number of the running members of each group."""
        self.facts: dict[str, Any] = {}
        """Facts of the workers' engines."""
        atexit.register(self.close)  # Before multiprocessing's own, which waits for the processes.
        try:
            for slot in self._slots:
                slot.ready.set_running_or_notify_cancel()
                start_daemon(self._start_first, slot)
            self._wait_for_all()
        except BaseException:
            self.close(0.0)
            raise

    def _wait_for_all(self) -> None:
        """Wait until all can play, or raise the error of one."""
        ready = [slot.ready for slot in self._slots]
        started, waiting = wait(ready, WARN_SECONDS, FIRST_EXCEPTION)
        if waiting and all(each.exception() is None for each in started):
            _logger.warning(
                "%d of %d workers have not started after %.0f s. If engines are only slow to make, all "
                "is well. Ray waits until its cluster has what remote_configs asks for: see "
                "`ray status`.",
                *(len(waiting), len(ready), WARN_SECONDS),
            )
            started, _ = wait(ready, return_when=FIRST_EXCEPTION)
        for each in started:
            each.result()

    @property
    def version(self) -> int:
        """Version of the last weights."""
        return self._weights.version

    # Episodes

    async def play(self, task: Task) -> Played:
        """Play an episode; cancelling this cancels the episode.

        Raises:
            WorkerDied: if its worker dies.
            Rejected: if its time is over and its worker does not answer.
            WorkersFailedError: if a worker died more than ``max_restarts`` times in a row.
        """
        slot, traj_id = self._enter(task.record.group), task.record.traj_id
        try:
            # Not cancelled with the caller: the futures are marked as running.
            worker = await asyncio.wrap_future(slot.ready)
            playing = asyncio.wrap_future(worker.call("play", task))
            overdue: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
            slot.episodes[traj_id] = (time.monotonic(), overdue)
            try:
                await asyncio.wait([playing, overdue], return_when=asyncio.FIRST_COMPLETED)
                if not playing.done():
                    raise Rejected(overdue.result().value)
                played: Played = playing.result()
            except WorkerDied as error:
                self._died(slot, worker, error)  # This may be the first sign of it.
                raise
            finally:
                del slot.episodes[traj_id]
                if not playing.done():
                    playing.cancel()
                    worker.call("cancel", traj_id)
                elif not playing.cancelled():
                    playing.exception()  # Else asyncio logs an error that came with a cancellation.
        finally:
            self._leave(task.record.group, slot)
        if played.error is None:
            slot.in_a_row = 0
        return played

    def _enter(self, group: int) -> _Slot:
        """Choose the worker of an episode: its group's, else one with the fewest episodes."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            slot, members = self._groups.get(group, (None, 0))
            if slot is None or slot.handle is None or slot.hangs:
                slot = min(self._slots, key=lambda s: (s.hangs, s.handle is None, s.load))
            slot.load += 1
            self._groups[group] = (slot, members + 1)
            return slot

    def _leave(self, group: int, slot: _Slot) -> None:
        """An episode has ended."""
        with self._lock:
            slot.load -= 1
            last, members = self._groups.pop(group)
            if members > 1:
                self._groups[group] = (last, members - 1)

    def watch(self, seconds: float, limits: Limits) -> None:
        """Ask the workers for reports, and end the wait for episodes of those that do not answer.

        A worker that has not answered is not asked again. Call this in the event loop of the episodes.

        Args:
            seconds: time since the last call.
            limits: their timeouts are applied to the episodes of workers that do not answer.
        """
        for slot in self._slots:
            if (worker := slot.handle) is None:
                continue
            if slot.silent is None:
                slot.silent = 0.0
                worker.call("report").add_done_callback(partial(self._answered, slot, worker))
                continue
            slot.silent += seconds
            if slot.silent >= SILENT_SECONDS and not slot.told:
                slot.told = True
                _logger.warning(
                    "%s has not answered for %.0f s, and %d episodes wait for it. It may compute in "
                    "native code that holds the interpreter's lock, or be stopped. Without "
                    "Limits(episode_timeout=...) they wait as long as it takes.",
                    *(worker.name, slot.silent, len(slot.episodes)),
                )
            for begun, overdue in slot.episodes.values() if slot.hangs else ():
                reason = _overdue(slot.silent, time.monotonic() - begun, limits)
                if reason is not None and not overdue.done():
                    overdue.set_result(reason)

    def _answered(self, slot: _Slot, worker: Handle, report: Future[Report]) -> None:
        """A worker has answered a request for a report, or died."""
        if slot.told and report.exception() is None:
            _logger.warning("%s answers again.", worker.name)
        slot.silent, slot.told = None, False
        self._take_report(report)

    def _take_report(self, report: Future[Report]) -> None:
        if report.exception() is None:
            for take in self.on_report:
                take(report.result())

    # Weights

    def update(self, source: Any) -> None:
        """Have all workers load weights, and count the update.

        Raises:
            Exception: the error of the workers' engines, if none of them took the weights. Nothing is
                counted then.
        """
        with self._updating:
            shared = None if source is None else self._backend.put(source)
            kept = self._weights.shared if shared is None else shared
            self._broadcast("update", _Weights(self.version + 1, kept), shared=shared)

    def count_update(self, servers: ServerStates | None = None) -> None:
        """Have all workers count an update that was made elsewhere, of ``servers`` perhaps."""
        with self._updating:
            weights = replace(self._weights, version=self.version + 1, servers=servers)
            self._broadcast("count", weights, servers)

    def count_from(self, version: int) -> None:
        """Have all workers count versions from ``version``."""
        with self._updating:
            self._broadcast("count_from", replace(self._weights, version=version))

    def _broadcast(self, method: str, weights: _Weights, *args: Any, shared: Any = None) -> None:
        """Call a method that changes the version in all workers that play.

        Others load these weights before they play.
        """
        with self._lock:
            self.check_open()
            before, self._weights = self._weights, weights
            calls = self._call_all(method, weights.version, *args, shared=shared)
        _wait_for_answers(method, calls)
        self.check_open()
        failed = [
            (worker, error)
            for worker, call in calls
            if (error := call.exception()) is not None and not isinstance(error, WorkerDied)
        ]
        if failed and all(call.exception() is not None for _, call in calls):
            with self._lock:
                self._weights = before
            raise failed[0][1]
        for worker, error in failed:
            _logger.warning(
                "a worker could not change its weights and is started again.", exc_info=error
            )
            worker.end(0.0)
        for _, call in calls:
            self._take_report(call)

    # Servers that the workers share

    @property
    def servers(self) -> ServerStates:
        """What the workers were told last of their servers."""
        assert self._weights.servers is not None
        return self._weights.servers

    def tell_servers(self, servers: ServerStates) -> None:
        """Tell all workers of their servers, and wait until they know."""
        with self._updating:
            with self._lock:
                self._weights = replace(self._weights, servers=servers)
                calls = self._call_all("follow", servers)
            _wait_for_answers("follow", calls)

    def refuse_server(self, url: str, reason: str) -> None:
        """Tell all workers why a server cannot load weights, and wait until they know."""
        wait([call for _, call in self._call_all("refuse_server", url, reason)])

    def _call_all(
        self, method: str, *args: Any, shared: Any = None
    ) -> list[tuple[Handle, Future[Any]]]:
        """Call a method of every worker that plays."""
        with self._lock:
            playing = [slot.handle for slot in self._slots if slot.handle is not None]
            return [(each, each.call(method, *args, shared=shared)) for each in playing]

    # Single workers

    def set_seed(self, seed: int) -> None:
        """Seed the generators of the workers that play, each differently."""
        with self._lock:
            self.check_open()
            calls = [
                slot.handle.call("seed", random_word(seed, slot.index))
                for slot in self._slots
                if slot.handle is not None
            ]
        wait(calls)

    def tokenizer(self) -> Any:
        """The tokenizer of the workers."""
        return self._slots[0].ready.result().call("tokenizer").result()

    # Start and end

    def _start(self, slot: _Slot) -> BaseException | None:
        """Start a worker and let it play; returns why it does not start."""
        worker: Handle | None = None
        try:
            worker = self._backend.start(slot.index, random_word(self._seed, next(self._starts)))
            with self._lock:
                self.check_open()
                self._handles.add(worker)
            facts = worker.call("facts").result()
            loaded: _Weights | None = None
            while True:
                with self._lock:
                    self.check_open()
                    if self._weights is _UNKNOWN:
                        self._weights, self.facts = _Weights(facts["version"]), facts
                    if loaded is self._weights:
                        slot.handle = worker
                        break
                    loaded = self._weights
                worker.call(
                    "restore", loaded.version, loaded.servers, shared=loaded.shared
                ).result()
        except BaseException as error:
            if worker is not None:
                worker.end(0.0)
                with self._lock:
                    self._handles.discard(worker)
            return error
        slot.ready.set_result(worker)
        worker.ended.add_done_callback(
            lambda ended: self._died(slot, worker, ended.exception())  # type: ignore[arg-type]
        )
        return None

    def check_open(self) -> None:
        """Raise ``RuntimeError`` once the workers are closed."""
        if self._closed:
            raise RuntimeError("the collector was shut down: make a new one.")

    def _start_first(self, slot: _Slot) -> None:
        """Start the first worker of a place."""
        if (error := self._start(slot)) is not None:
            slot.ready.set_exception(error)

    def _died(self, slot: _Slot, worker: Handle, error: BaseException) -> None:
        """Start a worker again that has died; call this once or more."""
        with self._lock:
            self._handles.discard(worker)
            if self._closed or slot.handle is not worker:
                return
            slot.handle, slot.ready = None, Future()
            slot.ready.set_running_or_notify_cancel()
        _logger.warning("%s Its episodes are played again.", error)
        start_daemon(self._start_again, slot, worker, error)

    def _start_again(self, slot: _Slot, worker: Handle, error: BaseException | None) -> None:
        """Start workers in the place of one until one plays, or until too many have died."""
        worker.end(0.0)  # One that could not be reached may be alive.
        while error is not None:
            slot.in_a_row += 1
            with self._lock:
                if self._closed:
                    slot.ready.set_exception(RuntimeError("the collector was shut down."))
                    return
                if slot.in_a_row > self._max_restarts:
                    self._failure = WorkersFailedError(
                        f"a worker died {slot.in_a_row} times in a row without a finished episode "
                        f"(max_restarts={self._max_restarts}), the last time for "
                        f"{type(error).__name__}: {error}"
                    )
                    self._failure.__cause__ = error
                    slot.ready.set_exception(self._failure)
                    return
            time.sleep(restart_pause(slot.in_a_row, _LONGEST_PAUSE))
            error = self._start(slot)

    def close(self, seconds: float | None = None) -> None:
        """End all workers; those that take more than ``seconds`` are killed.

        Repeated calls do nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers = list(self._handles)
        atexit.unregister(self.close)
        deadline = time.monotonic() + (_CLOSE_SECONDS if seconds is None else seconds)
        for worker in workers:
            worker.ask_to_end()
        for worker in workers:
            worker.end(max(deadline - time.monotonic(), 0.0))
        self._backend.close()


def _overdue(silent: float, played: float, limits: Limits) -> StopReason | None:
    """The timeout that an episode has exceeded for sure, though its worker does not say so.

    Args:
        silent: seconds for which its worker has not answered, so no turn has ended.
        played: seconds since the episode began.
        limits: the timeouts.
    """
    if limits.episode_timeout is not None and played > limits.episode_timeout + SLOW_SECONDS:
        return StopReason.EPISODE_TIMEOUT
    if limits.turn_timeout is not None and silent > limits.turn_timeout + SLOW_SECONDS:
        return StopReason.TURN_TIMEOUT
    return None


def _wait_for_answers(method: str, calls: list[tuple[Handle, Future[Any]]]) -> None:
    """Wait for all calls; warn if that takes long."""
    _, waiting = wait([call for _, call in calls], SILENT_SECONDS)
    if waiting:
        names = ", ".join(worker.name for worker, call in calls if call in waiting)
        _logger.warning(
            "%s did not answer the call %r for %.0f s: an update of weights waits for all workers.",
            *(names, method, SILENT_SECONDS),
        )
        wait(waiting)
