"""What runs workers: processes on this machine, or Ray's actors anywhere."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from torchrl_mt.collectors.scheduling.groups import Interrupted

__all__ = ["Backend", "Handle", "WorkerDied"]


class WorkerDied(Interrupted):
    """The worker that played the episode is gone; the item of its group is played again."""


class Handle(Protocol):
    """A worker, from outside. May be used in any thread."""

    name: str
    """What the log calls it."""
    ended: Future[None]
    """Raises :class:`WorkerDied` once the worker is gone."""

    def call(self, method: str, *args: Any, shared: Any = None) -> Future[Any]:
        """Call a method of the worker.

        Args:
            method: one of :class:`~torchrl_mt.collectors.distributed.worker.EpisodeWorker`.
            *args: arguments.
            shared: an argument that :meth:`Backend.put` returned, by keyword.

        Returns:
            The result, or the method's error; :class:`WorkerDied` if the worker goes before.
        """
        ...

    def ask_to_end(self) -> None:
        """Tell the worker to close its environments and its engine, and do not wait."""
        ...

    def end(self, seconds: float) -> object:
        """Wait for the worker to end, at most ``seconds``; then kill it."""
        ...


class Backend(Protocol):
    """Starts workers."""

    def start(self, index: int, seed: int) -> Handle:
        """Start a worker.

        Args:
            index: number of the worker, from 0.
            seed: seed of its random generators.
        """
        ...

    def put(self, value: Any) -> Any:
        """Put a value where all workers can read it; calls take the result as ``shared``."""
        ...

    def close(self) -> None:
        """Release what the backend itself has; the workers have ended."""
        ...
