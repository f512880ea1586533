"""Which episodes run: groups of them, as many at once as there is room for.

Every episode that is started is accepted or rejected, once; a group is given out when all its members
have come to their end, or dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torchrl_mt.collectors.behind import cancel_all
from torchrl_mt.collectors.episode import Episode, episodes_to_tensordict
from torchrl_mt.collectors.items.items import Item, Items
from torchrl_mt.collectors.loop_thread import call_in_thread
from torchrl_mt.collectors.staleness import Freshness
from torchrl_mt.collectors.stats import Tally

__all__ = ["CANCELLED", "Counter", "Group", "GroupPolicy", "IncompleteGroups", "Scheduler"]

CANCELLED = "cancelled"
INCOMPLETE_GROUP = "incomplete_group"
STALE = "stale"

_POLL = 0.05
"""Seconds after which a change is noticed that nobody told of: of the weights, or of a pause."""

MOST_REFILLS = 16
"""How often a member is played again before its group is given up, where groups are refilled."""

MOST_REQUEUES, MOST_BARREN = 64, 16
"""How often an item is played again because its group lost a member: in all, and in a row without a
member that came to its end."""

IncompleteGroups = Literal["drop", "keep", "refill", "requeue"]


@dataclass(frozen=True)
class GroupPolicy:
    """How groups are played."""

    size: int = 1
    """Episodes that share an item."""
    max_retries: int = 0
    """How often a member that failed is played again."""
    incomplete: IncompleteGroups = "drop"
    """What becomes of a group short of members: it is dropped; kept; the member that is missing is
    played until it comes to its end; or the group is dropped and its item played again."""
    total_attempts: int | None = None
    """Groups that may come to their end for one batch, refused ones included."""
    max_consecutive_failures: int = 1
    """Members in a row that failed and are not tried again, without one that came to its end, that end
    the run; until one was judged, those that came to their end do not interrupt the row."""


@dataclass(slots=True, eq=False)
class Group:
    """Episodes that share an item."""

    ticket: int
    """What the item is known by where it came from."""
    item: Any
    number: int
    """Its place among the groups of the run."""
    id: int
    episodes: list[Episode] = field(default_factory=list)
    """Those that came to their end."""
    begun: list[Episode] = field(default_factory=list)
    """All that were started and have not failed."""
    settled: bool = False
    """Whether every member has come to its end or was given up."""
    refusal: BaseException | None = None
    """Why it was refused, if it was."""
    stale: bool = False
    """Whether it was given up because it could only be delivered too late."""


class Counter(Iterator[int]):
    """Numbers, counted up."""

    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        self.next += 1
        return self.next - 1


class Scheduler:
    """Plays groups; to be used in one event loop.

    Args:
        play: plays an episode; returns what went wrong, or ``None``.
        items: what groups are played for.
        policy: how groups are played.
        concurrency: most episodes at once.
        tally: enters what becomes of each episode.
        numbers: counts groups.
        group_ids: ids for groups.
        traj_ids: ids for episodes.
        is_eval: whether the episodes are played for evaluation.
        freshness: what bounds how old episodes may be when they are given out, if anything does.
        refusal_of: tells why a group is refused, if it is.
    """

    def __init__(
        self,
        play: Callable[[Episode], Awaitable[BaseException | None]],
        items: Items,
        policy: GroupPolicy,
        concurrency: int,
        tally: Tally,
        *,
        numbers: Iterator[int],
        group_ids: Iterator[int],
        traj_ids: Iterator[int],
        is_eval: bool = False,
        freshness: Freshness | None = None,
        refusal_of: Callable[[list[Episode]], Awaitable[BaseException | None]] | None = None,
    ) -> None:
        self.policy = policy
        self.concurrency = concurrency
        self._play = play
        self._items = items
        self._tally = tally
        self._numbers = numbers
        self._group_ids = group_ids
        self._traj_ids = traj_ids
        self._is_eval = is_eval
        self._freshness = freshness
        self._refusal_of = refusal_of
        self._refused = 0
        """Groups that were refused since a batch was last given out."""
        self._version = -1
        """The weight version that all ready and running groups were held against."""
        self._slots = asyncio.Semaphore(concurrency)
        self._groups: dict[asyncio.Task[None], Group] = {}
        self._members = 0
        """Members of groups that run or wait for their turn."""
        self._ready: deque[Group] = deque()
        self._changed = asyncio.Event()
        self._freed = asyncio.Event()
        self._failed = asyncio.Event()
        """Set while there is an error to be raised."""
        self._items_left = True
        self.given_out = self._last_given_out = 0
        """Episodes, in all and in the last batch; none beyond the size that was asked for."""
        self._requeued: dict[int, tuple[int, int]] = {}
        """By ticket, how often an item was played again since its group lost a member: in all, and in
        a row without a member that came to its end."""
        self._unsettled: list[Group] = []
        """The last batch, until it is known to be delivered."""
        self.ready = 0
        """Episodes that wait to be given out."""
        self._wanted = 0
        """Episodes that :meth:`wait_for` waits for."""
        self._failures = 0
        """Members that failed since one last came to its end; siblings that shared the fate of their
        group are not counted."""
        self._any_judged = False
        """Whether an episode was judged: until one is, those that come to their end were only cut."""
        self.last_failure: BaseException | None = None
        """Why an episode was rejected last."""
        self._error: BaseException | None = None

    @property
    def under_way(self) -> int:
        """Episodes of groups that have not come to their end."""
        return len(self._groups) * self.policy.size

    @property
    def begun(self) -> int:
        """Episodes that were given out, are to be, or may yet come to their end."""
        return self.given_out + self.ready + self.under_way

    @property
    def starves(self) -> bool:
        """Whether somebody waits for episodes, and none runs."""
        return self.ready < self._wanted and not self._groups

    def done(self, group: Group) -> None:
        """Be done with a group's item; its data is told how the episodes went, if it asks."""
        episodes = group.episodes if self._items.wants_reports else []
        # Time that ran out is no failure to solve the item.
        counted = [episodes_to_tensordict([each]) for each in episodes if each.valid is not False]
        self._items.done(group.ticket, counted)

    def settle(self) -> None:
        """The groups that were given out last were delivered."""
        self._unsettled, self._last_given_out = [], 0

    def take_back(self) -> None:
        """Play the items of groups that were given out, and not delivered, again."""
        self.given_out -= self._last_given_out
        for group in self._unsettled:
            self._put_back(group)
        self.settle()

    def hand_back(self) -> None:
        """Some groups that were given out last are too old by now: the others are ready again."""
        self.given_out -= self._last_given_out
        for group in reversed(self._unsettled):
            self._ready.appendleft(group)
            self.ready += len(group.episodes)
        self.settle()
        self._version = -1
        self._give_up_stale()

    async def gather(self, size: int, may_begin: Callable[[], bool] = lambda: True) -> list[Group]:
        """Groups of ``size`` episodes or a few more; fewer when the items end.

        Only as many episodes are begun as are needed for them, and none while ``may_begin()`` is
        false.
        """
        try:
            while self.ready < size:
                await self._admit(lambda: size - self.ready - self.under_way if may_begin() else 0)
                self._raise_failure()
                if not (self._groups or self._items_left):
                    break
                await self._change(_POLL)
        except BaseException:
            await self.cancel()
            raise
        return self._take(size)

    async def wait_for(self, size: int) -> list[Group]:
        """Groups of ``size`` episodes or a few more, that :meth:`keep_admitting` has begun."""
        self._wanted = size
        try:
            while self._fresh() < size:
                self._raise_failure()
                if not (self._groups or self._items_left):
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
                await _until(self._freed, _POLL)
                self._freed.clear()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # such as sys.exit() where the data is read
            self._fail(error)

    async def cancel(self) -> None:
        """End what runs, reject what was not given out, and forget what went wrong."""
        await cancel_all(self._groups)
        self._error, self._failures = None, 0
        self._failed.clear()
        for group in self._ready:
            self._put_back(group)
        self._ready.clear()
        self.ready = 0

    async def _admit(self, room: Callable[[], int]) -> None:
        """Begin as many groups as there is room for; none any more once the run has failed.

        Room may be made as fast as items come, so whatever ends the run has to end this.
        """
        self._tally.watch()
        while (
            not self._failed.is_set()
            and self._items_left
            and room() > 0
            and self._members < self.concurrency
        ):
            item = await self._next_item()
            if item is None:
                self._items_left = self._failed.is_set()
                self._changed.set()
                return
            if not self._items.at_once and room() <= 0:  # it went while the data took its time
                self._items.put_back(item.ticket)
                return
            self._begin(Group(item.ticket, item.value, next(self._numbers), next(self._group_ids)))

    async def _next_item(self) -> Item | None:
        """The next item, or ``None`` at the end of the data or once the run has failed; nobody else
        waits where the data takes its time.
        """
        if self._items.at_once:
            return next(self._items, None)
        give_back = partial(self._give_back, self._items.num_loads)
        reading = asyncio.ensure_future(call_in_thread(next, self._items, None))
        failing = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait([reading, failing], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            reading.add_done_callback(give_back)
            raise
        finally:
            failing.cancel()
        if self._failed.is_set():
            reading.add_done_callback(give_back)
            return None
        return reading.result()

    def _give_back(self, num_loads: int, reading: asyncio.Future[Item | None]) -> None:
        """An item that was read for nobody, before another state was loaded or since."""
        if reading.cancelled() or reading.exception() is not None:
            return
        item = reading.result()
        if item is not None and self._items.num_loads == num_loads:
            self._items.put_back(item.ticket)
            self._items_left = True

    def _fresh(self) -> int:
        """How many ready episodes may be given out, whatever was updated meanwhile."""
        self._give_up_stale()
        return self.ready

    def _give_up_stale(self) -> None:
        """Give up the groups that could only be delivered too old, once for each version."""
        if self._freshness is None or self._version == (version := self._freshness.version()):
            return
        self._version = version
        for group in [group for group in self._ready if self._freshness.is_over(group.episodes)]:
            self._ready.remove(group)
            self.ready -= len(group.episodes)
            self._put_back(group, STALE)
            self._freed.set()
        for task, group in self._groups.items():
            if not group.stale and self._freshness.is_over(group.begun):
                group.stale = True
                task.cancel()

    def _put_back(self, group: Group, cause: str = CANCELLED) -> None:
        """Nobody will see the group: its item is played again."""
        self._tally.reject(group.begun, cause)
        self._items.put_back(group.ticket)
        self._items_left = True

    def _take(self, size: int) -> list[Group]:
        """Take ready groups, the first to come to their end first."""
        taken: list[Group] = []
        number = self._refused = 0
        while self._ready and number < size:
            taken.append(self._ready.popleft())
            number += len(taken[-1].episodes)
        # A batch of a few more must not leave less than a batch for the next, or that would never come.
        self._unsettled, self._last_given_out = taken, min(number, size)
        self.given_out += self._last_given_out
        self.ready -= number
        return taken

    async def _change(self, seconds: float | None = None) -> None:
        """Wait, at most so long, until something has changed; raise what has ended the run."""
        self._changed.clear()
        if self._error is None:
            await _until(self._changed, seconds)
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

    def _begin(self, group: Group) -> None:
        """Play a group."""
        members = [
            asyncio.create_task(self._play_member(group, rank)) for rank in range(self.policy.size)
        ]
        self._members += len(members)
        for member in members:
            member.add_done_callback(self._member_ended)
        task = asyncio.create_task(self._play_group(group, members))
        self._groups[task] = group
        task.add_done_callback(self._group_ended)

    def _member_ended(self, task: asyncio.Task[bool]) -> None:
        """Give its place to another."""
        self._members -= 1
        self._changed.set()
        self._freed.set()

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        """Put a group with the others that are ready, unless it was dropped.

        Not in the task itself, which may be cancelled anywhere, and twice.
        """
        group = self._groups.pop(task)
        kept = len(group.episodes) == self.policy.size or self.policy.incomplete == "keep"
        if task.cancelled():
            self._put_back(group, STALE if group.stale else CANCELLED)
        elif (error := task.exception()) is not None:
            self._tally.reject(group.begun, INCOMPLETE_GROUP)
            self._put_back(group)
            self._fail(error)
        elif group.refusal is not None:
            self._refuse(group, group.refusal)
        elif group.settled and group.episodes and kept and self._is_over(group):
            self._put_back(group, STALE)
        elif group.settled and group.episodes and kept:
            group.episodes.sort(key=lambda episode: episode.rank)
            self._requeued.pop(group.ticket, None)
            self._ready.append(group)
            self.ready += len(group.episodes)
        elif self.policy.incomplete == "requeue" and self._may_requeue(group):
            self._put_back(group, INCOMPLETE_GROUP)
        else:
            self._tally.reject(group.begun, INCOMPLETE_GROUP)
            self._requeued.pop(group.ticket, None)
            self.done(group)
        self._changed.set()
        self._freed.set()

    def _refuse(self, group: Group, refusal: BaseException) -> None:
        """Reject a group that is not to be learned from; the run ends if that happens too often."""
        for episode in group.begun:
            self._tally.fail(episode, refusal)
        self._tally.add("groups/refused")
        self._requeued.pop(group.ticket, None)
        self.done(group)
        self._refused += 1
        attempts, most = self._refused + len(self._ready), self.policy.total_attempts
        if most is not None and attempts >= most:
            self._fail(
                RuntimeError(
                    f"accept_group refused {self._refused} of the {attempts} groups played for a batch, "
                    f"the last for {type(refusal).__name__}: {refusal}. Give items that are "
                    "neither too hard nor too easy, accept more, or raise total_attempts."
                )
            )
            self._refused = 0

    def _may_requeue(self, group: Group) -> bool:
        """Whether to play the item of a group that lost a member again; if so, it is counted."""
        times, barren = self._requeued.get(group.ticket, (0, 0))
        barren = 0 if group.episodes else barren + 1
        if times == MOST_REQUEUES or barren > MOST_BARREN:
            return False
        self._requeued[group.ticket] = (times + 1, barren)
        return True

    def _is_over(self, group: Group) -> bool:
        """Whether the group is too old to be given out."""
        return self._freshness is not None and self._freshness.is_over(group.episodes)

    async def _play_group(self, group: Group, members: list[asyncio.Task[bool]]) -> None:
        """Wait for the members of a group, unless one that fails is the end of it."""
        try:
            for member in asyncio.as_completed(members):
                if not await member and self.policy.incomplete != "keep":
                    return
            if self._refusal_of is not None and group.episodes:
                group.episodes.sort(key=lambda episode: episode.rank)
                group.refusal = await self._refusal_of(group.episodes)
            group.settled = True
        finally:
            await cancel_all(members)

    async def _play_member(self, group: Group, rank: int) -> bool:
        """Play a member until it comes to its end; false if it failed too often."""
        policy = self.policy
        refills = MOST_REFILLS if policy.incomplete == "refill" else 0
        failure: BaseException | None = None
        for attempt in range(policy.max_retries + refills + 1):
            async with self._slots:
                episode = Episode(
                    group.item,
                    group.id,
                    next(self._traj_ids),
                    rank=rank,
                    group_number=group.number,
                    is_eval=self._is_eval,
                )
                group.begun.append(episode)
                self._tally.start(episode)
                error = await self._played(episode)
            self._any_judged |= episode.judged
            if error is None:
                if self._any_judged:
                    self._failures = 0
                elif failure is not None:
                    self._enter_failure(failure)  # Played again, it was only cut.
                group.episodes.append(episode)
                return True
            group.begun = [other for other in group.begun if other is not episode]
            self._tally.fail(episode, error)
            self.last_failure = failure = error
            if attempt < policy.max_retries:
                continue
            if group.ticket not in self._requeued:  # One bad item is no run that can only fail.
                self._enter_failure(error)
        return False

    def _enter_failure(self, error: BaseException) -> None:
        """Count a member that failed in spite of retries; raise once there are too many in a row."""
        self._failures += 1
        if self._failures >= self.policy.max_consecutive_failures:
            so_far = "" if self._any_judged else " before the environment had judged any"
            raise RuntimeError(
                f"{self._failures} episodes in a row were rejected{so_far}, the last for "
                f"{type(error).__name__}: {error}"
            ) from error

    async def _played(self, episode: Episode) -> BaseException | None:
        """Play one episode, as a task of its own: a cancellation that the environment brought about
        itself, or swallowed, is not taken for ours.
        """
        playing = asyncio.ensure_future(self._play(episode))
        try:
            await asyncio.wait([playing])
        except asyncio.CancelledError:
            playing.cancel()
            await asyncio.wait([playing])
            raise
        return playing.result()


async def _until(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set, at most so long.

    Python 3.11's ``wait_for`` loses a cancellation that comes at the moment the event is set.
    """
    if seconds is None:
        await event.wait()
        return
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
    finally:
        waiting.cancel()
