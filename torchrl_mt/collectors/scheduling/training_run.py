"""The episodes to learn from, batch by batch, played as far ahead of the training as they may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from torchrl_mt.collectors.event_loop.background_tasks import cancel_all
from torchrl_mt.collectors.scheduling.groups import Group
from torchrl_mt.collectors.scheduling.run_warnings import RunWarnings
from torchrl_mt.collectors.scheduling.scheduler import Scheduler
from torchrl_mt.collectors.scheduling.staleness import Lead

__all__ = ["TrainingRun"]


class TrainingRun:
    """Batches of groups; all but the constructor and ``scheduler`` are for the event loop.

    Args:
        scheduler: plays the groups.
        lead: how far ahead they may be played; ``None`` plays nothing between two batches.
        version: tells the engine's weight version.
        episodes_left: how many episodes the run has; no end if ``None``.
        may_begin: cleared while no episode is to begin.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lead: Lead | None,
        version: Callable[[], int],
        *,
        episodes_left: int | None,
        may_begin: threading.Event,
    ) -> None:
        self.scheduler = scheduler
        self.warnings = RunWarnings()
        self._lead = lead
        self._version = version
        self._episodes_left = episodes_left
        self._may_begin = may_begin
        self._admitting: asyncio.Future[Any] | None = None

    async def next_batch(self, size: int) -> list[Group]:
        """The groups of the next batch; :meth:`deliver` or :meth:`take_back` is to follow."""
        # An interrupt may come when a batch was given out and before anybody had it.
        self.scheduler.take_back()
        if self._lead is None:
            return await self.scheduler.gather(size, self._may_begin.is_set)
        self._lead.ask()
        if self._admitting is None or self._admitting.done():
            self._admitting = asyncio.ensure_future(self.scheduler.keep_admitting(self._room))
        try:
            return await self.scheduler.wait_for(size)
        except BaseException:
            await self.stop()
            raise

    def deliver(self, groups: list[Group], version: int, policy_version: int) -> None:
        """Enter that the batch was delivered: its episodes are accepted; from any thread.

        Args:
            groups: those of the batch.
            version: the engine's weight version when they were delivered.
            policy_version: the same, with the updates of the run that this one goes on from.
        """
        self.scheduler.settle()
        episodes = [episode for group in groups for episode in group.episodes]
        self.scheduler.counts.accept(episodes, version=policy_version)
        for group in groups:
            self.scheduler.done(group)
        if self._lead is not None:
            self._lead.deliver(self.scheduler.given_out, version)

    async def take_back(self) -> None:
        """The batch could not be delivered: its items are played again."""
        self.scheduler.take_back()

    async def hand_back(self) -> None:
        """Some groups grew too old before they were delivered: the others wait again."""
        self.scheduler.hand_back()

    async def stop(self) -> None:
        """End the episodes that run; their items are played again."""
        if self._admitting is not None:
            await cancel_all([self._admitting])  # type: ignore[list-item]
        self.scheduler.take_back()
        await self.scheduler.cancel()

    def _room(self) -> int:
        """How many more episodes may be begun, as far as staleness and the end of the run go."""
        assert self._lead is not None
        if not self._may_begin.is_set():
            return 0
        version, begun = self._version(), self.scheduler.begun
        allowed = self._lead.allowed(version)
        self.warnings.look(self.scheduler, self._lead, version)
        if self._episodes_left is not None:
            allowed = min(allowed, self._episodes_left)
        return allowed - begun
