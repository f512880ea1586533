"""Workers that are Ray actors, on any machine of its cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from torchrl_mt._hosts.torchrl import hold_ray
from torchrl_mt.checks import import_extra
from torchrl_mt.collectors.distributed.backend import Handle, WorkerDied
from torchrl_mt.collectors.distributed.worker import EpisodeWorker
from torchrl_mt.collectors.event_loop.host import Host
from torchrl_mt.processes import pickled, read_answer
from torchrl_mt.threads import settle

__all__ = ["RayBackend"]

_CALLS = 100_000
"""Calls that an actor may have at once; each is a task of its event loop."""


class RayBackend:
    """Starts Ray actors.

    Args:
        setup: arguments of the workers, pickled one by one.
        number: number of workers.
        remote_configs: options of ``ray.remote`` for all workers, or a list of one for each.
        ray_init_config: arguments of ``ray.init``, if Ray is not initialised.
    """

    def __init__(
        self,
        setup: Mapping[str, bytes],
        number: int,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
    ) -> None:
        configs = remote_configs if isinstance(remote_configs, Sequence) else None
        if configs is not None and len(configs) != number:
            raise ValueError(
                f"remote_configs must be one dict for all, or one for each of num_collectors={number}, "
                f"got {len(configs)}."
            )
        self._configs = [dict(remote_configs or {})] * number if configs is None else configs  # type: ignore[arg-type]
        self._ray = import_extra("ray", "ray")
        self._give_up = hold_ray(ray_init_config)
        self._setup = self._ray.put(dict(setup))

    def start(self, index: int, seed: int) -> Handle:
        """Start an actor."""
        # Ray's own restarts would lose the weights.
        options = {"max_concurrency": _CALLS, **self._configs[index]}
        options |= {"max_restarts": 0, "max_task_retries": 0}
        actor = self._ray.remote(**options)(_Actor).remote(self._setup, index, seed)
        return _RayHandle(self._ray, actor, index)

    def put(self, value: Any) -> Any:
        """Put a value into Ray's object store."""
        return self._ray.put(value)

    def close(self) -> None:
        """Shut Ray down if nobody else needs it."""
        self._setup = None
        self._give_up()


class _RayHandle:
    """An actor."""

    def __init__(self, ray: Any, actor: Any, index: int) -> None:
        self._ray, self._actor = ray, actor
        self.name = f"the worker {index}"
        self.ended: Future[None] = Future()
        self._closing: Future[Any] | None = None
        self._follow(actor.run.remote(), self.ended)

    def call(self, method: str, *args: Any, shared: Any = None) -> Future[Any]:
        """Call a method of the worker."""
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()  # The caller may be cancelled, the call may not.
        try:
            arguments = pickled(args, with_main=True)
            self._follow(self._actor.call.remote(method, arguments, shared), outcome)
        except Exception as error:
            outcome.set_exception(error)
        return outcome

    def ask_to_end(self) -> None:
        """Let the actor close its worker."""
        if self._ray.is_initialized():
            self._closing = self._actor.close.remote().future()

    def end(self, seconds: float) -> None:
        """Wait until the worker is closed, and end the actor."""
        if self._closing is not None:
            wait([self._closing], seconds)
        if self._ray.is_initialized():
            self._ray.kill(self._actor, no_restart=True)

    def _follow(self, reference: Any, outcome: Future[Any]) -> None:
        """Settle a future with what an actor's method answers."""
        reference.future().add_done_callback(lambda answer: settle(outcome, self._read, answer))

    def _read(self, answer: Future[Any]) -> Any:
        try:
            returned, data = answer.result()
        except self._ray.exceptions.RayActorError as error:
            raise WorkerDied(f"{self.name} is gone: {error}") from error
        return read_answer(returned, data)


class _Actor:
    """A worker in a Ray actor."""

    def __init__(self, setup: Mapping[str, bytes], index: int, seed: int) -> None:
        self._host = Host(EpisodeWorker.of, setup, index, seed)

    async def call(self, method: str, args: bytes, shared: Any) -> tuple[bool, bytes]:
        """Call a method of the worker."""
        return await asyncio.wrap_future(self._host.call(method, args, shared))

    async def run(self) -> None:
        """Go on for as long as the actor does, so that its end is seen."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Close the worker."""
        await asyncio.get_running_loop().run_in_executor(None, self._host.close)
