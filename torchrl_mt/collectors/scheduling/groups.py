"""Groups of episodes that share an item, and how a group is played.

Every started episode is counted as started, and every failed one as rejected. A group is settled when
each member has finished or was given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.event_loop.background_tasks import cancel_all
from torchrl_mt.collectors.scheduling.failure_limits import FailurePolicy, FailureStreak
from torchrl_mt.collectors.statistics.episode_counts import EpisodeCounts

__all__ = ["Group", "GroupPlayer", "Interrupted"]

MOST_REFILLS = 16
"""Further attempts for a member with ``incomplete_groups="refill"``, after its retries."""


class Interrupted(RuntimeError):
    """An episode was interrupted by no fault of its own: its group's item is played again."""


@dataclass(slots=True, eq=False)
class Group:
    """Episodes that share an item."""

    ticket: int
    """The item's ticket, see :class:`~torchrl_mt.collectors.items.items.Item`."""
    item: Any
    number: int
    """Number of the group in the run, from 0."""
    id: int
    episodes: list[Episode] = field(default_factory=list)
    """Finished episodes, sorted by rank once the group is settled."""
    started: list[Episode] = field(default_factory=list)
    """Running and finished episodes."""
    settled: bool = False
    """Whether every member has finished or was given up."""
    refusal: BaseException | None = None
    """The reason why ``accept_group`` refused the group."""
    stale: bool = False
    """Whether the group was cancelled as stale."""
    interrupted: Interrupted | None = None
    """Why the group was interrupted, if it was."""
    requeued: bool = False
    """Whether its item is played again after an incomplete group."""


class GroupPlayer:
    """Plays groups of episodes concurrently. Use it in one event loop only.

    Args:
        play: plays an episode and returns its error, or ``None``.
        size: episodes per group.
        failures: retries and limits of failures.
        concurrency: maximum number of episodes at once.
        counts: counters of the episodes.
        traj_ids: ids of the episodes.
        is_eval: whether the episodes are for evaluation.
        refusal_of: returns why a group is refused, or ``None``; without it, no group is refused.
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
        """Members that run or wait for a free slot."""
        self.last_failure: BaseException | None = None
        """Error of the last rejected episode."""
        self._play = play
        self._refusal_of = refusal_of
        self._slots = asyncio.Semaphore(concurrency)
        self._traj_ids = traj_ids
        self._is_eval = is_eval

    def start(self, group: Group, on_room: Callable[[], None]) -> asyncio.Task[None]:
        """Start a group and return its task; the task raises errors that end the run.

        ``on_room`` is called whenever a member ends.
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
        """Wait for all members, or until one fails for good and the group need not be kept."""
        try:
            for member in asyncio.as_completed(members):
                finished = await member
                if group.interrupted or not (finished or self.failures.incomplete_groups == "keep"):
                    if self.failures.incomplete_groups == "drop" and not group.interrupted:
                        self.streak.add_group(self.last_failure)
                    return
            self.streak.add_group()
            group.episodes.sort(key=lambda episode: episode.rank)
            if self._refusal_of is not None and group.episodes:
                group.refusal = await self._refusal_of(group.episodes)
            group.settled = True
        finally:
            await cancel_all(members)

    async def _play_member(self, group: Group, rank: int) -> bool:
        """Play a member with retries; return whether it finished."""
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
                error = await self._play_shielded(episode)
            if episode.judged:
                self.streak.add_judged()
            if error is None:
                self.streak.add_finished(failure)
                group.episodes.append(episode)
                return True
            group.started = [other for other in group.started if other is not episode]
            self.counts.fail(episode, error)
            self.last_failure = failure = error
            if isinstance(error, Interrupted):
                group.interrupted = error
            if group.interrupted is not None:
                return False
            # A requeued item that keeps failing must not end the run.
            if attempt >= retries and not group.requeued:
                self.streak.add_failure(error)
        return False

    async def _play_shielded(self, episode: Episode) -> BaseException | None:
        """Play an episode in its own task, so that its cancellations and ours are not confused."""
        playing = asyncio.ensure_future(self._play(episode))
        try:
            await asyncio.wait([playing])
        except asyncio.CancelledError:
            playing.cancel()
            await asyncio.wait([playing])
            raise
        return playing.result()
