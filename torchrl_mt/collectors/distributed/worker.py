"""The worker's side: an engine of its own, and episodes played with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from torchrl_mt._hosts.peft import has_adapter_layers
from torchrl_mt.collectors.distributed.messages import Played, Task
from torchrl_mt.collectors.distributed.weights import PackedWeights, PickledWeights
from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.playing.env_factory import named
from torchrl_mt.collectors.playing.episode_player import EpisodePlayer
from torchrl_mt.collectors.playing.version_offset import VersionOffset, count_update
from torchrl_mt.collectors.workflow_entries import ExpectedEntries
from torchrl_mt.engines.completions.updates_elsewhere import ServerStates, UpdatesElsewhere
from torchrl_mt.processes import received
from torchrl_mt.threads import call_in_thread

__all__ = ["EpisodeWorker", "Report"]


class Report(NamedTuple):
    """What a worker tells of its work."""

    episodes: dict[int, tuple[int | None, float, str]]
    """Of running episodes, by id: the oldest version of their tokens, seconds and name of the call that
    has run longest."""
    servers: dict[str, bool]
    """Servers that must load weights, and whether they may have them already."""


class EpisodeWorker:
    """Plays episodes for a collector in another process. Its methods are called in its event loop.

    Args:
        policy_factory: makes the engine or the TorchRL LLM wrapper: a function, the name of one, or a
            list of one for each worker.
        index: number of this worker.
        seed: seed of the random generators of this process.
        **options: of the :class:`~torchrl_mt.collectors.playing.episode_player.EpisodePlayer`.
    """

    def __init__(self, policy_factory: Any, *, index: int, seed: int, **options: Any) -> None:
        seed_generators(seed)
        if isinstance(policy_factory, (list, tuple)):
            policy_factory = policy_factory[index]
        if isinstance(policy_factory, str):
            policy_factory = named(policy_factory, "policy_factory")
        self._player = EpisodePlayer(options.pop("env"), policy_factory, **options)
        self._engine = VersionOffset(self._player.engine, 0)
        self._player.engine = self._engine
        self._running: dict[int, tuple[Episode, asyncio.Task[Any]]] = {}
        self._updates: UpdatesElsewhere | None = None
        """The updates of servers, if the engine follows those of the collector."""

    @classmethod
    def of(cls, setup: Mapping[str, bytes], index: int, seed: int) -> EpisodeWorker:
        """Make a worker of arguments that were pickled one by one."""
        arguments = {name: received(name, data) for name, data in setup.items()}
        return cls(**arguments, index=index, seed=seed)

    async def facts(self) -> dict[str, Any]:
        """What the collector must know of the engine."""
        names = ("max_total_tokens", "max_new_tokens")
        facts = {name: getattr(self._engine, name, None) for name in names}
        model = getattr(self._engine, "model", None)
        has_adapters = isinstance(model, nn.Module) and has_adapter_layers(model)
        servers = None
        if hasattr(self._engine, "follow_updates"):
            engine = self._engine
            servers = (engine.urls, engine.model_name, engine.wait_ready)
        return {
            "version": self._engine.version,
            "has_adapters": has_adapters,
            "servers": servers,
            **facts,
        }

    async def tokenizer(self) -> Any:
        """The tokenizer that decodes the tokens."""
        return self._player.tokenizer

    async def play(self, task: Task) -> Played:
        """Play an episode."""
        episode, sampling = task.episode(), task.arguments()
        current = asyncio.current_task()
        assert current is not None
        self._running[episode.traj_id] = (episode, current)
        try:
            error = await self._player.failure_of(episode, sampling, ExpectedEntries())
        finally:
            del self._running[episode.traj_id]
        return Played.of(episode, error)

    async def cancel(self, traj_id: int) -> None:
        """Cancel an episode if it runs."""
        if traj_id in self._running:
            self._running[traj_id][1].cancel()

    async def report(self) -> Report:
        """What there is to tell now."""
        episodes = {
            traj_id: (
                min((t.oldest for t in episode.turns if t.oldest is not None), default=None),
                *episode.calls.longest(),
            )
            for traj_id, (episode, _) in self._running.items()
        }
        return Report(episodes, {} if self._updates is None else self._updates.servers.lacking())

    async def update(
        self, version: int, *, shared: PackedWeights | PickledWeights | None = None
    ) -> Report:
        """Load weights, ``None`` if there are none to load, and count versions from ``version``."""
        source = None if shared is None else shared.unpack()
        await call_in_thread(self._engine.update_weights, source)
        return await self.count_from(version)

    async def count(self, version: int, servers: ServerStates | None = None) -> Report:
        """Count an update of the weights that was made elsewhere, of ``servers`` perhaps."""
        await self.follow(servers)
        if self._updates is None:
            await call_in_thread(count_update, self._engine)
        return await self.count_from(version)

    async def restore(
        self,
        version: int,
        servers: ServerStates | None,
        *,
        shared: PackedWeights | PickledWeights | None = None,
    ) -> None:
        """Load the last weights, if any were sent, and count versions from ``version``."""
        if shared is not None:
            await self.update(version, shared=shared)
        await self.follow(servers)
        await self.count_from(version)

    async def follow(self, servers: ServerStates | None) -> None:
        """Take what the collector tells of servers, if the engine can."""
        if servers is None or not hasattr(self._engine, "follow_updates"):
            return
        if self._updates is None:
            self._updates = self._engine.follow_updates(servers.versions)
        self._updates.enter(servers)

    async def refuse_server(self, url: str, reason: str) -> None:
        """Take why a server cannot load weights."""
        if self._updates is not None:
            self._updates.servers.refuse(url, reason)

    async def count_from(self, version: int) -> Report:
        """Count versions from ``version``."""
        self._engine.version = version
        return await self.report()

    async def seed(self, seed: int) -> None:
        """Seed the random generators."""
        seed_generators(seed)

    def close(self) -> None:
        """End what was started. Called outside of the event loop."""
        self._player.close()
        self._engine.close()


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (environments of others draw from it)
    torch.manual_seed(seed)
