"""Decide which groups of episodes run, and collect finished groups into batches.

Every started episode is accepted or rejected exactly once. A group is given out when all its members
have finished; otherwise it is dropped or played again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from torchrl_mt.collectors.episode import episodes_to_tensordict
from torchrl_mt.collectors.event_loop.background_tasks import cancel_all
from torchrl_mt.collectors.items.items import Items
from torchrl_mt.collectors.scheduling.failure_limits import Requeues
from torchrl_mt.collectors.scheduling.groups import Group, GroupPlayer, Interrupted
from torchrl_mt.collectors.scheduling.item_reader import ItemReader
from torchrl_mt.collectors.scheduling.staleness import StalenessLimit

__all__ = ["CANCELLED", "STALE", "Counter", "Scheduler"]

CANCELLED = "cancelled"
INCOMPLETE_GROUP = "incomplete_group"
STALE = "stale"

_POLL = 0.05
"""Seconds between checks for new weights and for the end of a pause."""


class Counter(Iterator[int]):
    """A counter whose position can be read and set."""

    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        self.next += 1
        return self.next - 1


class Scheduler:
    """Starts groups and hands out finished ones. Use it in one event loop only.

    Args:
        player: plays the groups.
        items: the groups' items.
        numbers: numbers of the groups, counted up.
        group_ids: ids of the groups.
        staleness: bounds the age of episodes that are given out; no bound if ``None``.
        total_attempts: groups, refused ones included, that may be played for a batch; no bound if
            ``None``.
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
        self.plays_again: Callable[[Group], bool] = self._may_requeue
        """Whether the item of an incomplete group is played again."""
        self._total_attempts = total_attempts
        self._refused = 0
        """Groups refused since the last batch."""
        self._playing: dict[asyncio.Task[None], Group] = {}
        self._ready: deque[Group] = deque()
        self.ready = 0
        """Episodes of the ready groups."""
        self.given_out = self._last_given_out = 0
        """Episodes given out in all, and in the last batch; not more than the size asked for."""
        self._undelivered: list[Group] = []
        """The last batch, until it is settled."""
        self._wanted = 0
        """Episodes that :meth:`wait_for` waits for."""
        self._version = -1
        """The weight version at which stale groups were last dropped."""
        self._error: BaseException | None = None
        """The error that ends the run, until it is raised."""
        self._changed, self._room_made, self._failed = (asyncio.Event() for _ in range(3))

    @property
    def begun(self) -> int:
        """Episodes that were given out, are ready, or are running."""
        return self.given_out + self.ready + self._under_way

    @property
    def items_left(self) -> bool:
        """Whether there may be another item."""
        return self._reader.items_left

    @property
    def has_finished(self) -> bool:
        """Whether groups have finished that were not delivered yet. May be read in any thread."""
        playing = list(self._playing.values())
        judged = any(len(group.episodes) == self._player.size for group in playing)
        return judged or bool(self._ready or self._undelivered)

    @property
    def starves(self) -> bool:
        """Whether :meth:`wait_for` waits for episodes and none runs."""
        return self.ready < self._wanted and not self._playing

    # Batches

    async def gather(self, size: int, may_begin: Callable[[], bool] = lambda: True) -> list[Group]:
        """Play and return groups of at least ``size`` episodes; fewer when the items end.

        No more episodes are begun than the groups need, and none while ``may_begin()`` is false.
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
        """Wait for groups of at least ``size`` episodes; :meth:`keep_admitting` must be running."""
        self._wanted = size
        try:
            while True:
                self._drop_stale()
                if self.ready >= size:
                    break
                self._raise_failure()
                if self._at_end:
                    break
                await self._wait_for_change()
        finally:
            self._wanted = 0
        return self._take(size)

    async def keep_admitting(self, room: Callable[[], int]) -> None:
        """Begin groups while ``room()`` is positive, until cancelled.

        :meth:`wait_for` raises the errors.
        """
        try:
            while True:
                self._drop_stale()
                await self._admit(room)
                await _set_within(self._room_made, _POLL)
                self._room_made.clear()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # such as sys.exit() where the data is read
            self._fail(error)

    def settle(self) -> None:
        """Record that the last batch was delivered."""
        self._undelivered, self._last_given_out = [], 0

    def take_back(self) -> None:
        """Take the last batch back; its items are played again."""
        self.given_out -= self._last_given_out
        for group in self._undelivered:
            self._put_back(group)
        self.settle()

    def hand_back(self) -> None:
        """Take the last batch back; its stale groups are dropped, the others are ready again."""
        self.given_out -= self._last_given_out
        for group in reversed(self._undelivered):
            self._ready.appendleft(group)
            self.ready += len(group.episodes)
        self.settle()
        self._version = -1
        self._drop_stale()

    def done(self, group: Group) -> None:
        """Mark a group's item as done, and report its episodes to a curriculum."""
        items = self._reader.items
        episodes = group.episodes if items.wants_reports else []
        # An episode that ran out of time says nothing about the item.
        counted = [episodes_to_tensordict([each]) for each in episodes if each.valid is not False]
        self._requeues.forget(group.ticket)
        items.done(group.ticket, counted)

    async def cancel(self) -> None:
        """Cancel running groups, reject ready ones, and forget errors."""
        await cancel_all(self._playing)
        self._error = None
        self._player.streak.reset()
        self._failed.clear()
        for group in self._ready:
            self._put_back(group)
        self._ready.clear()
        self.ready = 0

    def end_streak(self) -> None:
        """Forget how many episodes in a row have failed."""
        self._player.streak.reset()

    # Beginning groups, and their end

    @property
    def _under_way(self) -> int:
        """Episodes of running groups."""
        return len(self._playing) * self._player.size

    @property
    def _at_end(self) -> bool:
        """Whether no group runs and no item is left."""
        return not (self._playing or self._reader.items_left)

    async def _admit(self, room: Callable[[], int]) -> None:
        """Begin as many groups as there is room for.

        Room may be made as fast as items come, so the loop also ends when the run fails.
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
            if not reader.items.at_once and room() <= 0:  # It went while the item was read.
                reader.put_back(item.ticket)
                return
            group = Group(item.ticket, item.value, next(self._numbers), next(self._group_ids))
            group.requeued = group.ticket in self._requeues
            task = player.start(group, self._notify)
            self._playing[task] = group
            task.add_done_callback(self._group_ended)

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        """Make a finished group ready, or drop it or put it back.

        A done callback, since the task itself may be cancelled at any point, and twice.
        """
        group = self._playing.pop(task)
        whole = len(group.episodes) == self._player.size or self._incomplete == "keep"
        if task.cancelled():
            self._put_back(group, STALE if group.stale else CANCELLED)
        elif (error := task.exception()) is not None:
            self._put_back(group, INCOMPLETE_GROUP)
            self._fail(error)
        elif group.interrupted is not None:
            self._play_interrupted_again(group, group.interrupted)
        elif group.refusal is not None:
            self._refuse(group, group.refusal)
        elif group.settled and group.episodes and whole:
            if self._is_stale(group):
                self._put_back(group, STALE)
            else:
                self._requeues.forget(group.ticket)
                self._ready.append(group)
                self.ready += len(group.episodes)
        elif self.plays_again(group):
            self._put_back(group, INCOMPLETE_GROUP)
        else:
            self.counts.reject(group.started, INCOMPLETE_GROUP)
            self.done(group)
        self._notify()

    def _may_requeue(self, group: Group) -> bool:
        """Whether incomplete groups are requeued, and the item had not too many requeues."""
        return self._incomplete == "requeue" and self._requeues.try_again(
            group.ticket, all_failed=not group.episodes
        )

    def _play_interrupted_again(self, group: Group, error: Interrupted) -> None:
        """Have the item of an interrupted group played again; end the run if that happens too often."""
        self._put_back(group, type(error).__name__)
        if not self._requeues.try_again(group.ticket, all_failed=True):
            self._fail(
                RuntimeError(
                    f"an item was interrupted whenever it was played, the last time by {error} "
                    f"Leave it out of the data if it is the cause: {str(group.item)[:200]}"
                )
            )

    def _refuse(self, group: Group, refusal: BaseException) -> None:
        """Reject a group that ``accept_group`` refused; end the run after ``total_attempts``."""
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
        """Reject a group's episodes and have its item played again."""
        self.counts.reject(group.started, cause)
        self._reader.put_back(group.ticket)

    def _take(self, size: int) -> list[Group]:
        """Take ready groups in the order in which they finished."""
        taken: list[Group] = []
        number = self._refused = 0
        while self._ready and number < size:
            taken.append(self._ready.popleft())
            number += len(taken[-1].episodes)
        # Count no more than the size: the surplus must not use up the next batch's room.
        self._undelivered, self._last_given_out = taken, min(number, size)
        self.given_out += self._last_given_out
        self.ready -= number
        return taken

    # Staleness

    def _is_stale(self, group: Group) -> bool:
        return self._staleness is not None and self._staleness.is_exceeded(group.episodes)

    def _drop_stale(self) -> None:
        """Drop ready groups and cancel running ones that are too old, once per weight version."""
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

    def _notify(self) -> None:
        """Wake :meth:`wait_for` and :meth:`keep_admitting`."""
        self._changed.set()
        self._room_made.set()

    async def _wait_for_change(self) -> None:
        """Wait for a change; raise the error that ends the run, if there is one."""
        self._changed.clear()
        if self._error is None:
            await self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            self._failed.clear()
            raise error

    def _fail(self, error: BaseException) -> None:
        """End the run with an error; the first one counts."""
        self._error = self._error or error
        self._failed.set()
        self._changed.set()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most ``seconds``.

    Python 3.11's ``wait_for`` loses a cancellation that comes at the moment the event is set.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
    finally:
        waiting.cancel()
