"""Which episodes run: groups of them, as many at once as there is room for.

Every episode that is started is accepted or rejected, once; a group is given out when all its members
have come to their end, or dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.items import Items
from torchrl_mt.collectors.loop_thread import cancel_all
from torchrl_mt.collectors.tally import Tally

__all__ = ["CANCELLED", "Counter", "Group", "GroupPolicy", "IncompleteGroups", "Scheduler"]

CANCELLED = "cancelled"
INCOMPLETE_GROUP = "incomplete_group"

_POLL = 0.05
"""Seconds after which a change of the weight version is noticed that nobody told of."""

IncompleteGroups = Literal["drop", "keep", "refill"]


@dataclass(frozen=True)
class GroupPolicy:
    """How groups are played."""

    size: int = 1
    """Episodes that share an item."""
    max_retries: int = 0
    """How often a member that failed is played again."""
    incomplete: IncompleteGroups = "drop"
    """What becomes of a group short of members: it is dropped; kept; or the member that is missing is
    played until it comes to its end."""
    max_consecutive_failures: int = 1
    """Failures in a row, without a group that came to its end, that end the run."""


@dataclass(slots=True)
class Group:
    """Episodes that share an item."""

    ticket: int
    """What the item is known by where it came from."""
    item: Any
    number: int
    episodes: list[Episode] = field(default_factory=list)
    """Those that came to their end."""


class Counter(Iterator[int]):
    """Ids, counted up."""

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
        numbers: ids for groups.
        traj_ids: ids for episodes.
        is_eval: whether the episodes are played for evaluation.
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
        traj_ids: Iterator[int],
        is_eval: bool = False,
    ) -> None:
        self.policy = policy
        self.concurrency = concurrency
        self._play = play
        self.items = items
        self._tally = tally
        self._numbers = numbers
        self._traj_ids = traj_ids
        self._is_eval = is_eval
        self._slots = asyncio.Semaphore(concurrency)
        self._groups: dict[asyncio.Task[None], Group] = {}
        self._ready: deque[Group] = deque()
        self._changed = asyncio.Event()
        self._freed = asyncio.Event()
        self._items_left = True
        self._given_out = 0
        self.ready = 0
        """Episodes that wait to be given out."""
        self._error: BaseException | None = None

    @property
    def under_way(self) -> int:
        """Episodes of groups that have not come to their end."""
        return len(self._groups) * self.policy.size

    @property
    def begun(self) -> int:
        """Episodes that were given out, are to be, or may yet come to their end."""
        return self._given_out + self.ready + self.under_way

    def take_back(self, groups: list[Group]) -> None:
        """Groups that were given out could not be delivered: their items are played again."""
        for group in groups:
            self._given_out -= len(group.episodes)
            self._tally.reject(group.episodes, CANCELLED)
            self.items.put_back(group.ticket)

    async def gather(self, size: int) -> list[Group]:
        """Groups of ``size`` episodes or a few more; fewer when the items end.

        Only as many episodes are begun as are needed for them.
        """
        try:
            while self.ready < size:
                self.admit(lambda: size - self.ready - self.under_way)
                if not self._groups:
                    break
                await self._change()
        except BaseException:
            await self.cancel()
            raise
        return self._take(size)

    async def wait_for(self, size: int) -> list[Group]:
        """Groups of ``size`` episodes or a few more, that others have begun."""
        while self.ready < size and (self._items_left or self._groups):
            await self._change()
        return self._take(size)

    async def keep_admitting(self, room: Callable[[], int]) -> None:
        """Begin groups as long as there is ``room`` for their episodes, until cancelled."""
        try:
            while self._items_left:
                self.admit(room)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _POLL)
                self._freed.clear()
        except BaseException:
            await self.cancel()
            raise

    def admit(self, room: Callable[[], int]) -> None:
        """Begin as many groups as there is room for."""
        while self._items_left and room() > 0 and self.under_way < self.concurrency:
            try:
                ticket, item = next(self.items)
            except StopIteration:
                self._items_left = False
                self._changed.set()
                return
            group = Group(ticket, item, next(self._numbers))
            task = asyncio.create_task(self._play_group(group))
            self._groups[task] = group
            task.add_done_callback(self._group_ended)

    async def cancel(self) -> None:
        """End what runs, and reject what was not given out."""
        tasks = list(self._groups)
        await cancel_all(tasks)
        for group in self._ready:
            self._tally.reject(group.episodes, CANCELLED)
            self.items.put_back(group.ticket)
        self._ready.clear()
        self.ready = 0

    def _take(self, size: int) -> list[Group]:
        """Take ready groups, the first to come to their end first."""
        taken: list[Group] = []
        while self._ready and sum(len(group.episodes) for group in taken) < size:
            taken.append(self._ready.popleft())
            # In this order, no other thread finds them nowhere.
            self._given_out += len(taken[-1].episodes)
            self.ready -= len(taken[-1].episodes)
        return taken

    async def _change(self) -> None:
        """Wait until a group has come to its end; raise what has ended the run."""
        self._changed.clear()
        if self._error is None:
            await self._changed.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        """Put a group with the others that are ready, unless it was dropped."""
        group = self._groups.pop(task)
        if task.cancelled():
            self.items.put_back(group.ticket)
        elif task.exception() is not None:
            self._error = task.exception()
            self.items.put_back(group.ticket)
        elif group.episodes:
            self._ready.append(group)
            self.ready += len(group.episodes)
        else:
            self.items.done(group.ticket)
        self._changed.set()
        self._freed.set()

    async def _play_group(self, group: Group) -> None:
        """Play the members of a group."""
        policy = self.policy
        begun: list[Episode] = []
        tasks = [
            asyncio.create_task(self._play_member(group, rank, begun))
            for rank in range(policy.size)
        ]
        played: list[Episode | None] = []
        cause = CANCELLED
        try:
            for member in asyncio.as_completed(tasks):
                played.append(await member)
                if played[-1] is None and policy.incomplete == "drop":
                    break
            cause = INCOMPLETE_GROUP
        except Exception:
            cause = INCOMPLETE_GROUP
            raise
        finally:
            await cancel_all(tasks)
            members = [episode for episode in played if episode is not None]
            all_settled = len(played) == policy.size
            if members and all_settled and (None not in played or policy.incomplete == "keep"):
                self._tally.consecutive_failures = 0
                group.episodes = sorted(members, key=lambda episode: episode.rank)
            else:
                self._tally.reject(begun, cause)

    async def _play_member(self, group: Group, rank: int, begun: list[Episode]) -> Episode | None:
        """Play a member until it comes to its end; ``None`` if it failed too often."""
        policy = self.policy
        for attempt in itertools.count():
            async with self._slots:
                episode = Episode(
                    group.item,
                    group.number,
                    next(self._traj_ids),
                    rank=rank,
                    is_eval=self._is_eval,
                )
                begun.append(episode)
                self._tally.start(episode)
                error = await self._played(episode)
            if error is None:
                return episode
            self._tally.fail(episode, error)
            if self._tally.consecutive_failures >= policy.max_consecutive_failures:
                raise RuntimeError(
                    f"{self._tally.consecutive_failures} episodes in a row were rejected, the last "
                    f"for {type(error).__name__}: {error}"
                ) from error
            if attempt >= policy.max_retries and policy.incomplete != "refill":
                return None
        raise AssertionError

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
