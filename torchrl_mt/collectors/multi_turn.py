"""A TorchRL collector of multi-turn episodes, played concurrently.

Every episode stands alone: a slow turn delays only its own, and one that fails is rejected, counted
and replaced while the others go on. ``accepted + rejected + running == started`` at any moment.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer

from torchrl_mt.collectors.chat import ChatTokens
from torchrl_mt.collectors.episode import Episode, episodes_to_tensordict
from torchrl_mt.collectors.limits import Limits
from torchrl_mt.collectors.loop_thread import LoopThread
from torchrl_mt.collectors.rollout import play_episode
from torchrl_mt.engines import Engine
from torchrl_mt.envs import TextEnv

__all__ = ["MultiTurnCollector"]

_logger = logging.getLogger("torchrl_mt")

_CANCELLED = "cancelled"
_INCOMPLETE_GROUP = "incomplete_group"


class MultiTurnCollector(BaseCollector):
    """Collect whole episodes of a language-model agent in a text environment.

    Iterating yields batches of ``episodes_per_batch`` whole episodes in TED, flat ``[ΣT]``, a step a
    turn; with a ``replay_buffer`` the batch is written there and ``None`` is yielded, as TorchRL's
    collectors do. Nothing runs between two batches, so the policy may be trained there.

    An episode that raises is rejected with the rest of its group, counted by cause in :meth:`stats`,
    logged once per cause, and another group takes its place: a batch is always complete.

    Args:
        env: what answers the model: a :class:`~torchrl_mt.envs.TextEnv` (copied for every episode), a
            subclass, or a callable that makes one.
        policy: the engine that samples the responses. It is not closed by the collector.
        data: what episodes are reset with, an item a group; gone through again and again, unless it is
            an iterator: collection then ends with it. Without data, every group is given ``{"seed": k}``
            with a new ``k``.
        episodes_per_batch: how many episodes a batch has.
        group_size: how many episodes share one item.
        max_concurrency: how many episodes run at once; all of a batch if ``None``.
        limits: what an episode may use.
        replay_buffer: where batches are written, if anywhere.
        total_episodes: end after this many accepted episodes; never if -1.
        max_consecutive_failures: raise the last cause once this many episodes in a row were rejected;
            ``None`` means a whole batch of them.
        postproc: applied to every batch before it is written or yielded.
        tokenizer: renders messages; the policy's own (``policy.tokenizer``) if ``None``.

    Raises:
        TypeError: if ``env`` or ``policy`` is none of the above.
        ValueError: if ``data`` is empty, a size is below 1, ``episodes_per_batch`` or ``total_episodes``
            is not whole groups, or the tokenizer has no chat template or no end-of-turn token.

    Examples:
        >>> collector = MultiTurnCollector(  # doctest: +SKIP
        ...     GuessNumber(16, turns=5), engine, episodes_per_batch=128, limits=Limits(max_turns=5)
        ... )
        >>> for batch in collector:  # doctest: +SKIP
        ...     print(batch["next", "reward"].mean())
    """

    def __init__(
        self,
        env: TextEnv | type[TextEnv] | Callable[[], TextEnv],
        policy: Engine,
        data: Iterable[Any] | None = None,
        *,
        episodes_per_batch: int,
        group_size: int = 1,
        max_concurrency: int | None = None,
        limits: Limits | None = None,
        replay_buffer: ReplayBuffer | None = None,
        total_episodes: int = -1,
        max_consecutive_failures: int | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        _require_sizes(episodes_per_batch, group_size, max_concurrency, total_episodes)
        if not isinstance(policy, Engine):
            raise TypeError(
                "policy must be an engine (generate, update_weights, version, close), got "
                f"{type(policy).__name__}: wrap a model as TransformersEngine(model, tokenizer)."
            )
        self._make_env = _env_factory(env)
        self.engine = policy
        self._chat = ChatTokens(
            getattr(policy, "tokenizer", None) if tokenizer is None else tokenizer
        )
        self._data = data
        self._items = _cycle(data)
        self.episodes_per_batch = episodes_per_batch
        self.group_size = group_size
        self.max_concurrency = max_concurrency or episodes_per_batch
        self.limits = limits or Limits()
        self.replay_buffer = replay_buffer
        self.total_episodes = total_episodes
        self.max_consecutive_failures = max_consecutive_failures or episodes_per_batch
        self.postproc = postproc
        self._slots = asyncio.Semaphore(self.max_concurrency)
        self._counts: Counter[str] = Counter()
        self._num_groups = 0
        self._consecutive_failures = 0
        self._thread = LoopThread("torchrl_mt-rollout", max_workers=self.max_concurrency)

    # Collecting

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_episodes`` are accepted or the data is used up.

        Raises:
            RuntimeError: if too many episodes in a row were rejected; its cause is the last failure.
        """
        while (size := self._next_batch_size()) > 0:
            if self._thread.closed:
                raise RuntimeError("the collector was shut down: make a new one.")
            episodes = self._thread.run(self._collect(size))
            if not episodes:
                return
            batch = episodes_to_tensordict(episodes)
            if self.postproc is not None:
                batch = self.postproc(batch)
            if self.replay_buffer is None:
                yield batch
            else:
                self.replay_buffer.extend(batch)
                yield None

    def _next_batch_size(self) -> int:
        """How many episodes the next batch has; 0 when the run is over."""
        if self.total_episodes < 0:
            return self.episodes_per_batch
        return min(self.episodes_per_batch, self.total_episodes - self._counts["accepted"])

    async def _collect(self, size: int) -> list[Episode]:
        """Play groups until ``size`` episodes are accepted."""
        finished: asyncio.Queue[asyncio.Task[list[Episode]]] = asyncio.Queue()
        running: set[asyncio.Task[list[Episode]]] = set()
        accepted: list[Episode] = []
        items_left = True
        try:
            while len(accepted) < size:
                while items_left and len(accepted) + len(running) * self.group_size < size:
                    try:
                        item = next(self._items)
                    except StopIteration:
                        items_left = False
                        break
                    task = asyncio.create_task(self._play_group(item))
                    running.add(task)
                    task.add_done_callback(finished.put_nowait)
                if not running:
                    break
                task = await finished.get()
                running.discard(task)
                accepted += task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return sorted(accepted, key=lambda episode: episode.traj_id)

    async def _play_group(self, item: Any) -> list[Episode]:
        """Play the episodes that share an item; none if one of them is rejected."""
        group = self._num_groups
        self._num_groups += 1
        members = [
            Episode(item, group=group, traj_id=group * self.group_size + rank)
            for rank in range(self.group_size)
        ]
        tasks = [asyncio.create_task(self._play(member)) for member in members]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            await self._reject_siblings(tasks, _CANCELLED)
            raise
        except Exception as error:
            await self._reject_siblings(tasks, _INCOMPLETE_GROUP)
            self._give_up_if_only_failing(error)
            return []
        self._count_accepted(members)
        return members

    async def _play(self, episode: Episode) -> None:
        """Play one episode when there is room for it."""
        async with self._slots:
            self._counts["started"] += 1
            try:
                await play_episode(self._make_env(), self.engine, self._chat, self.limits, episode)
            except asyncio.CancelledError as reason:
                self._count_rejected(*reason.args or (_CANCELLED,))
                raise
            except (Exception, SystemExit) as error:
                self._count_rejected(type(error).__name__, error)
                if isinstance(error, SystemExit):
                    # It would end the rollout thread and leave the caller waiting.
                    raise RuntimeError("the environment called sys.exit().") from error
                raise

    async def _reject_siblings(self, tasks: list[asyncio.Task[None]], cause: str) -> None:
        """Reject the members of a group that cannot become whole, finished or not."""
        for task in tasks:
            if not task.done():
                task.cancel(cause)
            elif not task.cancelled() and task.exception() is None:
                self._count_rejected(cause)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _give_up_if_only_failing(self, error: Exception) -> None:
        """Raise once too many episodes in a row were rejected."""
        if self._consecutive_failures >= self.max_consecutive_failures:
            raise RuntimeError(
                f"{self._consecutive_failures} episodes in a row were rejected, the last for "
                f"{type(error).__name__}: {error}"
            ) from error

    def _count_accepted(self, episodes: list[Episode]) -> None:
        """Enter whole episodes into the statistics."""
        self._consecutive_failures = 0
        self._counts["accepted"] += len(episodes)
        for episode in episodes:
            self._counts["turns"] += len(episode.turns)
            self._counts["tokens"] += episode.num_tokens
            self._counts["forks"] += episode.num_forks

    def _count_rejected(self, cause: str, error: BaseException | None = None) -> None:
        """Enter a rejected episode into the statistics; the first of its cause is logged."""
        self._counts["rejected"] += 1
        self._counts[f"rejected/{cause}"] += 1
        if error is None:
            return
        self._consecutive_failures += 1
        if self._counts[f"rejected/{cause}"] == 1:
            _logger.warning(
                "An episode was rejected for %s; more of this cause are only counted.",
                cause,
                exc_info=error,
            )

    # TorchRL's collector protocol

    def __len__(self) -> int:
        if self.total_episodes < 0:
            # A TypeError is what list() and tqdm take for "length unknown".
            raise TypeError("a collector without total_episodes has no length.")
        return -(-self.total_episodes // self.episodes_per_batch)

    def stats(self) -> dict[str, int | float | bool]:
        """Counters since the collector was made.

        Returns:
            ``started``, ``accepted``, ``rejected`` and ``running`` episodes, ``rejected/<cause>``, and
            of the accepted ones ``turns``, ``tokens`` (sampled) and ``forks``.
        """
        names = ("started", "accepted", "rejected", "turns", "tokens", "forks")
        stats: dict[str, int | float | bool] = {name: self._counts[name] for name in names}
        stats |= {name: count for name, count in self._counts.items() if "/" in name}
        stats["running"] = (
            self._counts["started"] - self._counts["accepted"] - self._counts["rejected"]
        )
        stats["policy_version"] = self.policy_version
        return stats

    @property
    def policy_version(self) -> int:
        """The engine's weight version."""
        return self.engine.version

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Hand new weights to the engine.

        Args:
            policy_or_weights: what the engine's ``update_weights`` takes: a model or a state dict.
            **kwargs: ``policy`` or ``weights``, TorchRL's other names for the same.

        Raises:
            TypeError: if another keyword is given.
        """
        source = kwargs.pop("policy", kwargs.pop("weights", policy_or_weights))
        if kwargs:
            raise TypeError(f"update_policy_weights_ takes no {sorted(kwargs)}.")
        self.engine.update_weights(source)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the sampling of tokens and, without data, of the episodes.

        Args:
            seed: the seed.
            static_seed: return the same seed rather than the next.

        Returns:
            A seed for the next collector.
        """
        torch.manual_seed(seed)
        if self._data is None:
            self._items = _seeds(seed)
        return seed if static_seed else seed + 1

    def state_dict(self) -> OrderedDict:
        """Counters and the position in the data; the engine's weights are the model's."""
        return OrderedDict(counts=dict(self._counts), num_groups=self._num_groups)

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Go on where another collector over the same data stood."""
        self._counts = Counter(state_dict["counts"])
        self._num_groups = state_dict["num_groups"]
        self._items = itertools.islice(_cycle(self._data), self._num_groups, None)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Cancel what runs and end the rollout thread. Repeated calls do nothing."""
        self._thread.close()

    def __enter__(self) -> MultiTurnCollector:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return (
            f"MultiTurnCollector(episodes_per_batch={self.episodes_per_batch}, "
            f"group_size={self.group_size}, limits={self.limits})"
        )


def _require_sizes(
    episodes_per_batch: int, group_size: int, max_concurrency: int | None, total_episodes: int
) -> None:
    """Refuse sizes that do not fit together."""
    for name, value in {
        "episodes_per_batch": episodes_per_batch,
        "group_size": group_size,
        "max_concurrency": 1 if max_concurrency is None else max_concurrency,
    }.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    for name, value in {
        "episodes_per_batch": episodes_per_batch,
        "total_episodes": max(total_episodes, 0),
    }.items():
        if value % group_size:
            raise ValueError(f"{name} must be a multiple of group_size={group_size}, got {value}.")


def _env_factory(env: TextEnv | type[TextEnv] | Callable[[], TextEnv]) -> Callable[[], TextEnv]:
    """A callable that makes a fresh environment."""
    if isinstance(env, TextEnv):
        return lambda: copy.deepcopy(env)
    if callable(env):
        return env
    raise TypeError(
        "env must be a TextEnv, a subclass of it, or a callable that makes one, got "
        f"{type(env).__name__}."
    )


def _cycle(data: Iterable[Any] | None) -> Iterator[Any]:
    """The items of ``data``, endlessly unless it is an iterator; refuses empty data at once."""
    if data is None:
        return _seeds(0)
    items = iter(data)
    try:
        first = next(items)
    except StopIteration:
        raise ValueError("data must hold at least one item, got none.") from None
    if items is data:
        return itertools.chain([first], items)
    return itertools.chain([first], items, itertools.chain.from_iterable(itertools.repeat(data)))


def _seeds(start: int) -> Iterator[dict[str, int]]:
    """What episodes are reset with when there is no data."""
    return ({"seed": seed} for seed in itertools.count(start * 1_000_003))
