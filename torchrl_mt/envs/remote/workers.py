"""Several worker processes that serve environments."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable

from torchrl_mt.checks import check_positive_finite, check_positive_integer
from torchrl_mt.envs.remote.server import ServerOptions, check_factory, listen
from torchrl_mt.envs.remote.worker import Worker
from torchrl_mt.envs.text_env import TextEnv
from torchrl_mt.processes import pickle_argument
from torchrl_mt.threads import call_in_thread

__all__ = ["Workers", "create_workers"]


class Workers(list[Worker]):
    """The list of workers that :func:`create_workers` makes; a context manager, also ``async``."""

    @property
    def urls(self) -> list[str]:
        """Addresses of the workers, for :class:`~torchrl_mt.envs.OpenEnvEnv`."""
        return [worker.api_url for worker in self]

    def stop(self) -> None:
        """Stop all workers at the same time, and wait for them."""
        for worker in self:
            worker._ask_to_stop()
        for worker in self:
            worker.stop()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _stopped(self)


async def create_workers(
    n_workers: int,
    make_env: Callable[[], TextEnv],
    *,
    allowed_ips: Iterable[str] = ("127.0.0.1", "::1"),
    token: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    max_sessions: int = 64,
    idle_timeout: float = 300.0,
    timeout: float = 60.0,
) -> Workers:
    """Start processes that serve environments, and wait until each answers ``/health``.

    A process that dies or hangs is replaced at the same address. Its episodes fail, and those of other
    workers go on. If it dies at once again and again, the worker is given up, and the error is logged.
    Workers end when they are stopped and when this process ends, even if it is killed.

    The processes import the main module anew, so a script needs ``if __name__ == "__main__":``.

    Args:
        n_workers: number of processes.
        make_env: makes the environment of a session: a class, or a function that is defined in a module.
        allowed_ips: addresses of clients; see :func:`~torchrl_mt.envs.serve`, also for the others.
        token: what clients must send. Required unless ``host`` is this machine only.
        host: address to listen on.
        port: port of the first worker; the others take the next ones. 0 takes free ports.
        max_sessions: maximum number of sessions of each worker.
        idle_timeout: seconds after which a session without messages is closed.
        timeout: seconds for ``/health`` to answer, from the start and later. A worker that needs more is
            killed and started again.

    Returns:
        The :class:`Workers`, a list of :class:`Worker` with ``api_url`` and ``stop()``.

    Raises:
        ValueError: if a number is out of range.
        TypeError: if ``make_env`` is not callable or cannot be pickled.
        WorkerError: if a worker ends or does not answer. If it raises an error, that one. No worker is
            left then, nor if the call is cancelled.

    Examples:
        >>> workers = await create_workers(4, MyEnv)  # doctest: +SKIP
        >>> with workers:  # doctest: +SKIP
        ...     collector = MultiTurnCollector(OpenEnvEnv(workers.urls), engine, data)
    """
    n_workers = check_positive_integer("n_workers", n_workers)
    check_positive_finite("timeout", timeout)
    check_factory(make_env)
    pickled = pickle_argument("make_env", make_env)
    options = ServerOptions(token, allowed_ips, max_sessions, idle_timeout)
    sockets: list[socket.socket] = []
    workers = Workers()
    try:
        for number in range(n_workers):
            sockets.append(listen(host, port + number if port and number else port, token))
        for listening in sockets:
            workers.append(Worker(pickled, options, listening, timeout))
        await asyncio.gather(*(asyncio.wrap_future(worker._ready) for worker in workers))
    except BaseException:
        await _stopped(workers)
        for listening in sockets:
            listening.close()
        raise
    return workers


async def _stopped(workers: Workers) -> None:
    """Stop workers, even if the caller is cancelled meanwhile."""
    stopping = asyncio.ensure_future(call_in_thread(workers.stop))
    cancelled: asyncio.CancelledError | None = None
    while not stopping.done():
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
