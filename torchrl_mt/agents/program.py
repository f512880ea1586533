"""Programs as agents: a command is run for each episode, and calls the model over HTTP.

The promise: however an episode ends, its program ends with it, and so does everything in the program's
process group. No process, pipe, thread or task is left.

``asyncio``'s subprocesses reap a program before anybody can signal what it left behind; by then, its
process group may have another owner.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torchrl_mt.checks import check_positive
from torchrl_mt.collectors.workflow import Rejected
from torchrl_mt.threads import call_in_thread, call_user

__all__ = ["AgentProgram", "ProgramTimeoutError"]

_logger = logging.getLogger("torchrl_mt")

# fmt: off
_INHERITED = (
    "HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH",
    "SHELL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
)
# fmt: on
"""Variables of this process that programs always have; none of them holds a secret."""
_STDOUT_BYTES = 4 * 2**20
"""Bytes of standard output that are kept."""
_STDERR_BYTES = 2000
"""Bytes of standard error that are kept."""
_GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_OUTPUT_SECONDS = 1.0
"""Seconds for the rest of the output, which a process outside of the group may hold open."""
_POLL_SECONDS = 0.01


class ProgramTimeoutError(Rejected, TimeoutError):
    """A program took longer than ``timeout``; its episode is rejected as ``"program_timeout"``.

    Args:
        seconds: the timeout.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(
            "program_timeout", f"the program took longer than timeout={seconds:g} seconds."
        )


class AgentProgram:
    """An agent that is a program: it runs a command for each episode.

    The program finds the model's address and the episode's key in ``OPENAI_BASE_URL`` and
    ``OPENAI_API_KEY``, where OpenAI's clients look for them. On standard input it gets the episode's
    item as JSON. When it has ended, ``reward`` is called.

    The program and all its children form a process group. What is left of the group when the program
    ends, its time runs out or the episode is over gets SIGTERM and, two seconds later, SIGKILL. A child
    that leaves the group (``setsid``) is left alone.

    Args:
        command: the program and its arguments.
        reward: called as ``reward(data, transcript, returncode, stdout)``, in a thread unless it is
            ``async``. ``transcript`` has ``{"request": body, "response": body}`` for each call, in
            order. ``returncode`` is the exit status, or ``-N`` if signal ``N`` ended the program; a
            status that is not 0 rejects nothing by itself. ``stdout`` is the text of standard output,
            of which the last 4 MiB are kept. Returns what an agent's ``run`` returns: a number,
            ``{completion_id: reward}``, a list with one reward per call, or ``None`` to reject the
            episode.
        env: environment variables of the program, which replace inherited ones.
        env_inherit: names of further variables of this process that the program has, or ``True`` for
            all. By default, it has those that find programs, libraries and folders (``PATH``, ``HOME``,
            ``LANG``, ``TMPDIR``, ``PYTHONPATH`` and the like), and no keys or tokens.
        cwd: the program's working directory; that of this process if ``None``.
        timeout: seconds for the program. When they have passed, the episode is rejected, and ``reward``
            is not called. No limit if ``None``.

    Raises:
        TypeError: if ``command`` is no sequence of strings, ``reward`` cannot be called, or ``env`` has
            anything but strings, or ``env_inherit`` is neither ``True`` nor a list of names.
        ValueError: if ``command`` is empty, or ``timeout`` is not positive.
        NotImplementedError: on Windows, which has no process groups of this kind.

    Examples:
        >>> def reward(data, transcript, returncode, stdout):
        ...     return float(returncode == 0 and stdout.strip() == data["answer"])
        >>> agent = AgentProgram(["python", "solve.py"], reward=reward, timeout=600)
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        reward: Callable[..., Any],
        env: Mapping[str, str] | None = None,
        env_inherit: Sequence[str] | Literal[True] = (),
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        if os.name != "posix":
            raise NotImplementedError(
                "AgentProgram needs the process groups of Linux and macOS, got Windows: run it in WSL."
            )
        if isinstance(command, (str, bytes)) or not isinstance(command, Sequence):
            raise TypeError(
                f"command must be a list of strings, got {command!r}: split a command line with "
                "shlex.split."
            )
        if not command:
            raise ValueError("command must name a program, got an empty list.")
        for part in command:
            if not isinstance(part, (str, os.PathLike)):
                raise TypeError(f"command must be a list of strings, got {part!r} in it.")
        if not callable(reward):
            raise TypeError(f"reward must be a function, got {reward!r}.")
        for name, value in (env or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"env must map strings to strings, got {name!r}: {value!r}.")
        if env_inherit is not True and (
            isinstance(env_inherit, str)
            or not all(isinstance(name, str) for name in env_inherit or ())
        ):
            raise TypeError(f"env_inherit must be True or a list of names, got {env_inherit!r}.")
        if timeout is not None:
            check_positive("timeout", timeout)
        self._env_inherit = env_inherit
        self._command = [os.fspath(part) for part in command]
        self._reward = reward
        self._env = dict(env or {})
        self._cwd = cwd
        self._timeout = timeout
        self._has_warned = False

    async def run(
        self, data: Any, *, base_url: str, api_key: str, http_client: Any, session: Any
    ) -> Any:
        """Run the program for one episode and return its reward.

        Args:
            data: the episode's item.
            base_url: the model's address for the program.
            api_key: the episode's key.
            http_client: not used.
            session: gives the ``transcript``.

        Raises:
            TypeError, ValueError: if the item is not fit for JSON.
            OSError: if the program cannot be started.
            ProgramTimeoutError: if the program took too long.
            Exception: of the reward.
        """
        item = _as_json(data)
        names = os.environ if self._env_inherit is True else {*_INHERITED, *self._env_inherit}
        own = {name: os.environ[name] for name in names if name in os.environ}
        env = {**own, **self._env, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        process = await call_in_thread(self._start, item, env, unclaimed=_end)
        stdout = _Tail(process.stdout, _STDOUT_BYTES)
        stderr = _Tail(process.stderr, _STDERR_BYTES)
        try:
            try:
                await stdout.read()
                await stderr.read()
                in_time = await self._wait(process)
            finally:
                # In a thread, so that the program ends even if the event loop does.
                await call_in_thread(_end, process)
            if not in_time:
                assert self._timeout is not None
                raise ProgramTimeoutError(self._timeout)
            await asyncio.wait([stdout.ended, stderr.ended], timeout=_OUTPUT_SECONDS)
        finally:
            stdout.close()
            stderr.close()
        self._warn(process.returncode, stderr.text())
        return await call_user(
            self._reward, data, session.transcript, process.returncode, stdout.text()
        )

    def _start(self, item: bytes, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the program. Runs in a thread."""
        # A file, since a program that reads nothing would leave a pipe full.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(item)
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    self._command,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env=env,
                    cwd=self._cwd,
                    start_new_session=True,
                )
            except OSError as error:
                raise type(error)(
                    f"command must be a program that can be started, got {self._command} (cwd="
                    f"{self._cwd!r}): {error}."
                ) from error
        _running[process] = os.getpid()
        return process

    async def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the program ends, for at most ``timeout``; whether it has ended."""
        exited = asyncio.ensure_future(call_in_thread(_wait_for_exit, process))
        try:
            await asyncio.wait([exited], timeout=self._timeout)
            return exited.done()
        finally:
            exited.cancel()

    def _warn(self, returncode: int, stderr: str) -> None:
        """Warn once of a program that failed."""
        if returncode and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s has ended with status %d; further ones are not logged. Its standard error ends "
                "with: %s",
                self._command,
                returncode,
                stderr or "(nothing)",
            )


class _Tail(asyncio.Protocol):
    """Reads a pipe to its end and keeps the last bytes.

    Args:
        pipe: the pipe, as a file.
        size: number of bytes to keep.
    """

    def __init__(self, pipe: Any, size: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pipe = pipe
        self._size = size
        self._kept = bytearray()
        self._transport: asyncio.ReadTransport | None = None

    async def read(self) -> None:
        """Begin to read."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: self, self._pipe)

    def data_received(self, data: bytes) -> None:
        """Keep bytes; called by the transport."""
        self._kept += data
        if len(self._kept) > 2 * self._size:
            del self._kept[: -self._size]

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end; called by the transport."""
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Stop reading and close the pipe."""
        if self._transport is None:
            self._pipe.close()
        else:
            self._transport.close()

    def text(self) -> str:
        """The last bytes as text."""
        return self._kept[-self._size :].decode(errors="replace")


_running: dict[subprocess.Popen[bytes], int] = {}
"""Programs that were not ended yet, and the process that started each."""


def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait until a program has ended, without reaping it. Runs in a thread."""
    if hasattr(os, "waitid"):
        with contextlib.suppress(ChildProcessError):  # reaped meanwhile
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:  # macOS before Python 3.13
        process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program with its process group and reap it. Runs in a thread."""
    # As long as nobody reaps it, the group's number belongs to nobody else.
    _signal(process, signal.SIGTERM)
    end = time.monotonic() + _GRACE_SECONDS
    while process.poll() is None or _signal(process, 0):
        if time.monotonic() >= end:
            _signal(process, signal.SIGKILL)
            process.wait()
            break
        time.sleep(_POLL_SECONDS)
    _running.pop(process, None)


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a program's process group; whether there is one."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # the latter on macOS, of a group that has ended
        return False
    return True


@atexit.register
def _kill_all() -> None:
    """Kill what runs when the interpreter exits, since threads do not outlive it."""
    for process, owner in list(_running.items()):
        if owner == os.getpid():
            _signal(process, signal.SIGKILL)


def _as_json(data: Any) -> bytes:
    """An item as JSON.

    Raises:
        TypeError, ValueError: if it is not fit for JSON.
    """
    try:
        return json.dumps(data, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"data must hold items that are fit for JSON, which programs read from standard input, got "
            f"{type(data).__name__}: {error}."
        ) from error
