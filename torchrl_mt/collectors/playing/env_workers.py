"""Worker processes for environments that compute, since threads share one core.

If a process dies, only its own episodes fail, and a new process replaces it. No process is left when
the workers are closed or the parent process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import pickle
import queue
import signal
import threading
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torchrl_mt.collectors import context
from torchrl_mt.collectors.context import EpisodeContext
from torchrl_mt.collectors.event_loop.loop_thread import LoopThread
from torchrl_mt.collectors.playing.env_factory import is_agent, is_workflow, resolve
from torchrl_mt.envs import Message, TextEnv, TextStep
from torchrl_mt.envs.text_env import takes_message
from torchrl_mt.processes import (
    copyable_error,
    end_process,
    pickle_argument,
    pipe,
    preload,
    send_all,
    start_process,
)
from torchrl_mt.threads import settle, start_daemon

__all__ = ["EnvWorkerError", "EnvWorkers"]

preload(__name__)

_CLOSE_SECONDS = 5.0
"""Seconds for a process to end by itself."""
_GONE_SECONDS = 1.0
"""Seconds for a process to end by itself after it closed its end of the pipe."""


class EnvWorkerError(RuntimeError):
    """The process of an episode's environment is gone."""


class EnvWorkers:
    """Processes that run environments. Each runs many, with a thread for every call.

    They import the main module anew, so a script needs ``if __name__ == "__main__":``.

    Args:
        number: number of processes.
        env: an environment, a class or its name, or a callable that makes one; it is pickled.
        kwargs: arguments for the class.

    Raises:
        ValueError: if ``number`` is below 1.
        TypeError: if ``env`` is none of these or cannot be pickled.
    """

    def __init__(self, number: int, env: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        if number < 1:
            raise ValueError(f"env_workers must be at least 1 process, got {number}.")
        resolve(env, kwargs)
        if is_workflow(env) or is_agent(env):
            raise _no_environment(f"{env!r}, which calls the engine itself")
        pickled = pickle_argument("env", (env, dict(kwargs or {})))
        self._workers = [_Worker(pickled) for _ in range(number)]
        self._ids = itertools.count()

    def make(self) -> TextEnv:
        """Make an environment for one episode, in the process that has the fewest."""
        return _Proxy(min(self._workers, key=lambda worker: len(worker.envs)), next(self._ids))

    def close(self) -> None:
        """End the processes and abandon running calls."""
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.end()


class _Proxy(TextEnv):
    """An environment in another process."""

    inline = True

    def __init__(self, worker: _Worker, number: int) -> None:
        self._worker = worker
        self._number = number
        worker.envs.add(number)

    async def reset(self, data: Any = None) -> Sequence[Message]:
        whole_text, schemas, messages = await self._worker.call(self._number, "reset", data)
        self.whole_text, self.tool_schemas = whole_text, schemas  # type: ignore[misc]
        return messages

    async def step(self, response: str, message: Message) -> TextStep:  # type: ignore[override]
        return await self._worker.call(self._number, "step", response, message)

    async def close(self) -> None:
        self._worker.envs.discard(self._number)
        await self._worker.call(self._number, "close")

    def __deepcopy__(self, memo: Any) -> _Proxy:
        raise TypeError("an environment in another process cannot be copied.")


class _Worker:
    """A process and its pending calls. A process that dies is replaced."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self.envs: set[int] = set()
        """Numbers of the environments that it runs."""
        self._lock = threading.Lock()
        self._closed = False
        self._numbers = itertools.count()
        """Numbers of calls, across processes."""
        self._begin()

    def _begin(self) -> None:
        """Start the process and the threads of its connection."""
        ours, theirs = pipe()
        self._process = start_process(_serve, (theirs, self._pickled), "torchrl_mt-env")
        theirs.close()
        self._connection = ours
        self._calls: dict[int, Future[Any]] = {}
        self._known: set[int] = set()
        self._begun = False
        self._failure: BaseException | None = None
        """Error for every further call, once there is no process."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Sending and receiving may block.
        start_daemon(send_all, ours, self._outbox)
        start_daemon(self._receive, ours, self._outbox, self._process)

    async def call(self, env: int, method: str, *args: Any) -> Any:
        """Call a method of an environment.

        Raises:
            EnvWorkerError: if the process is gone or dies during the call.
            Exception: the method's error.
        """
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()  # The caller may be cancelled, the call may not.
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if method == "reset":
                self._known.add(env)
            elif env not in self._known:  # It was lost with the process before this one.
                if method == "close":
                    return None
                raise EnvWorkerError("the process that ran the episode's environment is gone.")
            if method == "close":
                self._known.discard(env)
            number = next(self._numbers)
            of = context.current.get(None)
            sent = bytes(ForkingPickler.dumps((number, env, method, args, of)))
            self._calls[number] = outcome
            self._outbox.put(sent)
        try:
            return await asyncio.wrap_future(outcome)
        finally:
            self._calls.pop(number, None)

    def ask_to_end(self) -> None:
        """Tell the process to end."""
        with self._lock:
            self._closed = True
            self._outbox.put(None)

    def end(self) -> None:
        """Wait for the process to end; kill it if it does not."""
        end_process(self._process, _CLOSE_SECONDS)

    def _receive(
        self, connection: Connection, outbox: queue.SimpleQueue[bytes | None], process: Any
    ) -> None:
        """Receive results until the process is gone, then replace it."""
        error: BaseException | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, failed, value = pickle.loads(connection.recv_bytes())
                if number is None:
                    self._begun, error = not failed, value
                    continue
                if (outcome := self._calls.pop(number, None)) is not None:
                    settle(outcome, _raised_or_returned, failed, value)
        exit_code = end_process(process, _GONE_SECONDS)
        outbox.put(None)
        connection.close()
        gone = error or EnvWorkerError(
            f"the process of the episode's environment has ended with exit code {exit_code}."
        )
        with self._lock:
            lost, self._calls = self._calls, {}
            self._known.clear()
            if not self._closed and self._begun:
                self._begin()
            else:
                self._failure = gone
        for outcome in lost.values():
            settle(outcome, _raised_or_returned, True, gone)


def _raised_or_returned(failed: bool, value: Any) -> Any:
    """Raise the process's error, or return its result."""
    if failed:
        # Several calls may share one error; each adds its own traceback.
        raise copy.copy(value)
    return value


# In the process


def _serve(connection: Connection, pickled: bytes) -> None:
    """Run environments until the parent sends the end mark or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent process handles interrupts.
    replies = _Replies(connection)
    try:
        env, kwargs = pickle.loads(pickled)
        served = _ServedEnvs(env, kwargs, replies)
    except BaseException as error:
        replies.send(None, True, error)
        return
    replies.send(None, False, None)
    with contextlib.suppress(EOFError, OSError):
        while received := connection.recv_bytes():
            # A thread that hangs delays no other call, and dies with the process.
            start_daemon(served.call, *pickle.loads(received))


class _Replies:
    """Sends the results and errors of calls."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, number: int | None, failed: bool, value: Any) -> None:
        """Send a result or an error."""
        if failed:
            value = copyable_error(value)
        try:
            sent = bytes(ForkingPickler.dumps((number, failed, value)))
            pickle.loads(sent)
        except Exception as error:
            value = TypeError(f"an environment must return values that pickle can copy: {error}.")
            sent = bytes(ForkingPickler.dumps((number, True, value)))
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(sent)


class _ServedEnvs:
    """The environments of a process."""

    def __init__(self, env: Any, kwargs: Mapping[str, Any], replies: _Replies) -> None:
        self._make = resolve(env, kwargs)
        self._replies = replies
        self._envs: dict[int, TextEnv] = {}
        self._closed: set[int] = set()
        """Environments that were closed before their reset had made them."""
        self._loop: LoopThread | None = None
        self._lock = threading.Lock()

    def call(
        self, number: int, env: int, method: str, args: tuple[Any, ...], of: EpisodeContext | None
    ) -> None:
        """Call a method of an environment and send its result or error."""
        if of is not None:
            context.current.set(of)
        try:
            result = getattr(self, f"_{method}")(env, *args)
        except BaseException as error:
            self._replies.send(number, True, error)
        else:
            self._replies.send(number, False, result)

    def _reset(
        self, number: int, data: Any
    ) -> tuple[bool, Sequence[Mapping[str, Any]], list[Message]]:
        env = self._make()
        if not isinstance(env, TextEnv):
            raise _no_environment(f"a {type(env).__name__}")
        if type(env).__module__ == "torchrl_mt.envs.torchrl_env":
            raise _no_environment("a TorchRL environment, whose copies share what they draw")
        with self._lock:
            self._envs[number] = env
            is_over = number in self._closed
        if is_over:
            self._close(number)
            raise asyncio.CancelledError
        messages = list(self._finished(env.reset(data)))
        return env.whole_text, env.tool_schemas, messages

    def _step(self, number: int, response: str, message: Message) -> TextStep:
        env = self._envs[number]
        args = (response, message) if takes_message(env.step) else (response,)
        return self._finished(env.step(*args))

    def _close(self, number: int) -> None:
        with self._lock:
            env = self._envs.pop(number, None)
            if env is None:
                self._closed.add(number)
        if env is not None:
            self._finished(env.close())

    def _finished(self, value: Any) -> Any:
        """The result of a plain or an ``async`` method; awaitables run in one loop."""
        if not isinstance(value, Awaitable):
            return value

        async def awaited() -> Any:
            return await value

        with self._lock:
            if self._loop is None:
                self._loop = LoopThread("torchrl_mt-env-loop")
        return self._loop.run(awaited())


def _no_environment(got: str) -> TypeError:
    return TypeError(
        f"env_workers runs environments (TextEnv) in processes of their own, got {got}: leave it out."
    )
