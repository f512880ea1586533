"""A TorchRL collector that plays multi-turn episodes concurrently.

Episodes do not affect each other: a slow turn delays only its own episode, and a failed episode is
rejected, counted and replaced. ``accepted + rejected + running == started`` at any moment.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.weight_update import NoWeightSyncScheme, WeightSyncScheme
from tqdm.auto import tqdm

from torchrl_mt._hosts.ray import check_sent_buffer, for_buffer, send_results_compactly
from torchrl_mt._hosts.torchrl import as_remote
from torchrl_mt.checks import check_at_least, check_class, import_extra
from torchrl_mt.collectors.dump import EpisodeDump
from torchrl_mt.collectors.episode import Episode, episodes_to_tensordict
from torchrl_mt.collectors.event_loop.loop_thread import LoopClosedError, LoopThread
from torchrl_mt.collectors.items.curriculum import Curriculum
from torchrl_mt.collectors.items.items import Items
from torchrl_mt.collectors.limits import Limits
from torchrl_mt.collectors.playing.episode_player import EpisodePlayer, Player
from torchrl_mt.collectors.playing.version_offset import VersionOffset, count_update
from torchrl_mt.collectors.recorder import limits_of_play
from torchrl_mt.collectors.scheduling.failure_limits import FailurePolicy
from torchrl_mt.collectors.scheduling.group_filters import refusal_of
from torchrl_mt.collectors.scheduling.groups import Group, GroupPlayer
from torchrl_mt.collectors.scheduling.run_warnings import (
    CutWarning,
    warn_of_settings,
)
from torchrl_mt.collectors.scheduling.sample_ratio import SampleRatio
from torchrl_mt.collectors.scheduling.scheduler import CANCELLED, Counter, Scheduler
from torchrl_mt.collectors.scheduling.staleness import Lead, StalenessLimit
from torchrl_mt.collectors.scheduling.training_run import TrainingRun
from torchrl_mt.collectors.scheduling.unique_ids import RunIds
from torchrl_mt.collectors.settings import CollectorOptions
from torchrl_mt.collectors.statistics.episode_counts import EpisodeCounts
from torchrl_mt.collectors.weight_receivers import check_scheme, receiving_model
from torchrl_mt.collectors.workflow import Workflow
from torchrl_mt.collectors.workflow_entries import ExpectedEntries
from torchrl_mt.engines import Engine
from torchrl_mt.envs import TextEnv
from torchrl_mt.processes import StaysInProcess
from torchrl_mt.threads import WatchedThread

if TYPE_CHECKING:
    from torchrl_mt.agents import Agent

__all__ = ["MultiTurnCollector"]

_T = TypeVar("_T")
_logger = logging.getLogger("torchrl_mt")


class MultiTurnCollector(StaysInProcess, BaseCollector):
    """Collect whole episodes of a language-model agent, many at once.

    Iterating yields batches of whole episodes in TED, flat ``[ΣT]``, one step per turn. An episode that
    raises is rejected and counted by cause in :meth:`stats`; it never becomes a reward.

    Args:
        env: a :class:`~torchrl_mt.envs.TextEnv` (copied for every episode), a workflow or an agent; or
            a callable that makes one, or its name (:doc:`/environments`).
        policy: the engine, a TorchRL LLM wrapper, a factory of one, or its name (:doc:`/engines`).
        data: the items, one per group: any iterable, a ``DataLoader``, or a
            :class:`~torchrl_mt.collectors.Curriculum`. Without data, items are ``{"seed": k}``.
        episodes_per_batch: episodes per batch; a batch has more if its last group needs it.
        group_size: number of episodes that share one item; they are in one batch.
        max_concurrency: number of episodes that run at once; ``episodes_per_batch`` if ``None``.
        limits: limits of an episode.
        sampling: arguments for every call of the engine's ``generate``, also in evaluations.
        replay_buffer: the buffer that batches are written to; ``None`` is yielded then.
        total_episodes: number of accepted episodes after which the run ends; -1 for no end.
        accept: called with an episode in TED, ``[T]``; false rejects it. May be ``async``.
        max_retries: number of times that a rejected episode is played again.
        max_consecutive_failures: raise the last error after so many failed episodes in a row.
        max_staleness: play up to so many batches while you train; no delivered token is older than so
            many updates. ``None`` plays nothing between two batches.
        yield_groups: yield whole groups only, also with ``incomplete_groups="keep"``.
        rate_limit: bounds the rows drawn from ``replay_buffer`` per episode written; both sides wait.
        postproc: applied to every batch before it is written or yielded.
        processor: the Hugging Face processor of a model that takes images; without, they are refused.
        dump_dir: folder for records of the episodes, rejected ones too, in JSON lines.
        options: the rarer settings: order of items, chat template, filters of groups, processes.

    Raises:
        TypeError: if ``env`` or ``policy`` is none of the above, or ``processor`` of no known family.
        ImportError: if ``env`` or ``policy`` names nothing that can be imported.
        ValueError: if ``data`` is empty, a size is out of range or no multiple of ``group_size``, or the
            tokenizer has no chat template or no end-of-turn token.

    Examples:
        >>> collector = MultiTurnCollector(env, engine, episodes_per_batch=128)  # doctest: +SKIP
        >>> for batch in collector:  # doctest: +SKIP
        ...     print(batch["next", "reward"].mean())
    """

    _instead = "make it where it runs, as with {name}.as_remote()"
    init_random_frames = 0
    """Frames without training, for TorchRL's ``Trainer``."""

    def __init__(
        self,
        env: TextEnv | Workflow | Agent | type | str | Callable[[], Any],
        policy: Engine | Callable[[], Engine] | Any,
        data: Iterable[Any] | Curriculum | None = None,
        *,
        episodes_per_batch: int,
        group_size: int = 1,
        max_concurrency: int | None = None,
        limits: Limits | None = None,
        sampling: Mapping[str, Any] | None = None,
        replay_buffer: ReplayBuffer | None = None,
        total_episodes: int = -1,
        accept: Callable[[TensorDictBase], Any] | None = None,
        max_retries: int = 0,
        max_consecutive_failures: int | None = None,
        max_staleness: int | None = None,
        yield_groups: bool = False,
        rate_limit: SampleRatio | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        processor: Any = None,
        dump_dir: str | Path | None = None,
        options: CollectorOptions | None = None,
    ) -> None:
        super().__init__()
        limits = Limits() if limits is None else limits
        options = CollectorOptions() if options is None else options
        check_class("limits", limits, Limits)
        check_class("options", options, CollectorOptions)
        for name, size, least in (
            ("episodes_per_batch", episodes_per_batch, 1),
            ("group_size", group_size, 1),
            ("max_concurrency", max_concurrency, 1),
            ("max_retries", max_retries, 0),
            ("max_consecutive_failures", max_consecutive_failures, 1),
            ("max_staleness", max_staleness, 0),
        ):
            if size is not None:
                check_at_least(name, size, least)
        for name, episodes in (
            ("episodes_per_batch", episodes_per_batch),
            ("total_episodes", max(total_episodes, 0)),
        ):
            if episodes % group_size:
                raise ValueError(
                    f"{name} must be a multiple of group_size={group_size}, got {episodes}."
                )
        self.limits = limits
        self.options = options
        incomplete = options.incomplete_groups
        if yield_groups and incomplete == "keep":
            incomplete = "drop"
        self.failures = FailurePolicy(max_retries, max_consecutive_failures, incomplete)
        self._player: Player = self._make_player(
            env,
            policy,
            limits=self.limits,
            accept=accept,
            processor=processor,
            chat=options.chat,
            tokenizer=options.tokenizer,
            agents=options.agents,
            workflow_kwargs=options.workflow_kwargs,
            env_workers=options.env_workers,
        )
        self.engine = self._player.engine
        self._owns_engine = self.engine is not policy
        self.worker_idx = 0
        self._receivers: dict[str, WeightSyncScheme] = {}
        self._received: nn.Module | None = None
        """Copy of the engine's model that weight-sync schemes write to."""
        warn_of_settings(self.engine, episodes_per_batch, max_concurrency, max_staleness)
        self._data = data
        self._items = self._make_items(options.seed)
        self.episodes_per_batch = episodes_per_batch
        self.group_size = group_size
        self.max_concurrency = max_concurrency or episodes_per_batch
        self.replay_buffer = replay_buffer
        self.rate_limit = rate_limit
        if rate_limit is not None:
            if not isinstance(rate_limit, SampleRatio):
                raise TypeError(f"rate_limit must be a SampleRatio, got {rate_limit!r}.")
            if replay_buffer is None:
                raise ValueError("rate_limit counts draws from a buffer: give a replay_buffer.")
            rate_limit.attach(replay_buffer, group_size)
            self._pace = rate_limit.writer(lambda: self._background)
        self.total_episodes = total_episodes
        self._attempts = options.total_attempts or _ATTEMPTS * (episodes_per_batch // group_size)
        self.max_staleness = max_staleness
        self._staleness: StalenessLimit | None = None
        if max_staleness is not None and options.staleness == "delivery":
            player = self._player  # Not self, see _new_run.
            self._staleness = StalenessLimit(max_staleness, lambda: player.engine.version)
        self.sampling = dict(sampling or {})
        self.postproc = postproc
        self._counts, self._eval_counts = EpisodeCounts(), EpisodeCounts()
        self._numbers = Counter()
        self._ids, self._eval_ids = RunIds(), RunIds()
        # Held during a delivery, so that state_dict() never shows half of one.
        self._delivering = threading.RLock()
        self._dump: EpisodeDump | None = None
        if dump_dir is not None:
            self._dump = dump = EpisodeDump(dump_dir, self._player.tokenizer)
            self._counts.on_reject = lambda episodes, why: dump.record(episodes, rejected=why)
        self._progress: Any = None
        """The progress bar of an iteration, from its first batch on."""
        self._warn_of_cuts = CutWarning()
        self._updating = False
        self._push_seconds = 0.0
        self._may_begin = threading.Event()
        self._may_begin.set()
        self._run = self._new_run()
        self._background: WatchedThread | None = None
        self._thread = LoopThread("torchrl_mt-rollout", then=self._player.end)

    def _make_player(self, env: Any, policy: Any, **options: Any) -> Player:
        """Make the player of the episodes, with its engine; options are those of the player."""
        return EpisodePlayer(env, policy, **options)

    # Collecting

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_episodes`` are accepted or the data ends.

        Raises:
            RuntimeError: if too many episodes in a row were rejected; its cause is the last failure.
        """
        if self._next_batch_size() <= 0:
            _logger.warning(
                "the collector yields nothing: its total_episodes=%d are all accepted. Make a new one.",
                self.total_episodes,
            )
        try:
            while (size := self._next_batch_size()) > 0:
                if self.rate_limit is not None:
                    self._pace.begin(size, lambda: self._thread.closed)
                groups = self._in_loop(self._run.next_batch(size))
                if not groups:
                    self._items.hand_over()
                    return
                try:
                    batch = self._deliver(groups)
                except _TooOldError:
                    self._in_loop(self._run.hand_back())
                    continue
                yield batch
        finally:
            if self._progress is not None:
                self._progress.close()
                self._progress = None

    def _in_loop(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the event loop of the episodes."""
        try:
            return self._thread.run(coroutine)
        except LoopClosedError as error:
            if error.__cause__ is not None:
                raise RuntimeError(f"{error}: make a new collector.") from error.__cause__
            raise RuntimeError("the collector was shut down: make a new one.") from None

    def _deliver(self, groups: list[Group]) -> TensorDictBase | None:
        """Build a batch, write it to the replay buffer, and count its episodes as accepted."""
        groups = sorted(groups, key=lambda group: group.number)
        episodes = [episode for group in groups for episode in group.episodes]
        with self._take_back_on_error():
            batch: TensorDictBase = episodes_to_tensordict(episodes)
            if self.postproc is not None:
                batch = self.postproc(batch)
        with self._delivering:
            # Read before the write: a reader of the buffer may update the weights at once.
            version = self.policy_version
            if self._staleness is not None and self._staleness.is_exceeded(episodes):
                raise _TooOldError
            if self.replay_buffer is not None:
                with self._take_back_on_error():
                    self.replay_buffer.extend(for_buffer(batch, self.replay_buffer))
            if self.rate_limit is not None:
                self._pace.wrote(len(episodes))
            self._run.deliver(groups, version)
        self._items.hand_over()
        limits = limits_of_play(self.limits, self.sampling.get("max_new_tokens"), self.engine)
        self._warn_of_cuts(episodes, limits)
        if self._dump is not None:
            self._dump.record(episodes)
        if self.options.progress:
            if self._progress is None:
                total = None if self.total_episodes < 0 else self.total_episodes
                before = self._counts.accepted - len(episodes)
                self._progress = tqdm(total=total, initial=before, unit="ep")
            facts = {
                "reward": f"{_mean_reward(episodes):.3g}",
                "rejected": self._counts.count("rejected"),
                "version": self.policy_version,
            }
            if self.options.accept_group is not None:
                facts["refused"] = self._counts.count("groups/refused")
            self._progress.set_postfix(facts)
            self._progress.update(len(episodes))
        if self.replay_buffer is not None:
            return None
        send_results_compactly()
        return batch

    @contextmanager
    def _take_back_on_error(self) -> Iterator[None]:
        """On an error, have the items of the batch played again."""
        try:
            yield
        except BaseException:
            try:
                self._thread.run(self._run.take_back())
            except LoopClosedError:
                self._run.scheduler.take_back()
            raise

    def _next_batch_size(self) -> int:
        """Number of episodes of the next batch; 0 when the run is over."""
        if self.total_episodes < 0:
            return self.episodes_per_batch
        return min(self.episodes_per_batch, self.total_episodes - self._counts.accepted)

    def _new_run(self) -> TrainingRun:
        """Make the training run that starts from the current items, counts and weights."""
        lead = left = None
        if self.max_staleness is not None:
            lead = Lead(self.max_staleness, self.episodes_per_batch, self.policy_version)
        if self.total_episodes >= 0:
            left = self.total_episodes - self._counts.accepted
        extra = ExpectedEntries()
        # With max_staleness, tasks of the event loop hold the run: they must not keep a collector alive
        # that was dropped without shutdown().
        me, player = weakref.proxy(self), self._player
        group_player = GroupPlayer(
            lambda episode: me._play(episode, extra),
            size=self.group_size,
            failures=self.failures,
            concurrency=self.max_concurrency,
            counts=self._counts,
            traj_ids=self._ids.episodes,
            refusal_of=self._refusal_of(),
        )
        scheduler = Scheduler(
            group_player,
            self._items,
            numbers=self._numbers,
            group_ids=self._ids.groups,
            staleness=self._staleness,
            total_attempts=self._attempts,
        )
        return TrainingRun(
            scheduler,
            lead,
            lambda: player.engine.version,
            episodes_left=left,
            may_begin=self._may_begin,
        )

    def _play(
        self, episode: Episode, expected: ExpectedEntries
    ) -> Coroutine[Any, Any, BaseException | None]:
        """Play an episode of the run and return its error, or ``None``."""
        # Not "async def": with any such method, Ray would run this class in an event loop.
        return self._player.failure_of(episode, self.sampling, expected)

    def _refusal_of(self) -> Callable[[list[Episode]], Coroutine[Any, Any, Any]] | None:
        """Tells why ``accept_group`` refuses a group's finished episodes, or ``None``."""
        accept = self.options.accept_group
        return None if accept is None else partial(refusal_of, accept)

    def _make_items(self, seed: int) -> Items:
        """The items from their beginning, in the order of a seed."""
        order = self.options
        return Items(self._data, shuffle=order.shuffle, cycle=order.cycle, seed=seed)

    # Collecting in the background

    def start(self) -> None:
        """Collect into the replay buffer in a background thread, until the data or the run ends.

        Raises:
            RuntimeError: if there is no replay buffer, or the collector was started already.
        """
        if self.replay_buffer is None:
            raise RuntimeError(
                "start() collects into a buffer: give the collector a replay_buffer."
            )
        if self._background is not None:
            raise RuntimeError("the collector was started already.")
        # In the background, it waits whenever training takes longer than playing.
        self._run.warnings.be_patient()
        self._background = WatchedThread(
            lambda: deque(self.iterator(), maxlen=0),
            is_expected=lambda: self._thread.closed,
            name="torchrl_mt-collect",
        )

    @property
    def is_running(self) -> bool:
        """Whether the background thread of :meth:`start` runs."""
        return self._background is not None and self._background.is_alive()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Begin no episodes within the context; running episodes go on."""
        self._may_begin.clear()
        try:
            yield
        finally:
            self._may_begin.set()

    @contextmanager
    def hold_deliveries(self) -> Iterator[None]:
        """Deliver no batch within the context, so that counters and replay buffer belong together.

        Episodes go on. Other threads that deliver wait for the end of the context.
        """
        with self._delivering:
            yield

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut the collector down, see :meth:`shutdown`, and raise the error of :meth:`start`'s thread.

        Raises:
            Exception: the error that ended the background thread, if one did.
        """
        self.shutdown(timeout, close_env)
        if self._background is not None and self._background.error is not None:
            error, self._background.error = self._background.error, None
            raise error

    # Evaluation

    def evaluate(self, data: Iterable[Any], n: int = 1, **sampling: Any) -> TensorDictBase:
        """Evaluate the policy on items of their own.

        Evaluation takes no items of the training data and does not count for staleness. Its episodes
        are counted under ``eval/`` in :meth:`stats`, and their context has ``is_eval=True``.

        Args:
            data: the items, each played once.
            n: episodes per item.
            **sampling: arguments for the engine's ``generate``, over those of the collector's
                ``sampling``.

        Returns:
            The finished episodes in TED, flat ``[ΣT]``, one group per item, in the items' order.

        Raises:
            RuntimeError: if no episode finished, or ``max_consecutive_failures`` failed in a row.
            ValueError: if ``n`` is below 1.
        """
        check_at_least("n", n)
        items, extra = Items(data, cycle=False), ExpectedEntries()
        asked = {**self.sampling, **sampling}
        player = GroupPlayer(
            lambda episode: self._player.failure_of(episode, asked, extra),
            size=n,
            failures=replace(self.failures, incomplete_groups="keep"),
            concurrency=self.max_concurrency,
            counts=self._eval_counts,
            traj_ids=self._eval_ids.episodes,
            is_eval=True,
        )
        scheduler = Scheduler(player, items, numbers=Counter(), group_ids=self._eval_ids.groups)
        try:
            groups = self._in_loop(scheduler.gather(_ALL))
        finally:
            items.close()
        episodes = [e for group in sorted(groups, key=lambda g: g.ticket) for e in group.episodes]
        if not episodes:
            last = player.last_failure
            raise RuntimeError(
                "no episode of the evaluation finished"
                + ("." if last is None else f"; the last failed for {type(last).__name__}: {last}")
            ) from last
        self._eval_counts.accept(episodes, version=self.policy_version)
        if self._dump is not None:
            self._dump.record(episodes, is_eval=True)
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
            A dict with

            - episodes ``started``, ``accepted`` (delivered), ``rejected`` and ``running`` (neither yet);
              ``rejected/<cause>``; ``groups/refused`` by ``accept_group``;
            - of accepted episodes: ``stop/<reason>`` (see
              :class:`~torchrl_mt.collectors.StopReason`), ``turns``, ``tokens`` (sampled), ``cut``
              (responses that a limit of tokens ended), ``forks``;
            - ``queue``: finished episodes that wait for delivery;
            - ``waiting/longest``: seconds that the longest running call of the engine or of an
              environment has taken;
            - ``time/engine``, ``time/environment``, ``time/waiting``: fractions of the episodes' time
              from start to delivery;
            - ``tokens_per_second``; for the last batch the means ``turns_per_episode`` and
              ``tokens_per_turn``, and ``staleness/mean`` and ``staleness/max``: versions between an
              episode's oldest token and its delivery;
            - ``policy_version``; ``weights/push_seconds``: seconds that the last update of the weights
              took; with ``dump_dir`` ``dump_errors``;
            - with ``rate_limit``, what :meth:`SampleRatio.stats` returns;
            - the counts of evaluations under ``eval/``.
        """
        stats: dict[str, int | float | bool] = {**self._counts.stats(), **self._counts.rates()}
        stats |= self._counts.waiting()
        stats["queue"] = self._run.scheduler.ready
        stats["policy_version"] = self.policy_version
        stats["weights/push_seconds"] = self._push_seconds
        if self.rate_limit is not None:
            stats |= self.rate_limit.stats()
        if self._dump is not None:
            stats["dump_errors"] = self._dump.errors
        evaluated = self._eval_counts.stats()
        if evaluated["started"]:
            stats |= {f"eval/{name}": value for name, value in evaluated.items()}
        return stats

    @property
    def policy_version(self) -> int:
        """The weight version, counted from the beginning of the run, across restarts."""
        return self._player.engine.version

    def get_policy_version(self) -> int:
        """:attr:`policy_version`, as TorchRL's method."""
        return self.policy_version

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase] | None) -> None:
        """Replace ``postproc`` for the batches to come."""
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
        """Update the engine's weights, and count the update.

        With a ``weight_updater``, that one sends the weights; else the engine's ``update_weights`` loads
        them.

        Args:
            policy_or_weights: a model or a state dict; ``None`` for those that the updater or the engine
                knows.
            weights: another name for ``policy_or_weights``.
            policy: another name for ``policy_or_weights``.
            weights_dict: the weights as the only value of a dict.
            worker_ids: passed to the ``weight_updater``; otherwise ignored, since there is one engine.
            model_id: ignored, since there is one model.

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
        source = given[0] if given else None
        updater, version = self.weight_updater, self.engine.version
        self._updating, begun = True, time.monotonic()
        try:
            if updater is None:
                self.engine.update_weights(source)
            else:
                updater(policy_or_weights=source, worker_ids=worker_ids)
        finally:
            self._updating, self._push_seconds = False, time.monotonic() - begun
        if updater is not None and self.engine.version == version:
            self.increment_version()

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Take weights from the registered schemes, or as :meth:`update_policy_weights_` without any."""
        if self._receivers:
            super().receive_weights(policy_or_weights, weights=weights, policy=policy)
        else:
            self.update_policy_weights_(policy_or_weights, weights=weights, policy=policy)

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, WeightSyncScheme],
        *,
        synchronize_weights: bool = True,
    ) -> None:
        """Receive weights from TorchRL's weight-sync schemes.

        The engine takes what arrives between two steps, and each time counts as an update, the first
        weights included. This needs the memory of another copy of the model.

        Args:
            weight_recv_schemes: ``{"policy": scheme}``, with a ``SharedMemWeightSyncScheme``,
                ``MultiProcessWeightSyncScheme``, ``RayWeightSyncScheme`` or ``NoWeightSyncScheme``.
            synchronize_weights: connect to the sender and wait for its first weights.

        Raises:
            TypeError: if a scheme is of another kind, or the engine has no model in this process.
            ValueError: if the model is not named ``"policy"``.
        """
        for model_id, scheme in weight_recv_schemes.items():
            if model_id != _POLICY:
                raise ValueError(
                    f"weight_recv_schemes must be of the model {_POLICY!r}, the only one, got "
                    f"{model_id!r}."
                )
            check_scheme(scheme, self.engine)
        for model_id, scheme in weight_recv_schemes.items():
            # By itself, Ray's looks for a policy that is a module.
            if not (scheme.initialized_on_receiver or scheme.initialized_on_sender):
                needs = not isinstance(scheme, NoWeightSyncScheme)
                model = self.get_model(model_id) if needs else None
                index = self.worker_idx
                scheme.init_on_receiver(
                    model_id=model_id, context=self, worker_idx=index, model=model
                )
        self._receivers.update(weight_recv_schemes)
        super().register_scheme_receiver(
            dict(weight_recv_schemes), synchronize_weights=synchronize_weights
        )
        if synchronize_weights and self._received is not None:
            self.update_policy_weights_(self._received)

    def get_model(self, model_id: str) -> nn.Module:
        """Return the module that weight-sync schemes write to: a copy of the engine's model.

        Raises:
            ValueError: if ``model_id`` is not ``"policy"``.
            TypeError: if the engine has no model in this process.
        """
        if model_id != _POLICY:
            raise ValueError(f"model_id must be {_POLICY!r}, the only model, got {model_id!r}.")
        if self._received is None:
            self._received = receiving_model(self.engine)
        return self._received

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """Make a Ray actor class of this class; its ``remote(...)`` takes the arguments of this one.

        Give the actor a factory as ``policy``, and the ``client()`` of a ``RayReplayBuffer`` as
        ``replay_buffer``. Its batches come from ``next()``, which returns ``None`` at the end.

        Args:
            remote_config: options of ``ray.remote``; ``{"num_cpus": 1}`` if ``None``.

        Raises:
            ImportError: if Ray is not installed.
            TypeError: by ``remote(...)``, if ``replay_buffer`` is not such a client.

        Examples:
            >>> actor = MultiTurnCollector.as_remote({"num_gpus": 1}).remote(  # doctest: +SKIP
            ...     Game, make_engine, episodes_per_batch=8, replay_buffer=buffer.client()
            ... )
            >>> ray.get(actor.start.remote())  # doctest: +SKIP
        """
        import_extra("ray", "ray")
        actor_class = as_remote(cls, dict(remote_config or {"num_cpus": 1}))
        make = actor_class.remote

        def remote(*args: Any, **kwargs: Any) -> Any:
            check_sent_buffer(kwargs.get("replay_buffer"))
            return make(*args, **kwargs)

        actor_class.remote = remote
        return actor_class

    def increment_version(self) -> None:
        """Count a weight update that was not made by :meth:`update_policy_weights_`.

        TorchRL's weight senders and updaters call this after sending weights, if the collector is
        registered with them. Tokens sampled from then on have the new version. Within
        :meth:`update_policy_weights_` it does nothing, since that update is counted already.
        """
        if self._updating:
            return
        count_update(self.engine)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed torch's global generator and, if data is shuffled or absent, restart the items.

        A restart cancels running episodes. Tokens are reproducible only if the engine draws them from
        that generator, in the same order.

        Args:
            seed: the seed.
            static_seed: return ``seed`` rather than ``seed + 1``.

        Returns:
            A seed for the next collector.

        Raises:
            RuntimeError: if the items restart while the collector runs in the background, or after
                shutdown.
        """
        if self._data is None or self.options.shuffle:
            items = self._make_items(seed)
            self._stop_for("set_seed")
            self._items.close()
            self._items = items
            self._run = self._new_run()
        torch.manual_seed(seed)
        return seed if static_seed else seed + 1

    def state_dict(self) -> OrderedDict:
        """Counters, the weight version and the position in the data, without the weights.

        A collector that loads this state plays items again whose episodes were not delivered yet. It
        uses new ids for groups and episodes.
        """
        with self._delivering:
            state = OrderedDict(
                counts=self._counts.stats(),
                numbers=self._numbers.next,
                items=self._items.state_dict(),
                policy_version=self.policy_version,
            )
            if self.rate_limit is not None:
                state["rate_limit"] = self.rate_limit.state_dict()
            return state

    def check_state_dict(self, state_dict: OrderedDict) -> None:
        """Check a state before it is loaded; nothing is changed.

        Raises:
            ValueError: if the data differs in kind or length.
            RuntimeError: while the collector runs in the background.
        """
        self._check_not_running("load_state_dict")
        self._items.check_same_data(state_dict["items"])

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Continue from :meth:`state_dict` of a collector over the same data.

        Running episodes are cancelled. Weight versions continue from the saved one.

        Raises:
            ValueError: if the data differs in kind or length, or an iterator is past the position.
            RuntimeError: while the collector runs in the background, or after shutdown.
        """
        self._stop_for("load_state_dict")
        self._items.load_state_dict(state_dict["items"])
        self._numbers.next = state_dict["numbers"]
        self._counts.load(state_dict["counts"])
        if self.rate_limit is not None and "rate_limit" in state_dict:
            self.rate_limit.load_state_dict(state_dict["rate_limit"])
        self._continue_from(state_dict["policy_version"])
        self._run = self._new_run()

    def _continue_from(self, version: int) -> None:
        """Count weight versions from a saved one."""
        updates = version - self.engine.version
        self._player.engine = VersionOffset(self.engine, updates) if updates > 0 else self.engine

    def _stop_for(self, method: str) -> None:
        """Cancel the running episodes for a method that restarts the run."""
        self._check_not_running(method)
        self._in_loop(self._run.stop())

    def _check_not_running(self, method: str) -> None:
        """Refuse a method that restarts the run while it collects in the background."""
        if self.is_running:
            raise RuntimeError(
                f"{method} must not be called while the collector runs in the background: call it "
                "before start()."
            )

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Cancel running episodes and end the collector's threads and processes.

        Repeated calls do nothing.

        Args:
            timeout: seconds to wait in all. ``None`` waits for episodes as long as they take, and ten
                seconds for environments to close.
            close_env: ignored: environments are closed with their episodes.
            raise_on_error: raise if the timeout is exceeded; if false, log a warning.

        Raises:
            TimeoutError: if something still runs after ``timeout``; it is left in daemon threads.
        """
        begin = time.monotonic()

        def left() -> float | None:
            return None if timeout is None else max(0.0, timeout + begin - time.monotonic())

        ended = self._thread.close(timeout)
        background = self._background
        if background is not None and background is not threading.current_thread():
            background.join(left())
            ended = ended and not background.is_alive()
        for scheme in self._receivers.values():
            scheme.shutdown()
        self._items.close()
        self._player.close(left())
        if self._owns_engine:
            self.engine.close()
        self._counts.reject_running(CANCELLED)
        if ended:
            return
        message = f"the collector did not end within timeout={timeout} seconds."
        if raise_on_error:
            raise TimeoutError(message)
        _logger.warning(message)

    def __enter__(self) -> MultiTurnCollector:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            self.async_shutdown()  # Raises what went wrong in the background.
        else:
            self.shutdown()

    def __repr__(self) -> str:
        # Ray asks also for that of a collector whose making failed, to report the error.
        shown = ("episodes_per_batch", "group_size", "limits")
        known = [f"{name}={vars(self)[name]}" for name in shown if name in vars(self)]
        return f"{type(self).__name__}({', '.join(known)})"


class _TooOldError(Exception):
    """A batch became too old before its delivery."""


def _mean_reward(episodes: Sequence[Episode]) -> float:
    """Mean reward of the valid episodes; NaN without any."""
    rewards = [episode.reward for episode in episodes if episode.valid is not False]
    return sum(rewards) / len(rewards) if rewards else math.nan


_POLICY = "policy"
"""TorchRL's name of the model."""

_ALL = 2**62
"""More episodes than any data has."""

_ATTEMPTS = 10
"""Default of ``total_attempts``, in groups of one batch."""
