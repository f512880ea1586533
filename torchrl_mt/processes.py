"""Processes that work for this one: how they start, answer calls and end, and what is sent to them.

Every call gets one reply: a value, an error as it was raised, or that the process has ended. No process
is left when it was told to end, or when this process is gone. Where the system can do that, they are
forks of a server that has imported the package: they start at once and share its memory.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, NoReturn

import cloudpickle

from torchrl_mt.threads import settle, start_daemon

__all__ = [
    "StaysInProcess",
    "WorkerProcess",
    "answer",
    "failure",
    "pickle_argument",
    "pickled",
    "preload",
    "read_answer",
    "read_failure",
    "received",
    "restart_pause",
]

_GONE_SECONDS = 1.0
"""Seconds for a process to end by itself after it closed its end of the pipe."""
_END_SECONDS = 15.0
"""Seconds for a process to end by itself after it was told to, or after this process is gone."""
_MAIN_MODULE = (
    " If its traceback above is about starting processes: it imports the main module anew, so a script "
    "needs `if __name__ == '__main__':`."
)

_has_fork_server = "forkserver" in multiprocessing.get_all_start_methods()
_context: Any = multiprocessing.get_context("forkserver" if _has_fork_server else "spawn")
_preloaded: list[str] = []
_exit_codes = threading.Lock()
"""Held where multiprocessing may read an exit code, which two threads must not do at once."""


def preload(module: str) -> None:
    """Let the fork server import a module when it starts, so that no process has to."""
    if _has_fork_server and module not in _preloaded:
        _preloaded.append(module)
        _context.set_forkserver_preload(list(_preloaded))


class StaysInProcess:
    """Base of objects with threads, models or connections: pickling one says what to give instead.

    Examples:
        >>> class Engine(StaysInProcess):
        ...     _instead = "give a function that makes it"
        >>> pickle.dumps(Engine())
        Traceback (most recent call last):
        ...
        TypeError: Engine cannot be pickled or copied, as it has threads, a model or connections: give a
        function that makes it.
    """

    _instead: ClassVar[str]
    """What to do instead, in the words of an error; ``{name}`` is the class."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be pickled or copied, as it has threads, a model or connections: "
            f"{self._instead.format(name=name)}."
        )


def pickled(value: Any, *, with_main: bool = False) -> bytes:
    """Pickle a value; functions and classes that no module has are pickled whole, tensors are copied.

    Args:
        value: the value.
        with_main: pickle what the main module defines whole, too, for a process that has another one.

    Examples:
        >>> pickle.loads(pickled(lambda: 3))()
        3
    """
    if not with_main:
        with suppress(Exception):
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return cloudpickle.dumps(value)


def pickle_argument(name: str, value: Any, *, with_main: bool = False) -> bytes:
    """Pickle an argument that is sent to other processes, as :func:`pickled` does.

    Raises:
        TypeError: if it cannot be pickled.

    Examples:
        >>> pickle_argument("env", threading.Lock())
        Traceback (most recent call last):
        ...
        TypeError: env is sent to other processes, but pickling it raised ...
    """
    try:
        return pickled(value, with_main=with_main)
    except Exception as error:
        raise TypeError(
            f"{name} is sent to other processes, but pickling it raised {type(error).__name__}: "
            f"{error}: give a class, or a function that makes it."
        ) from error


def received(what: str, data: bytes) -> Any:
    """Unpickle what another process sent; errors name it.

    Raises:
        TypeError: if it cannot be unpickled here.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise TypeError(
            f"{what} was sent to another process, but unpickling it there raised "
            f"{type(error).__name__}: {error}"
        ) from error


class RemoteTraceback(Exception):
    """The traceback of an error in another process, shown as the error's cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def answer(value: Any) -> tuple[bool, bytes]:
    """The reply to a call that returned ``value``."""
    try:
        return True, pickled(value)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return False, failure(
            TypeError(
                "what an environment, a workflow or an engine returns is sent to the collector's "
                f"process, but pickling it raised {what}"
            )
        )


def failure(error: BaseException) -> bytes:
    """An error and its traceback, to be sent."""
    text = "".join(traceback.format_exception(error)).strip()
    try:
        data = pickled((error, text))
        pickle.loads(data)  # Some errors can be pickled but not unpickled.
    except Exception:
        data = pickled((RuntimeError(f"{type(error).__name__}: {error}\n{text}"), text))
    return data


def read_answer(returned: bool, data: bytes) -> Any:
    """The value that a call returned.

    Raises:
        Exception: the error of the call; its traceback in the other process is the cause.
    """
    if returned:
        return received("the result of a call", data)
    raise read_failure(data)


def read_failure(data: bytes) -> BaseException:
    """The error of :func:`failure`, with its traceback in the other process as the cause."""
    error, text = pickle.loads(data)
    error.__cause__ = RemoteTraceback(text)
    return error


class WorkerProcess:
    """A process that answers calls. Thread-safe.

    In the process, ``host = make(*args)`` takes the calls: ``host.call(method, arguments, shared)`` with
    pickled arguments returns the future of an :func:`answer`, and ``host.close()`` ends it in order.

    The process imports the main module anew, so a script needs ``if __name__ == "__main__":``.

    Args:
        make: makes the host: a class or a function of a module.
        args: its arguments.
        name: the process's name in the log.
        died: class of the error of calls that the process does not answer, as it is gone.
        with_main: send what the main module defines whole; see :func:`pickled`.
        daemon: whether the process is killed at this one's exit, and has no processes of its own.
    """

    ended: Future[None]
    """Raises ``died`` once the process is gone."""

    def __init__(
        self,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        name: str,
        died: type[Exception],
        *,
        with_main: bool = False,
        daemon: bool = False,
    ) -> None:
        ours, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_serve, args=(theirs, make, args), name=name, daemon=daemon
        )
        with _exit_codes:
            self._process.start()
        theirs.close()
        self.pid = self._process.pid
        self.name = f"the worker {name} (pid {self.pid})"
        self.ended = Future()
        self._died = died
        self._with_main = with_main
        self._gone: Exception | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Sending and receiving may block.
        sender = start_daemon(_send_all, ours, self._outbox)
        start_daemon(self._receive, ours, sender)

    def call(self, method: str, *args: Any, shared: Any = None) -> Future[Any]:
        """Call a method of the host; the future gets its result or error, or ``died``."""
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()  # The caller may be cancelled, the call may not.
        try:
            arguments = pickled(args, with_main=self._with_main)
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
        """Tell the process to end, and do not wait."""
        self._outbox.put(None)

    def end(self, seconds: float) -> int | None:
        """Wait for the process to end, at most ``seconds``, then kill it; returns its exit code."""
        if not wait([self._process.sentinel], seconds):
            self._process.kill()
            wait([self._process.sentinel])
        with _exit_codes:
            return self._process.exitcode

    def _receive(self, connection: Connection, sender: threading.Thread) -> None:
        """Receive replies until the process is gone."""
        with suppress(EOFError, OSError):
            # Others that have the process's end of the pipe may outlive it.
            while connection in wait([connection, self._process.sentinel]):
                number, returned, data = pickle.loads(connection.recv_bytes())
                with self._lock:
                    outcome = self._calls.pop(number)
                settle(outcome, read_answer, returned, data)
        code = self.end(_GONE_SECONDS)
        self._outbox.put(None)
        hint = _MAIN_MODULE if code == 1 else ""
        gone = self._died(f"{self.name} has ended with exit code {code}.{hint}")
        with self._lock:
            self._gone = gone
            lost, self._calls = self._calls, {}
        self.ended.set_exception(gone)  # First, so that nobody gives it anything to do again.
        for outcome in lost.values():
            outcome.set_exception(gone)
        sender.join()  # Or its end mark could go to the next connection that gets the descriptor.
        connection.close()


def restart_pause(in_a_row: int, longest: float) -> float:
    """Seconds to wait before a process is started that died a number of times in a row.

    Examples:
        >>> [restart_pause(in_a_row, 1.0) for in_a_row in (0, 1, 2, 3, 9)]
        [0.0, 0.0, 0.1, 0.2, 1.0]
    """
    return min(0.1 * 2 ** (in_a_row - 2), longest) if in_a_row > 1 else 0.0


def _send_all(connection: Connection, outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Send messages until ``None`` comes, then an empty one as the end mark."""
    with suppress(OSError):
        while (message := outbox.get()) is not None:
            connection.send_bytes(message)
        connection.send_bytes(b"")


# In the process


def _serve(connection: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Answer calls until the end mark comes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles interrupts.
    host = make(*args)
    answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    start_daemon(_send_all, connection, answers)

    def reply(number: int, call: Future[tuple[bool, bytes]]) -> None:
        if not call.cancelled():
            answers.put(pickle.dumps((number, *call.result())))

    with suppress(EOFError, OSError):
        while data := connection.recv_bytes():
            number, *message = pickle.loads(data)
            host.call(*message).add_done_callback(partial(reply, number))
    start_daemon(_exit_later)
    host.close()


def _exit_later() -> None:
    """End this process even if something cannot be closed, and nobody is left to kill it."""
    time.sleep(_END_SECONDS)
    os._exit(1)
