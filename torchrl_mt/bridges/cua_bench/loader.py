"""A loader of prompts for a training loop of your own: it asks for prompts and gives back answers.

It is a :class:`~torchrl_mt.collectors.MultiTurnCollector` whose engine asks the user. Episodes,
failures, records and storage are the collector's.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from torchrl_mt.bridges.cua_bench.batches import (
    AnswerReader,
    add_rows,
    add_shown_images,
    prompt_batch,
)
from torchrl_mt.bridges.cua_bench.env_class import EnvClassWorkflow
from torchrl_mt.bridges.cua_bench.prompts import AskingEngine
from torchrl_mt.bridges.cua_bench.slots import LOST_AFTER, LoaderCollector, Slots
from torchrl_mt.bridges.cua_bench.waiting import Callers, Wait
from torchrl_mt.checks import (
    check_class,
    check_finite,
    check_positive_integer,
    check_unit_interval,
)
from torchrl_mt.collectors import CollectorOptions, Episode, Limits, context
from torchrl_mt.data import EpisodeStorage, EpisodeWriter
from torchrl_mt.envs import TextEnv
from torchrl_mt.threads import when_forgotten
from torchrl_mt.transforms import DiscountedReturn, ReturnBalance
from torchrl_mt.vision import VisionProcessor

__all__ = ["MultiTurnDataLoader"]

_CLOSE_SECONDS = 5.0
"""Seconds for episodes and environments to end."""
_LOOK = 0.1
"""Seconds between looks for what ends the waiting, such as a run that failed."""
_AHEAD = 2**40
"""Batches that the collector may be ahead of updates: any number."""
_OWN = ("episodes_per_batch", "max_concurrency", "replay_buffer", "max_staleness")
"""Arguments of the collector that the loader sets."""


class MultiTurnDataLoader:
    """Iterate over prompts of environments that wait for a response, and answer them.

    Each of ``num_envs`` slots plays one episode after the other. A batch is a dict with the prompts of
    the ``batch_size`` slots that waited longest, and :meth:`async_step` answers them. Finished episodes
    are stored whole, with returns, for :meth:`sample_from_buffer`. :doc:`/bridges` has a whole loop, the
    entries of a batch, and what happens to slow and failing environments.

    Args:
        env: the environment, in any form that :class:`~torchrl_mt.collectors.MultiTurnCollector` takes.
        tokenizer: renders the prompts.
        task_configs: the items, one per episode; by default ``{"seed": k}``, with a new ``k`` for each.
        processor: the Hugging Face processor of a model that takes images; ``None`` for text alone.
        batch_size: prompts per batch, at most ``num_envs``.
        num_envs: number of slots, thus of episodes that run at once. ``None`` means the number of
            ``env_configs``, or twice ``batch_size``.
        replay_capacity: maximum number of stored steps. The oldest whole episodes leave first.
        replay_reward_discount: discount of the returns, per step, in [0, 1].
        max_prompt_length: maximum tokens of a prompt. A longer dialogue loses its oldest turns.
        max_response_length: maximum tokens of a response.
        only_keep_outcome_in_replay: store the last step of each episode alone, with its raw reward.
        balance_thres: returns below it count as low in :meth:`get_balance_stats`.
        env_class: instead of ``env``, the class of environments with a config each.
        env_configs: the config of each slot.
        is_multi_modal: cua-bench's switch for images; false ignores the processor.
        **options: further arguments of :class:`~torchrl_mt.collectors.MultiTurnCollector`, such as
            ``limits``, ``max_retries`` or ``options=CollectorOptions(cycle=False)``.

    Raises:
        ValueError: if a number is out of range, or arguments exclude or do not fit each other.
        TypeError: if ``env`` or an option is of a wrong type, or ``processor`` of no supported family.

    Examples:
        >>> from torchrl_mt.envs import GuessNumber
        >>> from torchrl_mt.testing import tiny_chat_tokenizer
        >>> tokenizer = tiny_chat_tokenizer("guess to 1 2 3 4 higher lower correct")
        >>> with MultiTurnDataLoader(GuessNumber(4, turns=2), tokenizer, batch_size=2) as loader:
        ...     batch = next(iter(loader))
        >>> batch["input_ids"].shape, batch["meta_info"][0]["turn"]
        (torch.Size([2, 1024]), 0)
    """

    def __init__(
        self,
        env: Any = None,
        tokenizer: Any = None,
        *,
        task_configs: Iterable[Any] | None = None,
        processor: Any = None,
        batch_size: int = 8,
        num_envs: int | None = None,
        replay_capacity: int = 10_000,
        replay_reward_discount: float = 0.9,
        max_prompt_length: int = 1024,
        max_response_length: int = 1024,
        only_keep_outcome_in_replay: bool = False,
        balance_thres: float = 0.5,
        env_class: Callable[..., Any] | None = None,
        env_configs: Sequence[Any] | None = None,
        is_multi_modal: bool | None = None,
        **options: Any,
    ) -> None:
        _check_tokenizer(tokenizer)
        if is_multi_modal and processor is None:
            raise ValueError(
                "processor must be that of the model if is_multi_modal is true, got None: give "
                "AutoProcessor.from_pretrained(...) of transformers."
            )
        sees = processor is not None and is_multi_modal is not False
        self._vision = vision = VisionProcessor.of(processor) if sees else None
        if vision is not None:
            vision.check_tokenizer(tokenizer)
        self.batch_size = check_positive_integer("batch_size", batch_size)
        self.num_envs = _number_of_envs(env, env_class, env_configs, num_envs, self.batch_size)
        check_positive_integer("replay_capacity", replay_capacity)
        check_positive_integer("max_prompt_length", max_prompt_length)
        check_positive_integer("max_response_length", max_response_length)
        check_unit_interval("replay_reward_discount", replay_reward_discount)
        check_finite("balance_thres", balance_thres)
        _check_options(options)
        self.max_prompt_length = max_prompt_length
        self.max_response_length = max_response_length
        self._pad = _pad_token(tokenizer)
        barred = [] if vision is None else vision.barred
        vocabulary = _vocabulary_size(tokenizer)
        self._read = AnswerReader(self.num_envs, vocabulary, max_response_length, barred)
        self._tokenizer = tokenizer
        self._engine = AskingEngine(tokenizer, max_prompt_length)
        self._changed = self._engine.changed
        self._slots = Slots(self.num_envs)
        self._workflow: EnvClassWorkflow | None = None
        if env_class is not None:
            env, task_configs = self._env_of_class(env_class, env_configs, task_configs)
        self.storage = EpisodeStorage(replay_capacity)
        """The :class:`~torchrl_mt.data.EpisodeStorage` of the finished episodes."""
        returns = DiscountedReturn(replay_reward_discount, outcome_only=only_keep_outcome_in_replay)
        self.replay = ReplayBuffer(storage=self.storage, writer=EpisodeWriter(transform=returns))
        """The ``ReplayBuffer`` on ``storage``."""
        self._balance = ReturnBalance(balance_thres)
        self._outcome = 0.0
        self._storing = threading.RLock()
        """Held while the balance is updated or the storage emptied."""
        self._callers = Callers()
        self._warned: set[str] = set()
        """The kinds of warnings that were given."""
        settings = options.pop("options", None) or CollectorOptions()
        settings = replace(
            settings,
            chat=replace(settings.chat, max_prompt_tokens=max_prompt_length),
            staleness="admission",
            tokenizer=tokenizer,
        )
        postproc = options.pop("postproc", None)
        # The collector's threads must not keep a loader alive that was dropped without close().
        counting = weakref.WeakMethod(self._count_delivery)
        self._collector = collector = LoaderCollector(
            env,
            self._engine,
            task_configs,
            slots=self._slots,
            longest_episode=None if only_keep_outcome_in_replay else replay_capacity,
            on_delivery=lambda episodes: (count := counting()) and count(episodes),
            episodes_per_batch=options.get("group_size", 1),
            max_concurrency=self.num_envs,
            replay_buffer=self.replay,
            max_staleness=_AHEAD,
            processor=vision,
            options=settings,
            **options,
        )

        def prepared(batch: TensorDictBase) -> TensorDictBase:
            batch = collector.add_slots(batch)
            if vision is not None:
                add_shown_images(batch)
            return batch if postproc is None else postproc(batch)

        self._collector.set_postproc(prepared)
        self._collector.start()
        self._closer = when_forgotten(self, _close, self._engine, collector, self._workflow)

    def _env_of_class(
        self, env_class: Any, configs: Any, task_configs: Any
    ) -> tuple[Any, Iterable[Any] | None]:
        """The environment that plays ``env_class``, and the items of its episodes."""
        if isinstance(env_class, type) and issubclass(env_class, TextEnv):
            slots = self._slots.of_episode
            for index, config in enumerate(configs):
                try:
                    inspect.signature(env_class).bind(**config)
                except TypeError as error:
                    raise TypeError(
                        f"env_configs[{index}] must be the keyword arguments of {env_class.__name__}"
                        f"{inspect.signature(env_class)}, got {config!r}: {error}."
                    ) from None

            def make() -> TextEnv:
                return env_class(**configs[slots[context.get().traj_id]])

            return make, task_configs
        if task_configs is not None:
            items = list(task_configs)
            if not all(isinstance(config, Mapping) for config in configs):
                raise TypeError(
                    "env_configs must be dicts, into which task_configs are put, got "
                    f"{[type(config).__name__ for config in configs]}."
                )
            configs = [{"task_configs": items, **config} for config in configs]
        self._workflow = EnvClassWorkflow(
            env_class, configs, self._tokenizer, self.max_prompt_length, self._vision
        )
        return self._workflow, None

    # Prompts and answers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Wait for ``batch_size`` prompts and give them out; fewer at the end of the data.

        Returns:
            A dict of the prompts as ``"input_ids"``, ``"attention_mask"`` and ``"position_ids"``, int64
            ``[B, max_prompt_length]``, padded on the left; ``"worker_id"`` and ``"meta_info"``; and the
            images, with a ``processor``.

        Raises:
            StopIteration: if the data has ended and all episodes are over.
            RuntimeError: if no batch can come: the run has failed, the loader is closed, or so many
                environments fail again and again that fewer than ``batch_size`` are left (its cause is
                the last failure); or if so many prompts were given out and not answered that fewer than
                ``batch_size`` others can come, and no other thread is known that may answer. If another
                one may, or a time limit ends the turns, a warning is logged after 10 s instead.
        """
        wait = Wait(self._warned)
        with self._changed:
            self._callers.takers.add(threading.get_ident())
            while True:
                self._require_open()
                if prompts := self._engine.take(self.batch_size) or self._take_last():
                    break
                if not self._collector.is_running:
                    self._raise_failure()
                    raise StopIteration
                if not self._collector.is_ending:
                    self._require_enough()
                self._require_answers(wait)
                self._warn_of_beginnings(wait)
                self._changed.wait(_LOOK)
        return prompt_batch(prompts, self.max_prompt_length, self._pad, self._vision)

    def async_step(self, batch: Mapping[str, Any]) -> None:
        """Answer prompts: all of a batch or some, in any order, from any thread.

        An answer to a prompt that does not wait any more, such as one of an episode that was rejected
        meanwhile, is dropped and counted (``answers/dropped`` in :meth:`stats`).

        Args:
            batch: a dict of ``"prompts"`` ``[B, P]``, the prompts as they were given out;
                ``"responses"`` ``[B, R]``, padded on the right; ``"attention_mask"`` ``[B, P + R]``,
                whose right part tells the tokens of the responses; ``"worker_id"`` and
                ``"meta_info"``, as they were given out; and perhaps ``"log_probs"`` ``[B, R]``, the
                log-probabilities of the responses' tokens. Without them, NaN is stored, and an
                ``ExperienceMaker`` needs ``old_log_probs="actor"``.

        Raises:
            ValueError: if an entry is missing, or of a wrong shape or value. No prompt is answered then.
            TypeError: if an entry is of a wrong type. No prompt is answered then.
            RuntimeError: if the loader is closed.
        """
        answers = self._read(batch)
        with self._changed:
            self._require_open()
            self._engine.enter(answers)
            self._callers.answerers.add(threading.get_ident())

    def increment_version(self) -> None:
        """Count an update of your weights.

        Tokens are stored with the version at which their prompt was given out.
        """
        self._engine.update_weights(None)

    # Finished episodes

    def sample_from_buffer(self, batch_size: int | None = None) -> TensorDictBase:
        """Sample different stored steps at random; wait until there are enough.

        Args:
            batch_size: number of steps; the loader's ``batch_size`` if ``None``.

        Returns:
            Steps ``[batch_size]`` with the keys of the documentation's *Data format*, ``("next",
            "return")`` and ``"worker_id"``. For loops that train on padded rows, it also has prompt
            and response as ``"input_ids"``, ``"attention_mask"`` and ``"position_ids"``
            ``[batch_size, P + R]``, ``"responses"`` ``[batch_size, R]``, the return as ``"reward"``
            ``[batch_size]``, and ``"meta_info"``. With a processor, also ``"multi_modal_data"`` and
            ``"multi_modal_inputs"``, and positions ``[batch_size, 3, P + R]`` for models with M-RoPE.

        Raises:
            ValueError: if ``batch_size`` is not positive, or above the storage's capacity.
            RuntimeError: if there never will be so many steps: the run has ended or failed, the loader
                is closed, or the prompts of all environments wait for you, given out or not, and no
                other thread is known that may answer. If another one may, a warning is logged after
                10 s instead.
        """
        size = check_positive_integer(
            "batch_size", self.batch_size if batch_size is None else batch_size
        )
        if size > self.storage.max_size:
            raise ValueError(
                f"batch_size must be at most replay_capacity={self.storage.max_size}, got {size}: "
                "sample fewer steps, or store more."
            )
        wait = Wait(self._warned)
        while True:
            with self.storage.lock:
                stored = len(self.storage)
                if stored >= size:
                    steps = self.storage.get(torch.randperm(stored, device="cpu")[:size])
                    break
            with self._changed:
                self._require_open()
                self._require_more(size, wait)
                self._warn_of_beginnings(wait)
                self._changed.wait(_LOOK)
        lengths = self.max_prompt_length, self.max_response_length
        add_rows(steps, *lengths, self._pad, self._vision)
        return steps

    def running_outcome_reward(self) -> float:
        """Running mean of the episodes' last rewards: ``R <- 0.99 R + 0.01 r``, from 0 on."""
        return self._outcome

    def calculate_outcome_reward(self) -> float:
        """Mean of the last rewards of the stored episodes; 0 without any."""
        with self.storage.lock:
            if len(self.storage) == 0:
                return 0.0
            last = self.storage.lengths.cumsum(0) - 1
            return float(self.storage.get(last)["next", "reward"].mean())

    def get_balance_stats(self) -> tuple[int, int]:
        """Numbers of stored steps whose return is below ``balance_thres``, and at or above it."""
        with self._storing:
            return self._balance.below, self._balance.at_or_above

    def print_stats_in_replay_buffer(self) -> None:
        """Print the number of stored steps and episodes, and a histogram of the episodes' lengths."""
        lengths = self.storage.lengths.tolist()
        counts = ", ".join(f"{k}-{number}" for k, number in sorted(Counter(lengths).items()))
        print(
            f"Replay buffer size: {sum(lengths)}. Number of uids: {len(lengths)}. "
            f"Histogram of item counts per uid in replay buffer (x-y): {counts}"
        )

    def print_examples(self, n: int = 2) -> None:
        """Print the prompts and responses of ``n`` stored steps, chosen at random."""
        with self.storage.lock:
            chosen = torch.randperm(len(self.storage), device="cpu")[:n]
            steps = [self.storage.get(int(index)) for index in chosen]
        for step in steps:
            ids = [*step["tokens", "prompt"].tolist(), *step["tokens", "response"].tolist()]
            print(self._tokenizer.decode(ids))

    def clear_replay_buffer(self) -> None:
        """Remove all stored episodes. Running episodes are stored when they are over."""
        with self._storing:
            self.replay.empty()
            self._balance.update(self.storage)

    def stats(self) -> dict[str, int | float | bool]:
        """Counters of the episodes, see :meth:`MultiTurnCollector.stats`, and of the prompts.

        Returns:
            A dict with the collector's entries, ``waiting/longest`` among them, and

            - ``prompts/waiting``: slots whose prompt was not given out yet;
            - ``prompts/unanswered``: prompts that were given out and not answered yet;
            - ``answers/dropped``: answers to prompts that did not wait any more.
        """
        stats = self._collector.stats()
        with self._changed:
            stats["prompts/waiting"] = len(self._engine.slots_waiting)
            stats["prompts/unanswered"] = self._engine.num_given
            stats["answers/dropped"] = self._engine.num_dropped
        return stats

    def close(self) -> None:
        """End the episodes, threads and environments; who waits for a batch gets an error."""
        self._closer.detach()
        _close(self._engine, self._collector, self._workflow)

    def __enter__(self) -> MultiTurnDataLoader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"MultiTurnDataLoader(batch_size={self.batch_size}, num_envs={self.num_envs}, "
            f"steps={len(self.storage)})"
        )

    # The collector's side

    def _count_delivery(self, episodes: Sequence[Episode]) -> None:
        """Count episodes that were stored; wake those who wait for steps."""
        with self._storing:
            self._balance.update(self.storage)
            for episode in episodes:
                self._outcome = 0.99 * self._outcome + 0.01 * episode.turns[-1].reward
        with self._changed:
            self._changed.notify_all()

    # Waiting; hold ``_changed``

    def _take_last(self) -> list[Any]:
        """Give out fewer prompts than a batch at the end of the data, when no other can come."""
        waiting = self._engine.slots_waiting
        if not waiting or self._others_busy(waiting) or not self._collector.is_ending:
            return []
        return self._engine.take(len(waiting))

    def _others_busy(self, slots: set[int]) -> set[int]:
        """Other slots that play an episode; not those whose environment keeps failing."""
        return self._slots.busy - {slot.index for slot in self._slots.lost} - slots

    def _require_open(self) -> None:
        if self._engine.closed:
            raise RuntimeError("the loader is closed: make a new one.")

    def _raise_failure(self) -> None:
        """Raise if the run has failed, or every episode."""
        error = self._collector.error
        if error is not None:
            raise RuntimeError(
                f"the episodes have ended, for {type(error).__name__}: {error}"
            ) from error
        stats, error = self._collector.stats(), self._slots.last_error
        if error is not None and not stats["accepted"]:
            raise RuntimeError(
                f"all {stats['rejected']} episodes were rejected, the last for "
                f"{type(error).__name__}: {error}"
            ) from error

    def _require_enough(self) -> None:
        """Raise if too few environments are left for a batch."""
        lost = self._slots.lost
        left = self.num_envs - len(lost)
        if left < self.batch_size:
            error = lost[-1].error
            raise RuntimeError(
                f"batch_size={self.batch_size} prompts must wait for a batch, but only {left} of "
                f"{self.num_envs} environments are left: the others, {[slot.index for slot in lost]}, "
                f"failed {LOST_AFTER} times in a row or more, the last for {type(error).__name__}: "
                f"{error}. They are tried again: restart them and go on, or give a smaller batch_size."
            ) from error

    def _require_answers(self, wait: Wait) -> None:
        """Raise if no batch can come without answers, and only this thread could give them."""
        asked, given = self._engine.slots_waiting, self._engine.slots_given
        unanswered = given - asked
        lost = {slot.index for slot in self._slots.lost} - asked
        if self._collector.is_ending:
            stuck = bool(unanswered) and not self._others_busy(asked | given)
        else:
            stuck = bool(unanswered) and self.num_envs - len(lost | unanswered) < self.batch_size
        if not wait.is_stuck(stuck):
            return
        message = (
            f"all {self._engine.num_given} prompts wait for your answers, and fewer than "
            f"batch_size={self.batch_size} others can come from num_envs={self.num_envs} environments: "
            "call async_step(...) with the answers before you take the next batch."
        )
        limits = self._collector.limits
        by_time = limits.turn_timeout is not None or limits.episode_timeout is not None
        if self._callers.is_alone and not by_time:
            raise RuntimeError(message)
        wait.warn("answers", message)

    def _require_more(self, size: int, wait: Wait) -> None:
        """Raise if no further steps can come while this thread waits."""
        is_running = self._collector.is_running
        asked = self._engine.slots_waiting | self._engine.slots_given
        lost = {slot.index for slot in self._slots.lost} - asked
        if self._collector.is_ending:
            all_wait = bool(asked) and not self._others_busy(asked)
        else:
            all_wait = bool(asked) and len(asked | lost) == self.num_envs
        all_wait = all_wait and not self._collector.is_storing
        stored = len(self.storage)  # Read last: what was stored before is counted.
        if stored >= size:
            return
        if not is_running:
            self._raise_failure()
            raise RuntimeError(
                f"the data has ended: {size} steps were asked for, and {stored} are stored."
            )
        if wait.is_stuck(all_wait):
            message = (
                f"{size} steps were asked for and {stored} are stored, but all {len(asked)} "
                "environments wait for answers: take batches and answer them first."
            )
            if self._callers.is_alone:
                raise RuntimeError(message)
            wait.warn("steps", message)
        if self._engine.num_given == 0:
            self._require_enough()

    def _warn_of_beginnings(self, wait: Wait) -> None:
        """Warn if environments do not begin, such as those that wait for a server's free session."""
        if beginning := self._engine.num_beginning:
            wait.warn(
                "beginnings",
                f"only {self.num_envs - beginning} of num_envs={self.num_envs} environments have begun "
                f"their episode, and a batch needs the prompts of batch_size={self.batch_size}. If they "
                "are on a server, let it have num_envs sessions (max_sessions of serve), or give a "
                "smaller num_envs and batch_size.",
            )


def _close(
    engine: AskingEngine, collector: LoaderCollector, workflow: EnvClassWorkflow | None
) -> None:
    """End what a loader has started."""
    end = time.monotonic() + _CLOSE_SECONDS
    engine.close()
    collector.shutdown(_CLOSE_SECONDS, raise_on_error=False)
    if workflow is not None:
        workflow.close(max(end - time.monotonic(), 0.5))


def _number_of_envs(
    env: Any, env_class: Any, env_configs: Any, num_envs: int | None, batch_size: int
) -> int:
    """Number of slots, of arguments that fit together."""
    if (env is None) == (env_class is None):
        given = "neither" if env is None else "both"
        raise ValueError(f"env or env_class must be given, one of the two, got {given}.")
    if (env_class is None) != (env_configs is None):
        raise ValueError("env_class and env_configs must be given together, got one of them.")
    if env_class is not None:
        if not callable(env_class):
            raise TypeError(f"env_class must be a class, got {env_class!r}.")
        if isinstance(env_class, type) and not all(
            callable(getattr(env_class, name, None)) for name in ("reset", "step")
        ):
            raise TypeError(f"env_class must have reset and step, got {env_class.__name__}.")
        if num_envs not in (None, len(env_configs)):
            raise ValueError(
                f"num_envs must be the number of env_configs, {len(env_configs)}, got {num_envs}: "
                "leave it out."
            )
        num_envs = len(env_configs)
    elif num_envs is None:
        num_envs = 2 * batch_size
    if batch_size > check_positive_integer("num_envs", num_envs):
        raise ValueError(
            f"batch_size must be at most num_envs={num_envs}, got {batch_size}: an environment has one "
            "prompt in a batch."
        )
    return int(num_envs)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that the loader sets itself."""
    own = [name for name in _OWN if name in options]
    if own:
        raise TypeError(f"MultiTurnDataLoader sets {', '.join(own)} itself: leave it out.")
    settings, limits = (
        options.get("options") or CollectorOptions(),
        options.get("limits") or Limits(),
    )
    check_class("options", settings, CollectorOptions)
    if settings.chat.max_prompt_tokens is not None:
        raise ValueError("max_prompt_tokens is max_prompt_length of the loader: leave it out.")
    for name in ("max_response_tokens", "max_episode_tokens"):
        if getattr(limits, name, None) is not None:
            raise ValueError(
                f"limits must have no {name}, since the responses come from you: give "
                "max_response_length and max_prompt_length."
            )


def _check_tokenizer(tokenizer: Any) -> None:
    """Refuse what is no tokenizer."""
    is_one = all(hasattr(tokenizer, name) for name in ("get_vocab", "decode", "pad_token_id"))
    if not is_one or isinstance(tokenizer, type):
        raise TypeError(
            f"tokenizer must be that of the policy, got {tokenizer!r:.80}: give "
            "MultiTurnDataLoader(env, tokenizer, ...), with AutoTokenizer.from_pretrained(...) of "
            "transformers as the tokenizer."
        )


def _pad_token(tokenizer: Any) -> int:
    """The token that fills rows: the tokenizer's, or else the end of sequence, or 0."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def _vocabulary_size(tokenizer: Any) -> int:
    """Number of token ids, those without a token included."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
