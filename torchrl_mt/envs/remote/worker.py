"""A worker: a process that serves environments, at an address that stays the same.

The listening socket belongs to the parent. If the process dies or hangs, the parent replaces it and
answers clients meanwhile. No process outlives :meth:`Worker.stop` or the parent.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from torchrl_mt.envs.remote.served_session import CLOSE_SECONDS
from torchrl_mt.envs.remote.server import EnvServer, ServerOptions, url_of
from torchrl_mt.processes import WorkerProcess, answer, failure, preload, restart_pause
from torchrl_mt.threads import start_daemon

__all__ = ["Worker", "WorkerError"]

preload(__name__)
preload("websockets.asyncio.server")
_logger = logging.getLogger("torchrl_mt")

_END_SECONDS = CLOSE_SECONDS + 2.0
"""Seconds for a process to close its environments and end."""
_PROBE_SECONDS = 5.0
"""Pause between two requests of ``/health``."""
_LOOK_SECONDS = 0.05
"""How often to see whether a worker that turns clients away serves, and pause after a failed request."""
_SHORT_LIFE = 1.0
"""A worker that ends within these seconds from its first reply counts as one that died at once."""
_MOST_STARTS = 5
"""A worker is given up after this many starts in a row without a reply."""
_MOST_SHORT_LIVES = 30
"""A worker is given up after it died at once this often in a row."""
_LONGEST_PAUSE = 1.0
"""Seconds between two starts; the first restart is at once, then pauses double from 0.1."""
_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    b"The worker is being started. Try again.\n"
)
"""What clients are told meanwhile."""
_AWAY_SECONDS = 5.0
"""How long such a client may say nothing."""
_REQUEST_BYTES = 2**16


class WorkerError(RuntimeError):
    """A worker process ended, does not answer, or was given up."""


class Worker:
    """A process that serves environments. :func:`create_workers` makes it."""

    api_url: str
    """Address of the server. It stays the same if the process is replaced; until the new one serves,
    clients get status 503, upon which they try again."""
    error: Exception | None
    """Why the worker was given up, or ``None``. Its address then refuses connections."""
    pid: int | None
    """Id of the process; ``None`` while there is none."""

    def __init__(
        self,
        make_env: bytes,
        options: ServerOptions,
        listening: socket.socket,
        timeout: float,
    ) -> None:
        self._socket = listening
        listening.settimeout(_LOOK_SECONDS)
        self.api_url = url_of(listening)
        self.error = None
        self.pid = None
        self._ready: Future[None] = Future()
        """Settled when the server answers for the first time, or does not start."""
        self._ready.set_running_or_notify_cancel()  # Whoever waits may be cancelled, the start may not.
        self._make_env, self._options, self._timeout = make_env, options, timeout
        self._stopping: Future[None] = Future()
        # All that is done to the process is done in this thread.
        self._supervisor = threading.Thread(
            target=self._supervise, name="torchrl_mt-worker", daemon=True
        )
        self._supervisor.start()
        atexit.register(self.stop)  # Before multiprocessing's own, which would see a restart.

    def __repr__(self) -> str:
        state = "given up" if self.error else f"pid {self.pid}" if self.pid else "no process"
        return f"{type(self).__name__}({self.api_url}, {state})"

    def stop(self) -> None:
        """End the process; its sessions are closed, and it is killed if that takes more than 12 seconds.

        Stopping again does nothing. Any thread may stop a worker.
        """
        self._ask_to_stop()
        self._supervisor.join()
        atexit.unregister(self.stop)

    def _ask_to_stop(self) -> None:
        """Begin to stop, and do not wait."""
        with suppress(InvalidStateError):
            self._stopping.set_result(None)

    # In the supervisor's thread

    def _supervise(self) -> None:
        """Run processes one after the other until :meth:`stop`, or until the worker is given up."""
        in_a_row = 0
        try:
            while (ended := self._run()) is not None:
                why, life = ended
                if not self._ready.done():
                    raise why  # What does not start once is not tried again.
                in_a_row = in_a_row + 1 if life is None or life < _SHORT_LIFE else 0
                if in_a_row >= (_MOST_STARTS if life is None else _MOST_SHORT_LIVES):
                    raise WorkerError(
                        f"the worker {self.api_url} died at once {in_a_row} times in a row and is given "
                        f"up. The last time: {why}"
                    ) from why
                pause = restart_pause(in_a_row, _LONGEST_PAUSE)
                _logger.warning("%s It is started again in %.1f seconds.", why, pause)
                self._wait([], pause, turn_away=True)
        except Exception as error:
            self.error = error
            if self._ready.done():
                _logger.error("%s", error)
            else:
                self._ready.set_exception(error)
        finally:
            self._socket.close()
            if not self._ready.done():
                self._ready.set_exception(WorkerError(f"the worker {self.api_url} was stopped."))

    def _run(self) -> tuple[Exception, float | None] | None:
        """Run a process.

        Returns:
            Why it ended, and the seconds since its first reply, ``None`` without a reply. ``None`` if
            the worker was stopped.
        """
        args = (self._make_env, self._socket, self._options)
        process = WorkerProcess(_Served, args, self.api_url, WorkerError)
        self.pid = process.pid
        answered: float | None = None
        try:
            why = self._failure(process, "begin", turn_away=True)
            while why is None and (why := self._failure(process, "health")) is None:
                if answered is None:
                    answered = time.monotonic()
                if not self._ready.done():
                    self._ready.set_result(None)
                self._wait([process.ended], _PROBE_SECONDS)
            if self._stopping.done():
                return None
            return why, None if answered is None else time.monotonic() - answered
        finally:
            process.ask_to_end()
            process.end(_END_SECONDS if answered is not None else 0.0)
            self.pid = None

    def _failure(
        self, process: WorkerProcess, method: str, *, turn_away: bool = False
    ) -> Exception | None:
        """Call a method of the process; returns why it failed."""
        call = process.call(method)
        self._wait([process.ended, call], self._timeout, turn_away=turn_away)
        if self._stopping.done():
            return WorkerError(f"the worker {self.api_url} was stopped.")
        for each in (process.ended, call):
            if each.done():
                error = each.exception()
                if error is None or isinstance(error, Exception):
                    return error
                return WorkerError(f"the worker {self.api_url} raised {error!r}.")
        process.end(0.0)
        return WorkerError(
            f"the worker {self.api_url} did not answer /health within {self._timeout} seconds and was "
            "killed."
        )

    def _wait(
        self, awaited: Sequence[Future[Any]], seconds: float, *, turn_away: bool = False
    ) -> None:
        """Wait for one of some futures, or for :meth:`stop`.

        Meanwhile clients may be turned away, so that they try elsewhere or later.
        """
        awaited = [*awaited, self._stopping]
        end = time.monotonic() + seconds
        while turn_away and time.monotonic() < end and not any(each.done() for each in awaited):
            with suppress(OSError):  # Mostly, nobody came for a moment.
                start_daemon(_turn_away, self._socket.accept()[0])
        wait(awaited, max(end - time.monotonic(), 0.0), FIRST_COMPLETED)


def _turn_away(client: socket.socket) -> None:
    """Answer a connection with status 503."""
    with client, suppress(OSError):
        client.settimeout(_AWAY_SECONDS)
        client.recv(_REQUEST_BYTES)
        client.sendall(_AWAY)
        client.shutdown(socket.SHUT_WR)
        while client.recv(_REQUEST_BYTES):  # To the end, or the client might see a reset.
            pass


# In the process


class _Served:
    """The server of a process, which is asked for ``/health`` here, as by any client."""

    def __init__(self, make_env: bytes, listening: socket.socket, options: ServerOptions) -> None:
        self._args = make_env, listening, options
        self._server: EnvServer | None = None

    def call(self, method: str, args: bytes, shared: Any) -> Future[tuple[bool, bytes]]:
        """Call :meth:`begin` or :meth:`health` in a thread."""
        outcome: Future[tuple[bool, bytes]] = Future()

        def work() -> None:
            try:
                outcome.set_result(answer(getattr(self, method)()))
            except BaseException as error:
                outcome.set_result((False, failure(error)))

        start_daemon(work)
        return outcome

    def begin(self) -> None:
        """Begin to serve."""
        make_env, listening, options = self._args
        self._server = EnvServer(pickle.loads(make_env), listening, options)

    def health(self) -> None:
        """Ask for ``/health`` until there is a reply."""
        assert self._server is not None
        address = urlsplit(self._server.url).netloc
        while True:
            with suppress(OSError, HTTPException), closing(HTTPConnection(address)) as connection:
                connection.request("GET", "/health", headers={"Connection": "close"})
                connection.getresponse().read()  # To the end, or the server would see a reset.
                return
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Close the sessions."""
        if self._server is not None:
            self._server.stop()
