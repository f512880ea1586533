"""A TorchRL collector of multi-turn episodes, played concurrently.

Every episode stands alone: a slow turn delays only its own, and one that fails is rejected, counted
and replaced while the others go on. ``accepted + rejected + running == started`` at any moment.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer

from torchrl_mt.chat.tokens import OnBreak, Template
from torchrl_mt.collectors.background import Background
from torchrl_mt.collectors.behind import cancel_all
from torchrl_mt.collectors.cuts import CutWarning
from torchrl_mt.collectors.dump import EpisodeDump
from torchrl_mt.collectors.episode import Episode, episodes_to_tensordict
from torchrl_mt.collectors.group_filters import AcceptGroup
from torchrl_mt.collectors.ids import unique_ids
from torchrl_mt.collectors.items.curriculum import Curriculum
from torchrl_mt.collectors.items.items import Items
from torchrl_mt.collectors.limits import Limits
from torchrl_mt.collectors.loop_thread import LoopClosedError, LoopThread
from torchrl_mt.collectors.player import EpisodePlayer
from torchrl_mt.collectors.progress import Progress
from torchrl_mt.collectors.recorder import limits_of_play
from torchrl_mt.collectors.resumed_engine import ResumedEngine
from torchrl_mt.collectors.scheduler import (
    CANCELLED,
    Counter,
    Group,
    GroupPolicy,
    IncompleteGroups,
    Scheduler,
)
from torchrl_mt.collectors.staleness import Freshness, Lead, StalenessRule, Stall
from torchrl_mt.collectors.stats import Tally
from torchrl_mt.collectors.workflow import Workflow
from torchrl_mt.collectors.workflow_entries import ExpectedEntries
from torchrl_mt.engines import Engine, as_engine
from torchrl_mt.envs import TextEnv

__all__ = ["MultiTurnCollector"]

_T = TypeVar("_T")
_logger = logging.getLogger("torchrl_mt")


class MultiTurnCollector(BaseCollector):
    """Collect whole episodes of a language-model agent, many at once.

    Iterating yields batches of ``episodes_per_batch`` whole episodes in TED, flat ``[ΣT]``, a step a
    turn; with a ``replay_buffer`` the batch is written there and ``None`` is yielded, as TorchRL's
    collectors do. Nothing runs between two batches, so the policy may be trained there, unless
    ``max_staleness`` says that episodes may go on.

    An episode that raises (``SystemExit`` and ``KeyboardInterrupt`` too) is rejected, counted by cause
    in :meth:`stats` and logged once per cause; it never becomes a reward. A group is given out in one
    batch. What is given to be called (``accept``, items of ``data`` unless it is a list) is called in
    threads, so that it delays no other episode.

    Args:
        env: what answers the model: a :class:`~torchrl_mt.envs.TextEnv` (copied for every episode) or a
            callable that makes one; or a workflow, an object with
            ``async def arun_episode(engine, data)``; or a class of either, or its name as
            ``"package.module.Class"``.
        policy: the engine that samples the responses, or a TorchRL LLM wrapper. It is not closed by the
            collector unless it is a wrapper.
        data: what episodes are played for, an item a group: any iterable, a ``DataLoader``, a data set;
            or a :class:`~torchrl_mt.collectors.Curriculum`, which chooses by how the episodes went.
            Without data, every group is given ``{"seed": k}`` with a new ``k``.
        episodes_per_batch: how many episodes a batch has: so many, or more if the last group needs it.
        group_size: how many episodes share one item.
        max_concurrency: how many episodes run at once; as many as a batch has if ``None``. More than
            ``episodes_per_batch``, or ``max_staleness + 1`` times that, only evaluations can use.
        limits: what an episode may use.
        replay_buffer: where batches are written, if anywhere.
        total_episodes: end after this many accepted episodes; never if -1.
        accept: given an episode in TED, ``[T]``; false rejects it. May be ``async``.
        accept_group: given the episodes of a group, each in TED, ``[T]``; false rejects them all
            (``rejected/group_not_accepted``), and a group of another item is played in their place:
            :func:`~torchrl_mt.collectors.has_spread`. May be ``async``.
        total_attempts: raise once ``accept_group`` has refused a group and so many, refused or not,
            were played since a batch was last given out; ten times those of a batch if ``None``.
        max_retries: how often an episode that was rejected is played again.
        max_consecutive_failures: raise the last cause once this many episodes in a row were rejected
            in spite of retries, and none came to its end meanwhile. Until the environment's ``step``
            has returned once, or a workflow has, an episode that only a limit brought to its end
            does not interrupt the row. ``None`` means 32, or twice ``max_concurrency`` if that is
            more.
        max_staleness: let episodes go on while the policy is trained, so many batches ahead: at most
            ``max_staleness + 1`` batches are begun beyond those delivered before the last update, and
            at most ``max_staleness + updates + 1`` in all. No token is more than ``max_staleness``
            versions old when it is delivered. Without updates, iterating comes to a halt, and the log
            says so.
        staleness: what ``max_staleness`` bounds. ``"delivery"``: an episode that would be delivered too
            old is rejected (``rejected/stale``) with its group, as soon as that is certain, and the
            item is played again. ``"admission"``: what is begun, and nothing is rejected: with ``k``
            updates a batch, tokens are at most ``(max_staleness + 1) * k - 1`` versions old, except
            those of episodes that others overtook, which may be much older.
        yield_groups: give out complete groups only, whatever ``incomplete_groups`` says.
        incomplete_groups: what becomes of a group of which a member was rejected for good: ``"drop"``
            it, and with it the item until the data is gone through again; ``"keep"`` those that are
            left; ``"refill"``, play that member until it comes to its end, and drop the group if it
            does not in 16 more attempts; ``"requeue"``, drop the group and play its item again as a
            new one, before any new item. An item is given up after 64 times, or 16 in a row in which no
            member came to its end.
        dump_dir: a folder for readable records of the episodes, in JSON lines. What cannot be written
            is logged once and counted as ``dump_errors``; the run goes on.
        shuffle: draw the items in random order, by ``seed``.
        cycle: begin again when the data ends; by default unless it is an iterator.
        seed: of the order of items, and of those made without data.
        sampling: arguments for every call of the engine's ``generate``, evaluations' included.
        workflow_kwargs: arguments for the class that ``env`` is or names.
        env_workers: run the environments in so many processes of their own, for those that compute:
            threads share one core. ``env`` is pickled then, as are items and messages, and a script
            needs ``if __name__ == "__main__":``. A process that dies rejects its own episodes
            (``rejected/EnvWorkerError``), and another takes its place.
        on_break: what is done where the chat template does not go on from what was sampled; see
            :class:`~torchrl_mt.collectors.ChatTokens`.
        template: the chat template that dialogues are rendered by: ``"training"`` keeps an episode in
            one row; likewise.
        template_kwargs: what else the chat template is given with every rendering, such as ``tools``
            or ``enable_thinking=False``; see :class:`~torchrl_mt.collectors.ChatTokens`. A workflow
            makes its own.
        progress: show a progress bar.
        postproc: applied to every batch before it is written or yielded.
        tokenizer: renders messages; the policy's own (``policy.tokenizer``) if ``None``.

    Raises:
        TypeError: if ``env`` or ``policy`` is none of the above, or ``template_kwargs`` no mapping of
            names to plain data.
        ImportError: if ``env`` names nothing.
        ValueError: if ``data`` is empty, a size is out of range, ``episodes_per_batch`` or
            ``total_episodes`` is not whole groups, the tokenizer has no chat template or no
            end-of-turn token, or ``template_kwargs`` says how a template is rendered.

    Examples:
        >>> collector = MultiTurnCollector(  # doctest: +SKIP
        ...     GuessNumber(16, turns=5), engine, episodes_per_batch=128, limits=Limits(max_turns=5)
        ... )
        >>> for batch in collector:  # doctest: +SKIP
        ...     print(batch["next", "reward"].mean())
    """

    def __init__(
        self,
        env: TextEnv | Workflow | type | str | Callable[[], Any],
        policy: Engine | Any,
        data: Iterable[Any] | Curriculum | None = None,
        *,
        episodes_per_batch: int,
        group_size: int = 1,
        max_concurrency: int | None = None,
        limits: Limits | None = None,
        replay_buffer: ReplayBuffer | None = None,
        total_episodes: int = -1,
        accept: Callable[[TensorDictBase], bool] | None = None,
        accept_group: AcceptGroup | None = None,
        total_attempts: int | None = None,
        max_retries: int = 0,
        max_consecutive_failures: int | None = None,
        max_staleness: int | None = None,
        staleness: StalenessRule = "delivery",
        yield_groups: bool = False,
        incomplete_groups: IncompleteGroups = "drop",
        dump_dir: str | Path | None = None,
        shuffle: bool = False,
        cycle: bool | None = None,
        seed: int = 0,
        sampling: Mapping[str, Any] | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        env_workers: int | None = None,
        on_break: OnBreak = "fork",
        template: Template = "original",
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        _require_sizes(
            at_least_one={
                "episodes_per_batch": episodes_per_batch,
                "group_size": group_size,
                "max_concurrency": max_concurrency,
                "total_attempts": total_attempts,
                "max_consecutive_failures": max_consecutive_failures,
            },
            not_negative={"max_retries": max_retries, "max_staleness": max_staleness},
            whole_groups={
                "episodes_per_batch": episodes_per_batch,
                "total_episodes": max(total_episodes, 0),
            },
        )
        if incomplete_groups not in get_args(IncompleteGroups):
            raise ValueError(
                f"incomplete_groups must be one of {get_args(IncompleteGroups)}, got "
                f"{incomplete_groups!r}."
            )
        if staleness not in get_args(StalenessRule):
            raise ValueError(
                f"staleness must be one of {get_args(StalenessRule)}, got {staleness!r}."
            )
        self.engine = as_engine(policy, tokenizer)
        self._owns_engine = self.engine is not policy
        if max_staleness is not None and getattr(self.engine, "shares_weights", False):
            _logger.warning(
                "max_staleness=%d lets episodes go on while the policy is trained, but the engine "
                "samples with the very weights that are trained: tokens would be of no known "
                "version. Make the engine with share_weights=False.",
                max_staleness,
            )
        usable = episodes_per_batch * (1 + (max_staleness or 0))
        if max_concurrency is not None and max_concurrency > usable:
            _logger.warning(
                "max_concurrency=%d is more than batches can use: with episodes_per_batch=%d and "
                "max_staleness=%s at most %d episodes run at once. For more, ask for larger batches, or "
                "for a higher max_staleness.",
                max_concurrency,
                episodes_per_batch,
                max_staleness,
                usable,
            )
        self.limits = limits or Limits()
        self._player = EpisodePlayer(
            env,
            self.engine,
            limits=self.limits,
            accept=accept,
            accept_group=accept_group,
            tokenizer=tokenizer,
            on_break=on_break,
            template=template,
            template_kwargs=template_kwargs,
            workflow_kwargs=workflow_kwargs,
            env_workers=env_workers,
        )
        self._new_items = partial(Items, data, shuffle=shuffle, cycle=cycle)
        self._seeded = data is None or shuffle
        self._items = self._new_items(seed=seed)
        self.episodes_per_batch = episodes_per_batch
        self.group_size = group_size
        self.max_concurrency = max_concurrency or episodes_per_batch
        self.replay_buffer = replay_buffer
        self.total_episodes = total_episodes
        self.max_staleness = max_staleness
        self._freshness: Freshness | None = None
        if max_staleness is not None and staleness == "delivery":
            self._freshness = Freshness(max_staleness, lambda: self.policy_version)
        self.sampling = dict(sampling or {})
        self.postproc = postproc
        self._policy = GroupPolicy(
            group_size,
            max_retries,
            "drop" if yield_groups and incomplete_groups == "keep" else incomplete_groups,
            total_attempts or _ATTEMPTS * (episodes_per_batch // group_size),
            max_consecutive_failures or max(_FAILURES, 2 * self.max_concurrency),
        )
        self._tally = Tally()
        self._eval_tally = Tally()
        self._accepted_before = 0
        self._extra = ExpectedEntries()
        self._numbers = Counter()
        self._group_ids, self._traj_ids = unique_ids(), unique_ids()
        self._eval_group_ids, self._eval_traj_ids = unique_ids(), unique_ids()
        # A state is that before a delivery or after, never in between.
        self._delivering = threading.RLock()
        self._dump = None if dump_dir is None else EpisodeDump(dump_dir, self._player.tokenizer)
        self._dump_errors = 0
        total = None if total_episodes < 0 else total_episodes
        self._progress = Progress(total) if progress else None
        self._scheduler = self._new_scheduler()
        self._lead = self._new_lead()
        self._stall = Stall(_STALL_SECONDS)
        self._filters_groups = accept_group is not None
        self._told_stale = False
        self._warn_of_cuts = CutWarning()
        self._updating = False
        self._admitting: Any = None
        self._running = threading.Event()
        self._running.set()
        self._background: Background | None = None
        self._thread = LoopThread("torchrl_mt-rollout")

    # Collecting

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_episodes`` are accepted or the data is used up.

        Raises:
            RuntimeError: if too many episodes in a row were rejected; its cause is the last failure.
        """
        try:
            while (size := self._next_batch_size()) > 0:
                groups = self._in_loop(self._next_groups(size))
                if not groups:
                    self._items.hand_over()
                    return
                try:
                    batch = self._deliver(groups)
                except _TooOldError:
                    self._in_loop(self._hand_back())
                    continue
                yield batch
        finally:
            if self._progress is not None:
                self._progress.close()

    async def _next_groups(self, size: int) -> list[Group]:
        """The groups of the next batch."""
        # An interrupt may come when a batch was given out and before anybody had it.
        self._scheduler.take_back()
        if self._lead is None:
            return await self._scheduler.gather(size, self._running.is_set)
        self._lead.ask()
        if self._admitting is None or self._admitting.done():
            self._admitting = asyncio.ensure_future(self._scheduler.keep_admitting(self._room))
        try:
            return await self._scheduler.wait_for(size)
        except BaseException:
            await self._stop_playing()
            raise

    async def _hand_back(self) -> None:
        """Some episodes of a batch grew too old before it was delivered: the others wait again."""
        self._scheduler.hand_back()

    async def _stop_playing(self) -> None:
        """End the episodes that run; their items are played again."""
        if self._admitting is not None:
            await cancel_all([self._admitting])
        self._scheduler.take_back()
        await self._scheduler.cancel()

    def _in_loop(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine where the episodes are played."""
        try:
            return self._thread.run(coroutine)
        except LoopClosedError as error:
            if error.__cause__ is not None:
                raise RuntimeError(f"{error}: make a new collector.") from error.__cause__
            raise RuntimeError(_SHUT_DOWN) from None

    def _room(self) -> int:
        """How many more episodes may be begun, as far as staleness and the end of the run go."""
        assert self._lead is not None
        if not self._running.is_set():
            return 0
        begun, allowed = self._scheduler.begun, self._lead.allowed(self.engine.version)
        if self._stall.is_news(self._scheduler.starves and begun >= allowed):
            _logger.warning(
                "the collector waits for new weights: with max_staleness=%d and %d updates since it "
                "began, %d episodes of %d a batch may be begun before the next update, and all were "
                "(%d delivered, %d in the batch that is waited for). Call update_policy_weights_() "
                "after each batch, or give a higher max_staleness, or none; if training only takes its "
                "time, all is well.",
                self.max_staleness,
                self._lead.updates(self.engine.version),
                allowed,
                self.episodes_per_batch,
                self._scheduler.given_out,
                self._scheduler.ready,
            )
        stale = self._tally.count("rejected/stale")
        if stale > max(self._tally.accepted, 2 * self.episodes_per_batch) and not self._told_stale:
            self._told_stale = True
            _logger.warning(
                "%d episodes were rejected as stale and %d delivered: there are more than "
                "max_staleness=%d updates while an episode is played. Update less often, give a higher "
                'max_staleness, or staleness="admission" where older episodes will do.',
                stale,
                self._tally.accepted,
                self.max_staleness,
            )
        if self.total_episodes >= 0:
            allowed = min(allowed, self.total_episodes - self._accepted_before)
        return allowed - begun

    def _deliver(self, groups: list[Group]) -> TensorDictBase | None:
        """Write a batch where batches go; with it, its episodes are accepted."""
        groups = sorted(groups, key=lambda group: group.number)
        episodes = [episode for group in groups for episode in group.episodes]
        try:
            batch: TensorDictBase = episodes_to_tensordict(episodes)
            if self.postproc is not None:
                batch = self.postproc(batch)
        except BaseException:
            self._take_back()
            raise
        with self._delivering:
            # An update that follows the write as soon as it is seen must count as coming after it.
            version = self.engine.version
            if self._freshness is not None and self._freshness.is_over(episodes):
                raise _TooOldError
            try:
                if self.replay_buffer is not None:
                    self.replay_buffer.extend(batch)
            except BaseException:
                self._take_back()
                raise
            self._scheduler.settle()
            self._tally.accept(episodes, version=self.policy_version)
            for group in groups:
                self._scheduler.done(group)
            if self._lead is not None:
                self._lead.deliver(self._scheduler.given_out, version)
        self._items.hand_over()
        limits = limits_of_play(self.limits, self.sampling.get("max_new_tokens"), self.engine)
        self._warn_of_cuts(episodes, limits)
        self._record(episodes)
        if self._progress is not None:
            self._progress.show(
                len(episodes),
                self._tally.accepted,
                reward=f"{_mean_reward(episodes):.3g}",
                rejected=self._tally.stats()["rejected"],
                version=self.policy_version,
                **(
                    {"refused": self._tally.count("groups/refused")} if self._filters_groups else {}
                ),
            )
        return batch if self.replay_buffer is None else None

    def _take_back(self) -> None:
        """The batch could not be delivered: its items are played again."""

        async def take_back() -> None:
            self._scheduler.take_back()

        try:
            self._thread.run(take_back())
        except LoopClosedError:
            self._scheduler.take_back()

    def _record(self, episodes: list[Episode], *, is_eval: bool = False) -> None:
        """Dump the episodes; training does not depend on it."""
        if self._dump is None:
            return
        try:
            self._dump.write(episodes, is_eval=is_eval)
        except Exception as error:
            self._dump_errors += 1
            if self._dump_errors == 1:
                _logger.warning(
                    "episodes could not be dumped; more of this is only counted.", exc_info=error
                )

    def _next_batch_size(self) -> int:
        """How many episodes the next batch has; 0 when the run is over."""
        if self.total_episodes < 0:
            return self.episodes_per_batch
        return min(self.episodes_per_batch, self.total_episodes - self._tally.accepted)

    def _new_scheduler(self) -> Scheduler:
        """What plays the episodes to learn from."""
        return Scheduler(
            lambda episode: self._player.failure_of(episode, self.sampling, self._extra),
            self._items,
            self._policy,
            self.max_concurrency,
            self._tally,
            numbers=self._numbers,
            group_ids=self._group_ids,
            traj_ids=self._traj_ids,
            freshness=self._freshness,
            refusal_of=self._player.refusal_of if self._player.accept_group else None,
        )

    def _new_lead(self) -> Lead | None:
        """What bounds how far ahead they are played."""
        if self.max_staleness is None:
            return None
        return Lead(self.max_staleness, self.episodes_per_batch, self.engine.version)

    # Collecting in the background

    def start(self) -> None:
        """Collect in a thread of its own, into the replay buffer, until the data or the run ends.

        Raises:
            RuntimeError: if there is no replay buffer, or it was started already.
        """
        if self.replay_buffer is None:
            raise RuntimeError(
                "start() collects into a buffer: give the collector a replay_buffer."
            )
        if self._background is not None:
            raise RuntimeError("the collector was started already.")
        # Here it waits whenever training takes longer than playing.
        self._stall = Stall(_BACKGROUND_STALL_SECONDS)
        self._background = Background(self.iterator(), lambda: self._thread.closed)

    @property
    def is_running(self) -> bool:
        """Whether :meth:`start` was called and what it began has not ended."""
        return self._background is not None and self._background.is_alive()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Begin no further episodes within the context; those that run go on."""
        self._running.clear()
        try:
            yield
        finally:
            self._running.set()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End what :meth:`start` began, and the collector.

        Raises:
            Exception: what ended the background collection before its time.
        """
        self.shutdown(timeout, close_env)
        if self._background is not None and self._background.error is not None:
            error, self._background.error = self._background.error, None
            raise error

    # Evaluation

    def evaluate(self, data: Iterable[Any], n: int = 1, **sampling: Any) -> TensorDictBase:
        """Play episodes to see how good the policy is, beside the training.

        They take no items of the training data, do not count for staleness, and are counted apart,
        under ``eval/`` in :meth:`stats`. Environments find ``is_eval`` true in their context.

        Args:
            data: the items, gone through once.
            n: episodes for each item.
            **sampling: arguments for the engine's ``generate``; those that are not given are the
                collector's own ``sampling``.

        Returns:
            The episodes that came to their end, in TED, a group for each item in order.

        Raises:
            RuntimeError: if none did, or as many as ``max_consecutive_failures`` failed in a row.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}.")
        policy = GroupPolicy(
            n,
            self._policy.max_retries,
            "keep",
            max_consecutive_failures=self._policy.max_consecutive_failures,
        )
        asked = {**self.sampling, **sampling}
        items, extra = Items(data, cycle=False), ExpectedEntries()
        scheduler = Scheduler(
            lambda episode: self._player.failure_of(episode, asked, extra),
            items,
            policy,
            self.max_concurrency,
            self._eval_tally,
            numbers=Counter(),
            group_ids=self._eval_group_ids,
            traj_ids=self._eval_traj_ids,
            is_eval=True,
        )
        try:
            groups = self._in_loop(scheduler.gather(_ALL))
        finally:
            items.close()
        episodes = [e for group in sorted(groups, key=lambda g: g.number) for e in group.episodes]
        if not episodes:
            last = scheduler.last_failure
            raise RuntimeError(
                "no episode of the evaluation came to its end"
                + ("." if last is None else f"; the last failed for {type(last).__name__}: {last}")
            ) from last
        self._eval_tally.accept(episodes, version=self.policy_version)
        self._record(episodes, is_eval=True)
        return episodes_to_tensordict(episodes)

    # TorchRL's collector protocol

    def __len__(self) -> int:
        if self.total_episodes < 0:
            # A TypeError is what list() and tqdm take for "length unknown".
            raise TypeError("a collector without total_episodes has no length.")
        return -(-self.total_episodes // self.episodes_per_batch)

    def __bool__(self) -> bool:
        return True

    def stats(self) -> dict[str, int | float | bool]:
        """Counters since the collector was made.

        Returns:
            ``started``, ``accepted`` (delivered), ``rejected`` and ``running`` (not settled yet)
            episodes, ``rejected/<cause>``, and of the accepted ones ``stop/<reason>`` (see
            :class:`~torchrl_mt.collectors.StopReason`), ``turns``, ``tokens`` (sampled) and ``forks``;
            ``groups/refused`` by ``accept_group``; ``queue``, the episodes that wait to be delivered;
            ``waiting/longest``, seconds for which an episode has waited for one call of the engine or of
            its environment; ``time/engine``, ``time/environment`` and ``time/waiting``, whose the time
            of episodes was, from their beginning to their delivery, as parts of 1;
            ``tokens_per_second``; over the last batch ``turns_per_episode`` and ``tokens_per_turn``,
            both means, and ``staleness/mean`` and ``staleness/max``, the versions between an episode's
            oldest token and its delivery; ``policy_version``; with ``dump_dir`` ``dump_errors``; the
            counts of evaluations under ``eval/``.
        """
        stats: dict[str, int | float | bool] = {**self._tally.stats(), **self._tally.rates()}
        stats |= self._tally.waiting()
        stats["queue"] = self._scheduler.ready
        stats["policy_version"] = self.policy_version
        if self._dump is not None:
            stats["dump_errors"] = self._dump_errors
        evaluated = self._eval_tally.stats()
        if evaluated["started"]:
            stats |= {f"eval/{name}": value for name, value in evaluated.items()}
        return stats

    @property
    def policy_version(self) -> int:
        """The engine's weight version, those of the run that this one goes on from included."""
        return self._player.engine.version

    def get_policy_version(self) -> int:
        """:attr:`policy_version`, under TorchRL's other name."""
        return self.policy_version

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase] | None) -> None:
        """Apply another function to every batch from now on."""
        self.postproc = postproc

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        worker_ids: Any = None,
        model_id: str | None = None,
    ) -> None:
        """Hand new weights to the engine.

        Args:
            policy_or_weights: what the engine's ``update_weights`` takes: a model or a state dict.
            weights: another name for the same.
            policy: another name for the same.
            weights_dict: the same, as the only value of a dict.
            worker_ids: TorchRL's; there is one engine for all episodes, so it changes nothing.
            model_id: TorchRL's; there is one model, so it changes nothing.

        Raises:
            TypeError: if weights are given more than once.
        """
        given = [x for x in (policy_or_weights, weights, policy) if x is not None]
        given += [] if weights_dict is None else list(weights_dict.values())
        if len(given) > 1:
            raise TypeError(
                "update_policy_weights_ takes the weights once, as policy_or_weights, weights or policy "
                f"or the only value of weights_dict, got {len(given)} of them."
            )
        self._updating = True
        try:
            self.engine.update_weights(given[0] if given else None)
        finally:
            self._updating = False

    def increment_version(self) -> None:
        """Count new weights that reached what samples without :meth:`update_policy_weights_`.

        TorchRL's weight senders and updaters call it after they have sent weights, if the collector is
        registered with them. Tokens that are sampled from then on have the new version. Within
        :meth:`update_policy_weights_`, where the engine's ``on_update`` may use such a sender, the
        update is counted already, and this does nothing.
        """
        if self._updating:
            return
        if hasattr(self.engine, "count_update"):
            self.engine.count_update()
        else:
            self.engine.update_weights(None)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed torch's global generator and the order of the items, from the first one on.

        Tokens repeat as far as the engine samples them from that generator, in the same order. Episodes
        that run are ended.

        Args:
            seed: the seed.
            static_seed: return the same seed rather than the next.

        Returns:
            A seed for the next collector.

        Raises:
            RuntimeError: while it collects in the background, or after shutdown.
        """
        if self._seeded:
            items = self._new_items(seed=seed)
            self._stop_for("set_seed")
            self._items.close()
            self._items = items
            self._begin_anew()
        torch.manual_seed(seed)
        return seed if static_seed else seed + 1

    def state_dict(self) -> OrderedDict:
        """Counters, the weight version and the position in the data; the weights are the model's.

        Items whose episodes were not delivered yet count as not taken: a collector that goes on from
        this state plays them again. Its groups and episodes have new ids: what was delivered after the
        state was taken keeps its own.
        """
        with self._delivering:
            return OrderedDict(
                counts=self._tally.stats(),
                numbers=self._numbers.next,
                items=self._items.state_dict(),
                policy_version=self.policy_version,
            )

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Go on where another collector over the same data stood.

        Episodes that run are ended. Weight versions go on from that collector's.

        Raises:
            ValueError: if the data is of another length, or lies behind already.
            RuntimeError: while it collects in the background, or after shutdown.
        """
        self._stop_for("load_state_dict")
        self._items.load_state_dict(state_dict["items"])
        self._numbers.next = state_dict["numbers"]
        self._tally.load(state_dict["counts"])
        updates = state_dict["policy_version"] - self.engine.version
        self._player.engine = ResumedEngine(self.engine, updates) if updates > 0 else self.engine
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Count from here what bounds the run."""
        self._accepted_before = self._tally.accepted
        self._extra = ExpectedEntries()
        self._scheduler = self._new_scheduler()
        self._lead = self._new_lead()

    def _stop_for(self, what: str) -> None:
        """End the episodes that run, for a method that begins anew."""
        if self.is_running:
            raise RuntimeError(
                f"{what} must not be called while the collector runs in the background: call it before "
                "start()."
            )
        self._in_loop(self._stop_playing())

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Cancel what runs and end all threads and processes of the collector's own.

        Repeated calls do nothing.

        Args:
            timeout: seconds to wait for all of it; if ``None``, as long as it takes for what runs, and
                ten seconds for environments that are slow to close.
            close_env: not used: environments are closed with their episodes.
            raise_on_error: raise if the time is over, rather than only log a warning.

        Raises:
            TimeoutError: if not everything has ended in time; what has not is left behind.
        """
        begin = time.monotonic()
        ended = self._thread.close(timeout)
        background = self._background
        if background is not None and background is not threading.current_thread():
            left = None if timeout is None else max(0.0, timeout + begin - time.monotonic())
            background.join(left)
            ended = ended and not background.is_alive()
        self._items.close()
        self._player.close()
        if self._owns_engine:
            self.engine.close()
        self._tally.reject_running(CANCELLED)
        if ended:
            return
        message = f"what the collector began did not end within timeout={timeout} seconds."
        if raise_on_error:
            raise TimeoutError(message)
        _logger.warning(message)

    def __enter__(self) -> MultiTurnCollector:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            self.async_shutdown()  # Tells what went wrong in the background.
        else:
            self.shutdown()

    def __repr__(self) -> str:
        return (
            f"MultiTurnCollector(episodes_per_batch={self.episodes_per_batch}, "
            f"group_size={self.group_size}, limits={self.limits})"
        )


class _TooOldError(Exception):
    """A batch has grown too old to be delivered."""


def _mean_reward(episodes: Sequence[Episode]) -> float:
    """The mean of the episodes that count."""
    rewards = [episode.reward for episode in episodes if episode.valid is not False]
    return sum(rewards) / len(rewards) if rewards else math.nan


_ALL = 2**62
"""More episodes than any data has."""

_FAILURES = 32
"""How many episodes in a row may fail at least, if nobody says."""

_ATTEMPTS = 10
"""Batches' worth of groups that may be played for one, if nobody says."""

_STALL_SECONDS, _BACKGROUND_STALL_SECONDS = 3.0, 60.0
"""How long waiting for new weights is nothing to speak of."""

_SHUT_DOWN = "the collector was shut down: make a new one."


def _require_sizes(
    *,
    at_least_one: Mapping[str, int | None],
    not_negative: Mapping[str, int | None],
    whole_groups: Mapping[str, int],
) -> None:
    """Refuse sizes that do not fit together."""
    for least, sizes in ((1, at_least_one), (0, not_negative)):
        for name, value in sizes.items():
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
    group_size = at_least_one["group_size"]
    for name, value in whole_groups.items():
        if value % group_size:  # type: ignore[operator]
            raise ValueError(f"{name} must be a multiple of group_size={group_size}, got {value}.")
