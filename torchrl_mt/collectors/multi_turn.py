"""A TorchRL collector of multi-turn episodes, played concurrently.

Every episode stands alone: a slow turn delays only its own, and one that fails is rejected, counted
and replaced while the others go on. ``accepted + rejected + running == started`` at any moment.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer

from torchrl_mt.collectors.chat import ChatTokens
from torchrl_mt.collectors.episode import Episode, episodes_to_tensordict
from torchrl_mt.collectors.items import cycle, seeds
from torchrl_mt.collectors.limits import Limits
from torchrl_mt.collectors.loop_thread import LoopClosedError, LoopThread, cancel_all
from torchrl_mt.collectors.rollout import play_episode
from torchrl_mt.collectors.tally import Tally
from torchrl_mt.engines import Engine
from torchrl_mt.envs import TextEnv

__all__ = ["MultiTurnCollector"]

_logger = logging.getLogger("torchrl_mt")

_CANCELLED = "cancelled"
_INCOMPLETE_GROUP = "incomplete_group"


class _EpisodeFailed(Exception):
    """An episode was rejected for what it raised, which is this exception's cause."""


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
        _require_sizes(
            episodes_per_batch,
            group_size,
            max_concurrency,
            total_episodes,
            max_consecutive_failures,
        )
        if isinstance(policy, type):
            raise TypeError(
                "policy must be an engine (generate, update_weights, version, close), got the class "
                f"{policy.__name__}: make an instance of it."
            )
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
        self._items = cycle(data)
        self.episodes_per_batch = episodes_per_batch
        self.group_size = group_size
        self.max_concurrency = max_concurrency or episodes_per_batch
        self.limits = limits or Limits()
        self.replay_buffer = replay_buffer
        self.total_episodes = total_episodes
        self.max_consecutive_failures = max_consecutive_failures or episodes_per_batch
        self.postproc = postproc
        self._slots = asyncio.Semaphore(self.max_concurrency)
        self._tally = Tally()
        self._seed = self._num_groups = self._num_items = 0
        self._thread = LoopThread("torchrl_mt-rollout")

    # Collecting

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_episodes`` are accepted or the data is used up.

        Raises:
            RuntimeError: if too many episodes in a row were rejected; its cause is the last failure.
        """
        while (size := self._next_batch_size()) > 0:
            try:
                episodes = self._thread.run(self._collect(size))
                if not episodes:
                    return
                batch = self._deliver(episodes)
            except LoopClosedError:
                raise RuntimeError("the collector was shut down: make a new one.") from None
            finally:
                # Whatever cut the batch short, its episodes are not delivered.
                self._tally.reject_running(_CANCELLED)
            yield batch

    def _deliver(self, episodes: list[Episode]) -> TensorDictBase | None:
        """Write a batch where batches go; with it, its episodes are accepted."""
        batch: TensorDictBase = episodes_to_tensordict(episodes)
        if self.postproc is not None:
            batch = self.postproc(batch)
        if self.replay_buffer is not None:
            self.replay_buffer.extend(batch)
        self._tally.accept(episodes)
        return batch if self.replay_buffer is None else None

    def _next_batch_size(self) -> int:
        """How many episodes the next batch has; 0 when the run is over."""
        if self.total_episodes < 0:
            return self.episodes_per_batch
        return min(self.episodes_per_batch, self.total_episodes - self._tally.accepted)

    async def _collect(self, size: int) -> list[Episode]:
        """Play groups until ``size`` episodes came to their end."""
        finished: asyncio.Queue[asyncio.Task[list[Episode]]] = asyncio.Queue()
        running: set[asyncio.Task[list[Episode]]] = set()
        ended: list[Episode] = []
        items_left = True
        try:
            while len(ended) < size:
                while items_left and len(ended) + len(running) * self.group_size < size:
                    try:
                        item = next(self._items)
                    except StopIteration:
                        items_left = False
                        break
                    task = asyncio.create_task(self._play_group(item, self._num_groups))
                    self._num_groups += 1
                    self._num_items += 1
                    running.add(task)
                    task.add_done_callback(finished.put_nowait)
                if not running:
                    break
                task = await finished.get()
                running.discard(task)
                ended += task.result()
        finally:
            await cancel_all(running)
        return sorted(ended, key=lambda episode: episode.traj_id)

    async def _play_group(self, item: Any, group: int) -> list[Episode]:
        """Play the episodes that share an item; none if one of them is rejected."""
        members = [
            Episode(item, group=group, traj_id=group * self.group_size + rank)
            for rank in range(self.group_size)
        ]
        tasks = [asyncio.create_task(self._play(member)) for member in members]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            await cancel_all(tasks)
            self._tally.reject(members, _CANCELLED)
            raise
        except Exception as error:
            await cancel_all(tasks)
            self._tally.reject(members, _INCOMPLETE_GROUP)
            if isinstance(error, _EpisodeFailed):
                return []
            raise
        self._tally.consecutive_failures = 0
        return members

    async def _play(self, episode: Episode) -> None:
        """Play one episode when there is room for it."""
        async with self._slots:
            self._tally.start(episode)
            playing = asyncio.create_task(self._failure_of(episode))
            try:
                await asyncio.wait([playing])
            except asyncio.CancelledError:
                playing.cancel()
                await asyncio.wait([playing])
                raise
            if (error := playing.result()) is not None:
                self._tally.fail(episode, error)
                self._give_up_if_only_failing(error)
                raise _EpisodeFailed from error

    async def _failure_of(self, episode: Episode) -> BaseException | None:
        """Play one episode and return what it raised, if it did.

        As a task of its own, so that a cancellation that the environment brought about itself, or
        swallowed, is not taken for ours; and returned, since ``sys.exit()`` in a task ends the loop.
        """
        try:
            env = self._make_env()
            await play_episode(env, self.engine, self._chat, self.limits, episode)
        except BaseException as error:
            return error
        return None

    def _give_up_if_only_failing(self, error: BaseException) -> None:
        """Raise once too many episodes in a row were rejected."""
        if self._tally.consecutive_failures >= self.max_consecutive_failures:
            raise RuntimeError(
                f"{self._tally.consecutive_failures} episodes in a row were rejected, the last for "
                f"{type(error).__name__}: {error}"
            ) from error

    # TorchRL's collector protocol

    def __len__(self) -> int:
        if self.total_episodes < 0:
            # A TypeError is what list() and tqdm take for "length unknown".
            raise TypeError("a collector without total_episodes has no length.")
        return -(-self.total_episodes // self.episodes_per_batch)

    def stats(self) -> dict[str, int | float | bool]:
        """Counters since the collector was made.

        Returns:
            ``started``, ``accepted`` (delivered), ``rejected`` and ``running`` (not settled yet)
            episodes, ``rejected/<cause>``, and of the accepted ones ``turns``, ``tokens`` (sampled) and
            ``forks``.
        """
        stats: dict[str, int | float | bool] = {**self._tally.stats()}
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
        """Seed torch's global generator and, without data, what episodes are reset with.

        Tokens repeat as far as the engine samples them from that generator, in the same order.

        Args:
            seed: the seed.
            static_seed: return the same seed rather than the next.

        Returns:
            A seed for the next collector.
        """
        torch.manual_seed(seed)
        if self._data is None:
            self._seed, self._num_items = seed, 0
            self._items = seeds(seed)
        return seed if static_seed else seed + 1

    def state_dict(self) -> OrderedDict:
        """Counters, seed and the position in the data; the engine's weights are the model's."""
        return OrderedDict(
            counts=self._tally.stats(),
            num_groups=self._num_groups,
            num_items=self._num_items,
            seed=self._seed,
        )

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Go on where another collector over the same data stood.

        Raises:
            ValueError: if the data is an iterator of which this collector has taken more already.
        """
        missing = state_dict["num_items"] - self._num_items
        if self._data is None:
            items, missing = seeds(state_dict["seed"]), state_dict["num_items"]
        elif missing >= 0:
            items = self._items
        elif iter(self._data) is self._data:
            raise ValueError(
                "state_dict must not lie behind data that is an iterator, got "
                f"{state_dict['num_items']} items where {self._num_items} were taken: make a new "
                "collector."
            )
        else:
            items, missing = cycle(self._data), state_dict["num_items"]
        self._items = itertools.islice(items, missing, None)
        self._seed = state_dict["seed"]
        self._num_items = state_dict["num_items"]
        self._num_groups = state_dict["num_groups"]
        self._tally.load(state_dict["counts"])

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Cancel what runs and end the rollout thread. Repeated calls do nothing.

        Args:
            timeout: seconds to wait for environments to close; as long as it takes if ``None``.
            close_env: not used: environments are closed with their episodes.
            raise_on_error: raise if the time is over, rather than only log a warning.

        Raises:
            TimeoutError: if not everything has ended in time; what has not is left behind.
        """
        if self._thread.close(timeout):
            return
        message = f"the collector's environments did not end within timeout={timeout} seconds."
        if raise_on_error:
            raise TimeoutError(message)
        _logger.warning(message)

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
    episodes_per_batch: int,
    group_size: int,
    max_concurrency: int | None,
    total_episodes: int,
    max_consecutive_failures: int | None,
) -> None:
    """Refuse sizes that do not fit together."""
    for name, value in {
        "episodes_per_batch": episodes_per_batch,
        "group_size": group_size,
        "max_concurrency": 1 if max_concurrency is None else max_concurrency,
        "max_consecutive_failures": (
            1 if max_consecutive_failures is None else max_consecutive_failures
        ),
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
    if callable(env) and (not isinstance(env, type) or issubclass(env, TextEnv)):
        return env
    raise TypeError(
        "env must be a TextEnv, a subclass of it, or a callable that makes one, got "
        f"{f'the class {env.__name__}' if isinstance(env, type) else type(env).__name__}."
    )
