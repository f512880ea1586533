"""Worker processes: how they start and end, and what is sent to them.

Where the system can do that, they are forks of a server that has imported the package: they start at
once and share its memory.
"""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NoReturn

import cloudpickle

__all__ = [
    "StaysInProcess",
    "copyable_error",
    "end_process",
    "pickle_argument",
    "pickled",
    "pipe",
    "preload",
    "send_all",
    "start_process",
]

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


def pickle_argument(name: str, value: Any) -> bytes:
    """Pickle an argument that is sent to other processes.

    Raises:
        TypeError: if it cannot be pickled.

    Examples:
        >>> pickle_argument("env", lambda: None)
        Traceback (most recent call last):
        ...
        TypeError: env is sent to other processes, but pickling it raised ...
    """
    try:
        return bytes(ForkingPickler.dumps(value))
    except Exception as error:
        raise TypeError(
            f"{name} is sent to other processes, but pickling it raised {type(error).__name__}: "
            f"{error}: give a class or a function that is defined in a module."
        ) from error


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


def copyable_error(error: BaseException) -> BaseException:
    """An error as another process can receive it: itself, or one with its text and traceback."""
    try:
        # Some errors can be pickled but not unpickled.
        pickle.loads(ForkingPickler.dumps(error))
    except Exception:
        what = "".join(traceback.format_exception(error)).strip()
        return RuntimeError(f"{type(error).__name__}: {error}\n{what}")
    return error


def pipe(duplex: bool = True) -> tuple[Connection, Connection]:
    """Make a pipe; without ``duplex``, the first end receives and the second one sends."""
    return _context.Pipe(duplex)


def send_all(connection: Connection, outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Send messages until ``None`` comes, then an empty one as the end mark; for a thread."""
    with suppress(OSError):
        while (message := outbox.get()) is not None:
            connection.send_bytes(message)
        connection.send_bytes(b"")


def start_process(
    target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool = True
) -> Any:
    """Start a process that calls a function; unless ``daemon``, it may have processes of its own."""
    process = _context.Process(target=target, args=args, name=name, daemon=daemon)
    with _exit_codes:
        process.start()
    return process


def end_process(process: Any, seconds: float) -> int | None:
    """Wait for a process to end by itself, then kill it; returns its exit code."""
    if not wait([process.sentinel], seconds):
        process.kill()
        wait([process.sentinel])
    with _exit_codes:
        return process.exitcode
