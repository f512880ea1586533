"""Which groups of episodes run, and which are given out: as many at once as there is room for.

Every episode that is started is accepted or rejected, once; a group is given out when all its members
have come to their end, or dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from torchrl_mt.collectors.episode import episodes_to_tensordict
from torchrl_mt.collectors.event_loop.background_tasks import cancel_all
from torchrl_mt.collectors.items.items import Items
from torchrl_mt.collectors.scheduling.failure_limits import Requeues
from torchrl_mt.collectors.scheduling.groups import Group, GroupPlayer
from torchrl_mt.collectors.scheduling.item_reader import ItemReader
from torchrl_mt.collectors.scheduling.staleness import StalenessLimit

__all__ = ["CANCELLED", "STALE", "Counter", "Scheduler"]

CANCELLED = "cancelled"
INCOMPLETE_GROUP = "incomplete_group"
STALE = "stale"

_POLL = 0.05
"""Seconds after which a change is noticed that nobody told of: of the weights, or of a pause."""


class Counter(Iterator[int]):
    """Numbers, counted up."""

    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        self.next += 1
        return self.next - 1


class Scheduler:
    """Decides which groups run; to be used in one event loop.

    Args:
        player: plays the groups.
        items: what they are played for.
        numbers: counts groups.
        group_ids: ids for groups.
        staleness: how old episodes may be when they are given out, if anything bounds it.
        total_attempts: how many groups may be played for a batch, refused ones included.
    """

    def __init__(
        self,
        player: GroupPlayer,
        items: Items,
        *,
        numbers: Iterator[int],
        group_ids: Iterator[int],
        staleness: StalenessLimit | None = None,
        total_attempts: int | None = None,
    ) -> None:
        self.counts = player.counts
        self._player = player
        self._incomplete = player.failures.incomplete_groups
        self._reader = ItemReader(items)
        self._numbers = numbers
        self._group_ids = group_ids
        self._staleness = staleness
        self._requeues = Requeues()
        self._total_attempts = total_attempts
        self._refused = 0
        """Groups that were refused since a batch was last given out."""
        self._playing: dict[asyncio.Task[None], Group] = {}
        self._ready: deque[Group] = deque()
        self.ready = 0
        """Episodes that wait to be given out."""
        self.given_out = self._last_given_out = 0
        """Episodes, in all and in the last batch; none beyond the size that was asked for."""
        self._undelivered: list[Group] = []
        """The last batch, until it is known to be delivered."""
        self._wanted = 0
        """Episodes that :meth:`wait_for` waits for."""
        self._version = -1
        """The weight version that all ready and running groups were held against."""
        self._error: BaseException | None = None
        """What has ended the run, until it is raised."""
        self._changed, self._room_made, self._failed = (asyncio.Event() for _ in range(3))

    @property
    def begun(self) -> int:
        """Episodes that were given out, are to be, or may yet come to their end."""
        return self.given_out + self.ready + self._under_way

    @property
    def starves(self) -> bool:
        """Whether somebody waits for episodes, and none runs."""
        return self.ready < self._wanted and not self._playing

    # Batches

    async def gather(self, size: int, may_begin: Callable[[], bool] = lambda: True) -> list[Group]:
        """Groups of ``size`` episodes or a few more; fewer when the items end.

        Only as many episodes are begun as are needed for them, and none while ``may_begin()`` is
        false.
        """
        admitting = asyncio.ensure_future(
            self.keep_admitting(lambda: size - self.ready - self._under_way if may_begin() else 0)
        )
        try:
            return await self.wait_for(size)
        except BaseException:
            await cancel_all([admitting])
            await self.cancel()
            raise
        finally:
            await cancel_all([admitting])

    async def wait_for(self, size: int) -> list[Group]:
        """Groups of ``size`` episodes or a few more, that :meth:`keep_admitting` has begun."""
        self._wanted = size
        try:
            while True:
                self._give_up_stale()
                if self.ready >= size:
                    break
                self._raise_failure()
                if self._at_end:
                    break
                await self._change()
        finally:
            self._wanted = 0
        return self._take(size)

    async def keep_admitting(self, room: Callable[[], int]) -> None:
        """Begin groups as long as there is ``room`` for their episodes, until cancelled.

        What goes wrong here is raised by :meth:`wait_for`.
        """
        try:
            while True:
                self._give_up_stale()
                await self._admit(room)
                await _set_within(self._room_made, _POLL)
                self._room_made.clear()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # such as sys.exit() where the data is read
            self._fail(error)

    def settle(self) -> None:
        """The last batch was delivered."""
        self._undelivered, self._last_given_out = [], 0

    def take_back(self) -> None:
        """The last batch was not delivered: its items are played again."""
        self.given_out -= self._last_given_out
        for group in self._undelivered:
            self._put_back(group)
        self.settle()

    def hand_back(self) -> None:
        """Some groups of the last batch are too old by now: the others are ready again."""
        self.given_out -= self._last_given_out
        for group in reversed(self._undelivered):
            self._ready.appendleft(group)
            self.ready += len(group.episodes)
        self.settle()
        self._version = -1
        self._give_up_stale()

    def done(self, group: Group) -> None:
        """Be done with a group's item; its data is told how the episodes went, if it asks."""
        items = self._reader.items
        episodes = group.episodes if items.wants_reports else []
        # Time that ran out is no failure to solve the item.
        counted = [episodes_to_tensordict([each]) for each in episodes if each.valid is not False]
        self._requeues.forget(group.ticket)
        items.done(group.ticket, counted)

    async def cancel(self) -> None:
        """End what runs, reject what was not given out, and forget what went wrong."""
        await cancel_all(self._playing)
        self._error = None
        self._player.streak.reset()
        self._failed.clear()
        for group in self._ready:
            self._put_back(group)
        self._ready.clear()
        self.ready = 0

    # Beginning groups, and their end

    @property
    def _under_way(self) -> int:
        """Episodes of groups that have not come to their end."""
        return len(self._playing) * self._player.size

    @property
    def _at_end(self) -> bool:
        """Whether no further group will be ready."""
        return not (self._playing or self._reader.items_left)

    async def _admit(self, room: Callable[[], int]) -> None:
        """Begin as many groups as there is room for; none any more once the run has failed.

        Room may be made as fast as items come, so whatever ends the run has to end this.
        """
        self.counts.watch()
        player, reader = self._player, self._reader
        while (
            not self._failed.is_set()
            and reader.items_left
            and room() > 0
            and player.members < player.concurrency
        ):
            item = await reader.next(self._failed)
            if item is None:
                self._changed.set()
                return
            if not reader.items.at_once and room() <= 0:  # it went while the data took its time
                reader.put_back(item.ticket)
                return
            group = Group(item.ticket, item.value, next(self._numbers), next(self._group_ids))
            group.tried_before = group.ticket in self._requeues
            task = player.start(group, self._tell)
            self._playing[task] = group
            task.add_done_callback(self._group_ended)

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        """Put a group with the others that are ready, unless it was dropped.

        Not in the task itself, which may be cancelled anywhere, and twice.
        """
        group = self._playing.pop(task)
        whole = len(group.episodes) == self._player.size or self._incomplete == "keep"
        if task.cancelled():
            self._put_back(group, STALE if group.stale else CANCELLED)
        elif (error := task.exception()) is not None:
            self._put_back(group, INCOMPLETE_GROUP)
            self._fail(error)
        elif group.refusal is not None:
            self._refuse(group, group.refusal)
        elif group.settled and group.episodes and whole:
            if self._is_stale(group):
                self._put_back(group, STALE)
            else:
                self._requeues.forget(group.ticket)
                self._ready.append(group)
                self.ready += len(group.episodes)
        elif self._incomplete == "requeue" and self._requeues.may_have(
            group.ticket, barren=not group.episodes
        ):
            self._put_back(group, INCOMPLETE_GROUP)
        else:
            self.counts.reject(group.started, INCOMPLETE_GROUP)
            self.done(group)
        self._tell()

    def _refuse(self, group: Group, refusal: BaseException) -> None:
        """Reject a group that is not to be learned from; the run ends if that happens too often."""
        for episode in group.started:
            self.counts.fail(episode, refusal)
        self.counts.add("groups/refused")
        self.done(group)
        self._refused += 1
        attempts = self._refused + len(self._ready)
        if self._total_attempts is not None and attempts >= self._total_attempts:
            self._fail(
                RuntimeError(
                    f"accept_group refused {self._refused} of the {attempts} groups played for a batch, "
                    f"the last for {type(refusal).__name__}: {refusal}. Give items that are "
                    "neither too hard nor too easy, accept more, or raise total_attempts."
                )
            )
            self._refused = 0

    def _put_back(self, group: Group, cause: str = CANCELLED) -> None:
        """Nobody will see the group: its item is played again."""
        self.counts.reject(group.started, cause)
        self._reader.put_back(group.ticket)

    def _take(self, size: int) -> list[Group]:
        """Take ready groups, the first to come to their end first."""
        taken: list[Group] = []
        number = self._refused = 0
        while self._ready and number < size:
            taken.append(self._ready.popleft())
            number += len(taken[-1].episodes)
        # A batch of a few more must not leave less than a batch for the next, or that would never come.
        self._undelivered, self._last_given_out = taken, min(number, size)
        self.given_out += self._last_given_out
        self.ready -= number
        return taken

    # Staleness

    def _is_stale(self, group: Group) -> bool:
        """Whether the group is too old to be given out."""
        return self._staleness is not None and self._staleness.is_exceeded(group.episodes)

    def _give_up_stale(self) -> None:
        """Give up the groups that could only be delivered too old, once for each version."""
        if self._staleness is None or self._version == (version := self._staleness.version()):
            return
        self._version = version
        for group in [group for group in self._ready if self._is_stale(group)]:
            self._ready.remove(group)
            self.ready -= len(group.episodes)
            self._put_back(group, STALE)
            self._room_made.set()
        for task, group in self._playing.items():
            if not group.stale and self._staleness.is_exceeded(group.started):
                group.stale = True
                task.cancel()

    # Waiting and failing

    def _tell(self) -> None:
        """Something has changed, and there may be room."""
        self._changed.set()
        self._room_made.set()

    async def _change(self) -> None:
        """Wait until something has changed; raise what has ended the run."""
        self._changed.clear()
        if self._error is None:
            await self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what has ended the run, if anything has."""
        if self._error is not None:
            error, self._error = self._error, None
            self._failed.clear()
            raise error

    def _fail(self, error: BaseException) -> None:
        """Have those who wait raise an error, the first if there are several; begin no more."""
        self._error = self._error or error
        self._failed.set()
        self._changed.set()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, at most so long.

    Python 3.11's ``wait_for`` loses a cancellation that comes at the moment the event is set.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
    finally:
        waiting.cancel()
