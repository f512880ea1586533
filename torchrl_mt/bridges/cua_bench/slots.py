"""The slots of a loader's environments, and the collector that plays an episode in each.

A slot plays one episode at a time. A slot whose environment keeps failing waits longer and longer before
the next attempt, and an item that it failed before the environment's first reply is played again. So it
neither uses up the items nor ends the run, as long as others work. An item that fails in all is dropped.
What becomes of groups of several episodes is said by ``incomplete_groups`` alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from torchrl_mt.bridges.cua_bench.prompts import AskingEngine
from torchrl_mt.collectors import Episode, MultiTurnCollector, Rejected, StopReason

if TYPE_CHECKING:
    from torchrl_mt.collectors.scheduling.groups import Group
    from torchrl_mt.collectors.scheduling.training_run import TrainingRun
    from torchrl_mt.collectors.workflow_entries import ExpectedEntries

__all__ = ["LOST_AFTER", "LoaderCollector", "Slots"]

LOST_AFTER = 8
"""Failures in a row, without any reply of the environment, after which a slot counts as lost."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
"""Seconds before the third attempt in a row, doubled for each further one, and their maximum."""


@dataclass(eq=False, slots=True)
class Slot:
    """A slot, which plays one episode at a time."""

    index: int
    busy: bool = False
    failures: int = 0
    """Episodes in a row that failed before the environment had answered once."""
    error: BaseException | None = None
    """The last of these failures."""
    next_attempt: float = 0.0
    """Time before which no episode begins, on the monotonic clock."""


class Slots:
    """The slots of a loader. They change in the event loop of the episodes only.

    Args:
        number: number of slots.
    """

    def __init__(self, number: int) -> None:
        self._slots = [Slot(index) for index in range(number)]
        self.of_episode: dict[int, int] = {}
        """The slot of each episode that is played or waits for its delivery."""
        self.last_error: BaseException | None = None
        """Why the last rejected episode was rejected."""
        self._failed_groups: dict[int, set[int]] = {}
        """Slots whose environment failed, of groups that are played, by group."""
        self._failed_items: dict[int, set[int]] = {}
        """The same of items that are played again, by ticket."""

    @property
    def busy(self) -> set[int]:
        """Indices of the slots that play an episode."""
        return {slot.index for slot in self._slots if slot.busy}

    @property
    def lost(self) -> list[Slot]:
        """Slots whose environment has failed again and again."""
        return [slot for slot in self._slots if slot.failures >= LOST_AFTER]

    def take(self, episode: Episode) -> Slot:
        """Take a free slot for an episode: of those, the one with the fewest failures."""
        free = [slot for slot in self._slots if not slot.busy]
        slot = min(free, key=lambda slot: (slot.failures, slot.index))
        slot.busy = True
        self.of_episode[episode.traj_id] = slot.index
        return slot

    def give_back(self, slot: Slot, episode: Episode, error: BaseException | None) -> bool:
        """Free a slot after an episode and its error, if it failed; return whether its env failed."""
        slot.busy = False
        if error is not None:
            self.last_error = error
            self.of_episode.pop(episode.traj_id, None)
        if error is None or episode.judged:
            slot.failures, slot.error, slot.next_attempt = 0, None, 0.0
        elif _is_of_env(error):
            slot.failures += 1
            slot.error = error
            doublings = min(slot.failures - 2, 10)
            pause = _FIRST_PAUSE * 2.0**doublings if slot.failures > 1 else 0.0
            slot.next_attempt = time.monotonic() + min(pause, _LONGEST_PAUSE)
            self._failed_groups.setdefault(episode.group, set()).add(slot.index)
            return True
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._failed_groups.pop(episode.group, None)
        return False

    def plays_again(self, group: Group) -> bool:
        """Whether a failed episode's item is played again: if its env failed, and others are left."""
        failed = self._failed_groups.pop(group.id, None)
        failed_before = self._failed_items.pop(group.ticket, set())
        if failed is None:
            return False
        failed |= failed_before
        left = {slot.index for slot in self._slots if slot.failures < LOST_AFTER} - failed
        if left:
            self._failed_items[group.ticket] = failed
        return bool(left)

    def finish(self, group: Group) -> None:
        """Forget a group that was stored."""
        self._failed_groups.pop(group.id, None)
        self._failed_items.pop(group.ticket, None)
        for episode in group.episodes:
            self.of_episode.pop(episode.traj_id, None)


def _is_of_env(error: BaseException) -> bool:
    """Whether a failure tells of the environment, not of the item or of the user."""
    if isinstance(error, Rejected):
        return error.cause in (StopReason.TOOL_TIMEOUT.value, StopReason.EPISODE_TIMEOUT.value)
    return not isinstance(error, asyncio.CancelledError)


class LoaderCollector(MultiTurnCollector):
    """A collector whose episodes play in slots and ask the loader's user.

    Args:
        *args: arguments of the collector; the policy is the loader's engine.
        slots: the slots.
        longest_episode: steps of the longest episode that can be stored; ``None`` if any can.
        on_delivery: called with the episodes that were stored, in the order in which they ended.
        **kwargs: arguments of the collector.
    """

    engine: AskingEngine

    def __init__(
        self,
        *args: Any,
        slots: Slots,
        longest_episode: int | None,
        on_delivery: Callable[[list[Episode]], object],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._slots = slots
        self._longest_episode = longest_episode
        self._on_delivery = on_delivery

    @property
    def is_ending(self) -> bool:
        """Whether no further episode begins unless one that runs fails."""
        return self._run.is_ending

    @property
    def is_storing(self) -> bool:
        """Whether episodes have finished that are not stored yet."""
        return self._run.scheduler.has_finished

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run, if one did."""
        return None if self._background is None else self._background.error

    async def _play(self, episode: Episode, expected: ExpectedEntries) -> BaseException | None:
        slot = self._slots.take(episode)
        error: BaseException | None = asyncio.CancelledError()
        try:
            await asyncio.sleep(max(slot.next_attempt - time.monotonic(), 0.0))
            own = self.engine.of(slot.index, episode)
            error = await self._player.failure_of(episode, self.sampling, expected, own)
            longest = self._longest_episode
            if error is None and longest is not None and len(episode.turns) > longest:
                error = Rejected(
                    "longer_than_replay",
                    f"replay_capacity={longest} must hold an episode, but one has "
                    f"{len(episode.turns)} steps: raise it, or give Limits(max_turns=...)",
                )
            return error
        finally:
            self.engine.end(slot.index)
            of_env = self._slots.give_back(slot, episode, error)
            others_work = len(self._slots.lost) < self.max_concurrency
            if of_env and others_work and self.failures.max_consecutive_failures is None:
                self._run.scheduler.end_streak()

    def _new_run(self) -> TrainingRun:
        run = super()._new_run()
        if (
            self.group_size > 1
        ):  # One member in a dead slot would fail a whole group again and again.
            return run
        may_requeue = run.scheduler.plays_again
        run.scheduler.plays_again = lambda group: (
            self._slots.plays_again(group) or may_requeue(group)
        )
        return run

    def _next_batch_size(self) -> int:
        size = super()._next_batch_size()
        # All that are finished, since a write takes about as long for many episodes as for one.
        return max(size, self._run.scheduler.ready) if size else 0

    def _deliver(self, groups: list[Group]) -> TensorDictBase | None:
        batch = super()._deliver(groups)
        for group in groups:
            self._slots.finish(group)
        self._on_delivery([episode for group in groups for episode in group.episodes])
        return batch

    def add_slots(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the slots into a batch of episodes, as ``"worker_id"``."""
        slots = self._slots.of_episode
        ids = batch["collector", "traj_ids"].tolist()
        batch["worker_id"] = torch.tensor([slots.get(id_, -1) for id_ in ids], device="cpu")
        return batch
