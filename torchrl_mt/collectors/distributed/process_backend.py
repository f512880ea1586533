"""Workers that are processes of this machine. None is left when the collector's process is gone."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torchrl_mt.collectors.distributed.backend import Handle, WorkerDied
from torchrl_mt.collectors.distributed.messages import read_answer
from torchrl_mt.collectors.distributed.weights import PackedWeights, SharedWeights
from torchrl_mt.collectors.distributed.worker import WorkerHost
from torchrl_mt.processes import end_process, pickled, pipe, preload, send_all, start_process
from torchrl_mt.threads import settle, start_daemon

__all__ = ["ProcessBackend"]

preload(__name__)

_GONE_SECONDS = 1.0
"""Seconds for a process to end by itself after it closed its end of the pipe."""
_END_SECONDS = 15.0
"""Seconds for a process to end by itself after the collector's process is gone."""

_MAIN_MODULE = (
    " If its traceback above is about starting processes: it imports the main module anew, so a script "
    "needs `if __name__ == '__main__':`."
)


class ProcessBackend:
    """Starts processes, which import the main module anew.

    Args:
        setup: arguments of the workers, pickled one by one.
    """

    def __init__(self, setup: Mapping[str, bytes]) -> None:
        self._setup = dict(setup)

    def start(self, index: int, seed: int) -> Handle:
        """Start a process."""
        return _ProcessHandle(self._setup, index, seed)

    def put(self, value: Any) -> Any:
        """Put weights into shared memory."""
        return SharedWeights(value) if isinstance(value, PackedWeights) else value

    def close(self) -> None:
        """Do nothing: the processes have ended."""


class _ProcessHandle:
    """A process and the calls that it has not answered."""

    def __init__(self, setup: Mapping[str, bytes], index: int, seed: int) -> None:
        name = f"torchrl_mt-collector-{index}"
        ours, theirs = pipe()
        # Not a daemon, which could have no processes of its own, such as those of env_workers.
        args = (theirs, setup, index, seed)
        self._process = start_process(_serve, args, name, daemon=False)
        theirs.close()
        self.pid = self._process.pid
        self.name = f"the worker {name} (pid {self.pid})"
        self.ended: Future[None] = Future()
        self._gone: WorkerDied | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Sending and receiving may block.
        start_daemon(send_all, ours, self._outbox)
        start_daemon(self._receive, ours)

    def call(self, method: str, *args: Any, shared: Any = None) -> Future[Any]:
        """Call a method of the worker."""
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()  # The caller may be cancelled, the call may not.
        try:
            arguments = pickled(args, with_main=True)
            with self._lock:
                if self._gone is not None:
                    raise self._gone
                number = next(self._numbers)
                message = pickle.dumps((number, method, arguments, shared))
                self._calls[number] = outcome
                self._outbox.put(message)
        except Exception as error:
            outcome.set_exception(error)
        return outcome

    def ask_to_end(self) -> None:
        """Send the end mark."""
        self._outbox.put(None)

    def end(self, seconds: float) -> None:
        """Wait for the process to end, or kill it."""
        end_process(self._process, seconds)

    def _receive(self, connection: Connection) -> None:
        """Receive answers until the process is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, returned, data = pickle.loads(connection.recv_bytes())
                with self._lock:
                    outcome = self._calls.pop(number)
                settle(outcome, read_answer, returned, data)
        exit_code = end_process(self._process, _GONE_SECONDS)
        self._outbox.put(None)
        connection.close()
        gone = WorkerDied(
            f"{self.name} has ended with exit code {exit_code}."
            + (_MAIN_MODULE if exit_code == 1 else "")
        )
        with self._lock:
            self._gone = gone
            lost, self._calls = self._calls, {}
        self.ended.set_exception(gone)  # First, so that nothing is played again by this worker.
        for outcome in lost.values():
            outcome.set_exception(gone)


# In the process


def _serve(connection: Connection, setup: Mapping[str, bytes], index: int, seed: int) -> None:
    """Answer calls until the end mark comes or the collector's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The collector's process handles interrupts.
    host = WorkerHost(setup, index, seed)
    answers: queue.SimpleQueue[tuple[int, Future[tuple[bool, bytes]]]] = queue.SimpleQueue()
    start_daemon(_send_answers, connection, answers)
    with contextlib.suppress(EOFError, OSError):
        while received := connection.recv_bytes():
            number, method, args, shared = pickle.loads(received)
            call = host.call(method, args, shared)
            call.add_done_callback(
                partial(lambda number, call: answers.put((number, call)), number)
            )
    start_daemon(_exit_later)
    host.close()


def _send_answers(
    connection: Connection, answers: queue.SimpleQueue[tuple[int, Future[tuple[bool, bytes]]]]
) -> None:
    """Send answers as they come."""
    with contextlib.suppress(OSError):
        while True:
            number, call = answers.get()
            if not call.cancelled():
                connection.send_bytes(pickle.dumps((number, *call.result())))


def _exit_later() -> None:
    """End this process even if something cannot be closed, and nobody is left to kill it."""
    time.sleep(_END_SECONDS)
    os._exit(1)
