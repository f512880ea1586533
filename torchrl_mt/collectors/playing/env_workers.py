"""Worker processes for environments that compute, since threads share one core.

If a process dies, only its own episodes fail, and a new process replaces it. No process is left when
the workers are closed or the parent process is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torchrl_mt.collectors import context
from torchrl_mt.collectors.context import EpisodeContext
from torchrl_mt.collectors.event_loop.host import Host
from torchrl_mt.collectors.playing.env_factory import is_agent, is_workflow, resolve
from torchrl_mt.envs import Message, TextEnv, TextStep
from torchrl_mt.envs.text_env import takes_message
from torchrl_mt.processes import WorkerProcess, pickle_argument, preload
from torchrl_mt.threads import call_in_thread, call_user

__all__ = ["EnvWorkerError", "EnvWorkers"]

preload(__name__)

_CLOSE_SECONDS = 5.0
"""Seconds for a process to end by itself."""


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
        await self._worker.call(self._number, "close_env")

    def __deepcopy__(self, memo: Any) -> _Proxy:
        raise TypeError("an environment in another process cannot be copied.")


class _Worker:
    """A process and its environments. A process that dies is replaced."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self.envs: set[int] = set()
        """Numbers of the environments that it runs."""
        self._lock = threading.RLock()
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Start a process."""
        args = (_Envs, self._pickled)
        self._process = WorkerProcess(Host, args, "torchrl_mt-env", EnvWorkerError, daemon=True)
        self._known: set[int] = set()
        begun = self._begun = self._process.call("begin")
        self._process.ended.add_done_callback(lambda _: self._died(begun))

    def _died(self, begun: Future[None]) -> None:
        """Replace the process, unless it died in its start: then it is the reply to all calls."""
        with self._lock:
            if not self._closed and begun.done():
                self._begin()

    async def call(self, env: int, method: str, *args: Any) -> Any:
        """Call a method of an environment.

        Raises:
            EnvWorkerError: if the process is gone or dies during the call.
            Exception: the method's error.
        """
        with self._lock:
            if method == "reset":
                self._known.add(env)
            elif env not in self._known:  # It was lost with the process before this one.
                if method == "close_env":
                    return None
                raise EnvWorkerError("the process that ran the episode's environment is gone.")
            if method == "close_env":
                self._known.discard(env)
            process, begun = self._process, self._begun
        await asyncio.wrap_future(begun)  # Or what dies in the call would seem to have died before.
        outcome = process.call(method, env, context.current.get(None), *args)
        return await asyncio.wrap_future(outcome)

    def ask_to_end(self) -> None:
        """Tell the process to end."""
        with self._lock:
            self._closed = True
            self._process.ask_to_end()

    def end(self) -> None:
        """Wait for the process to end; kill it if it does not."""
        self._process.end(_CLOSE_SECONDS)


# In the process


class _Envs:
    """The environments of a process. A method that hangs delays no other, as each has its thread."""

    def __init__(self, pickled: bytes) -> None:
        self._make = resolve(*pickle.loads(pickled))
        self._envs: dict[int, TextEnv] = {}
        self._closed: set[int] = set()
        """Environments that were closed before their reset had made them."""

    async def begin(self) -> None:
        """Answer, so that the process is known to have started."""

    async def reset(
        self, number: int, of: EpisodeContext | None, data: Any
    ) -> tuple[bool, Sequence[Mapping[str, Any]], list[Message]]:
        """Make an environment and begin its episode."""
        _enter(of)
        env = await call_in_thread(self._make)
        if not isinstance(env, TextEnv):
            raise _no_environment(f"a {type(env).__name__}")
        if type(env).__module__ == "torchrl_mt.envs.torchrl_env":
            raise _no_environment("a TorchRL environment, whose copies share what they draw")
        self._envs[number] = env
        if number in self._closed:
            await self.close_env(number, of)
            raise asyncio.CancelledError
        messages = list(await call_user(env.reset, data))
        return env.whole_text, env.tool_schemas, messages

    async def step(
        self, number: int, of: EpisodeContext | None, response: str, message: Message
    ) -> TextStep:
        """Take a step in an environment."""
        _enter(of)
        env = self._envs[number]
        args = (response, message) if takes_message(env.step) else (response,)
        return await call_user(env.step, *args)

    async def close_env(self, number: int, of: EpisodeContext | None) -> None:
        """Close an environment."""
        _enter(of)
        env = self._envs.pop(number, None)
        if env is None:
            self._closed.add(number)
        else:
            await call_user(env.close)

    def close(self) -> None:
        """Leave the environments to the end of the process."""


def _enter(of: EpisodeContext | None) -> None:
    """Let the call's task, and the threads that it starts, have the context of the episode."""
    if of is not None:
        context.current.set(of)


def _no_environment(got: str) -> TypeError:
    return TypeError(
        f"env_workers runs environments (TextEnv) in processes of their own, got {got}: leave it out."
    )
