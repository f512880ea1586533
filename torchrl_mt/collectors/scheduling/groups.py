"""Groups of episodes that share an item, and how one is played.

Every episode that is started is counted as started, and those that fail as rejected. A group is settled
when each member has come to its end or was given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.event_loop.background_tasks import cancel_all
from torchrl_mt.collectors.scheduling.failure_limits import FailureStreak
from torchrl_mt.collectors.settings import FailurePolicy
from torchrl_mt.collectors.statistics.episode_counts import EpisodeCounts

__all__ = ["Group", "GroupPlayer"]

MOST_REFILLS = 16
"""How often a member is played again before its group is given up, where groups are refilled."""


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
    """Those that came to their end, by rank once the group is settled."""
    started: list[Episode] = field(default_factory=list)
    """All that were started and have not failed."""
    settled: bool = False
    """Whether every member has come to its end or was given up."""
    refusal: BaseException | None = None
    """Why it was refused, if it was."""
    stale: bool = False
    """Whether it was given up because it could only be delivered too old."""
    tried_before: bool = False
    """Whether its item is played again, since an earlier group lost a member."""


class GroupPlayer:
    """Plays groups, at most so many episodes at once; to be used in one event loop.

    Args:
        play: plays an episode; returns what went wrong, or ``None``.
        size: episodes a group.
        failures: what follows when they are rejected.
        concurrency: most episodes at once.
        counts: what becomes of each.
        traj_ids: their ids.
        is_eval: whether they are played for evaluation.
        refusal_of: tells why a group is refused, if it is; ``None`` accepts all.
    """

    def __init__(
        self,
        play: Callable[[Episode], Awaitable[BaseException | None]],
        *,
        size: int,
        failures: FailurePolicy,
        concurrency: int,
        counts: EpisodeCounts,
        traj_ids: Iterator[int],
        is_eval: bool = False,
        refusal_of: Callable[[list[Episode]], Awaitable[BaseException | None]] | None = None,
    ) -> None:
        self.size = size
        self.failures = failures
        self.concurrency = concurrency
        self.counts = counts
        self.streak = FailureStreak(failures.most_consecutive(concurrency))
        self.members = 0
        """Members of groups that run or wait for their turn."""
        self.last_failure: BaseException | None = None
        """Why an episode was rejected last."""
        self._play = play
        self._refusal_of = refusal_of
        self._slots = asyncio.Semaphore(concurrency)
        self._traj_ids = traj_ids
        self._is_eval = is_eval

    def start(self, group: Group, on_room: Callable[[], None]) -> asyncio.Task[None]:
        """Begin to play a group; returns its task, which raises what ends the run.

        ``on_room`` is called whenever a member has ended.
        """

        def member_ended(_: asyncio.Task[bool]) -> None:
            self.members -= 1
            on_room()

        members = [asyncio.create_task(self._play_member(group, rank)) for rank in range(self.size)]
        self.members += len(members)
        for member in members:
            member.add_done_callback(member_ended)
        return asyncio.create_task(self._play_group(group, members))

    async def _play_group(self, group: Group, members: list[asyncio.Task[bool]]) -> None:
        """Wait for the members of a group, unless one that fails is the end of it."""
        try:
            for member in asyncio.as_completed(members):
                if not await member and self.failures.incomplete_groups != "keep":
                    return
            group.episodes.sort(key=lambda episode: episode.rank)
            if self._refusal_of is not None and group.episodes:
                group.refusal = await self._refusal_of(group.episodes)
            group.settled = True
        finally:
            await cancel_all(members)

    async def _play_member(self, group: Group, rank: int) -> bool:
        """Play a member until it comes to its end; false if it failed too often."""
        retries = self.failures.max_retries
        refills = MOST_REFILLS if self.failures.incomplete_groups == "refill" else 0
        failure: BaseException | None = None
        for attempt in range(retries + refills + 1):
            async with self._slots:
                episode = Episode(
                    group.item,
                    group.id,
                    next(self._traj_ids),
                    rank=rank,
                    group_number=group.number,
                    is_eval=self._is_eval,
                )
                group.started.append(episode)
                self.counts.start(episode)
                error = await self._played(episode)
            if episode.judged:
                self.streak.enter_judged()
            if error is None:
                self.streak.enter_end(failure)
                group.episodes.append(episode)
                return True
            group.started = [other for other in group.started if other is not episode]
            self.counts.fail(episode, error)
            self.last_failure = failure = error
            # One bad item that is played again is no run that can only fail.
            if attempt >= retries and not group.tried_before:
                self.streak.enter_failure(error)
        return False

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
