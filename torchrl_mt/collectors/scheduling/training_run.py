"""The batches of a training run, played as far ahead of training as staleness allows."""

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
    """Batches of groups. Coroutines are for the event loop of the episodes.

    Args:
        scheduler: plays the groups.
        lead: how far ahead of training groups are played; ``None`` plays none between two batches.
        version: returns the weight version, counted across restarts.
        episodes_left: episodes until the end of the run; no end if ``None``.
        may_begin: cleared to pause: no episode is begun until it is set.
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

    @property
    def is_ending(self) -> bool:
        """Whether no further episode begins unless one that runs fails."""
        left, begun = self._episodes_left, self.scheduler.begun
        return not self.scheduler.items_left or (left is not None and begun >= left)

    async def next_batch(self, size: int) -> list[Group]:
        """Groups of the next batch; :meth:`deliver`, :meth:`take_back` or :meth:`hand_back` follows."""
        # An interrupt may have lost the last batch on its way to the caller.
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

    def deliver(self, groups: list[Group], version: int) -> None:
        """Record that the batch was delivered and accept its episodes. May be called from any thread.

        ``version`` is the weight version at the delivery, counted across restarts.
        """
        self.scheduler.settle()
        episodes = [episode for group in groups for episode in group.episodes]
        self.scheduler.counts.accept(episodes, version=version)
        for group in groups:
            self.scheduler.done(group)
        if self._lead is not None:
            self._lead.deliver(self.scheduler.given_out, version)

    async def take_back(self) -> None:
        """Take the batch back; its items are played again."""
        self.scheduler.take_back()

    async def hand_back(self) -> None:
        """Take the batch back; its stale groups are dropped, the others are ready again."""
        self.scheduler.hand_back()

    async def stop(self) -> None:
        """Cancel running episodes; their items are played again."""
        if self._admitting is not None:
            await cancel_all([self._admitting])  # type: ignore[list-item]
        self.scheduler.take_back()
        await self.scheduler.cancel()

    def _room(self) -> int:
        """Number of further episodes that staleness and the end of the run allow."""
        assert self._lead is not None
        if not self._may_begin.is_set():
            return 0
        version, begun = self._version(), self.scheduler.begun
        allowed = self._lead.allowed(version)
        self.warnings.check(self.scheduler, self._lead, version)
        if self._episodes_left is not None:
            allowed = min(allowed, self._episodes_left)
        return allowed - begun
