"""The collector's side: a player and an engine like those of one process, that work elsewhere.

Records of episodes are made whole here, so that nothing else can tell where they were played.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrl.modules.llm import LLMWrapperBase

from torchrl_mt.collectors.distributed.backend import Backend
from torchrl_mt.collectors.distributed.messages import Task
from torchrl_mt.collectors.distributed.shared_servers import SharedServers
from torchrl_mt.collectors.distributed.weights import pack_weights
from torchrl_mt.collectors.distributed.worker import Report
from torchrl_mt.collectors.distributed.workers import Workers, WorkersFailedError
from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.limits import Limits
from torchrl_mt.collectors.workflow_entries import ExpectedEntries
from torchrl_mt.engines import Completion, Engine
from torchrl_mt.engines.server_weights import ServerWeights
from torchrl_mt.engines.weights import hand_on
from torchrl_mt.processes import pickle_argument, read_failure
from torchrl_mt.vision import VisionProcessor

__all__ = ["RemoteEngine", "RemotePlayer", "pickle_setup"]

_WATCH_SECONDS = 1.0
"""Seconds between two reports of running episodes."""


def pickle_setup(env: Any, policy_factory: Any, number: int, **options: Any) -> dict[str, bytes]:
    """Pickle what a number of workers are made of, one by one.

    Raises:
        TypeError: if ``policy_factory`` makes nothing, or something cannot be pickled.
        ValueError: if all workers were to listen on the same port.
    """
    factories = policy_factory if isinstance(policy_factory, (list, tuple)) else [policy_factory]
    for each in factories:
        _check_factory(each)
    if policy_factory is factories and len(factories) != number:
        raise ValueError(
            f"policy_factory must be one function, or one for each of num_collectors={number}, got "
            f"{len(factories)}."
        )
    if (agents := options["agents"]).port:
        raise ValueError(
            "port must be 0, which takes a free one, since every worker has a server of its own, got "
            f"{agents.port}."
        )
    arguments = {"env": env, "policy_factory": policy_factory, **options}
    return {name: pickle_argument(name, each, with_main=True) for name, each in arguments.items()}


def _check_factory(factory: Any) -> None:
    """Refuse what makes no engine: each worker has one of its own."""
    is_object = isinstance(factory, (nn.Module, LLMWrapperBase)) or (
        isinstance(factory, Engine) and not isinstance(factory, type)
    )
    if is_object or not (callable(factory) or isinstance(factory, str)):
        raise TypeError(
            "policy_factory must be a function that makes an engine (or its name as "
            '"package.module.function"), since every worker has an engine of its own, got a '
            f"{type(factory).__name__}: give lambda: TransformersEngine(...), say."
        )


class RemotePlayer:
    """Plays episodes in workers, and makes their records whole here.

    Args:
        make_backend: makes the backend of the workers.
        number: number of workers.
        limits: limits of an episode; time that is over ends it also if its worker does not answer.
        max_restarts: see :class:`~torchrl_mt.collectors.distributed.workers.Workers`.
        on_update: see :class:`RemoteEngine`.
        tokenizer: decodes tokens; that of the workers if ``None``.
        processor: the processor of a model that takes images.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        number: int,
        *,
        limits: Limits,
        max_restarts: int,
        on_update: Callable[[Any], Any] | None = None,
        tokenizer: Any = None,
        processor: Any = None,
    ) -> None:
        self._shows_images = processor is not None
        if processor is not None:
            tokenizer = VisionProcessor.of(processor).tokenizer
        self._tokenizer = tokenizer
        self._limits = limits
        self._playing: dict[int, Episode] = {}
        self._watching: asyncio.Task[None] | None = None
        playing = self._playing  # Not self, which is to be garbage collected.
        self.workers = Workers(
            make_backend(),
            number,
            max_restarts=max_restarts,
            seed=torch.initial_seed(),
        )
        self.workers.on_report.append(lambda report: _enter_report(playing, report))
        self.end: Callable[[], object] = partial(self.workers.close, 0.0)
        try:
            self.engine: Engine = RemoteEngine(self.workers, on_update)
        except BaseException:
            self.workers.close(0.0)
            raise

    @property
    def tokenizer(self) -> Any:
        """Decodes tokens."""
        if self._tokenizer is None:
            self._tokenizer = self.workers.tokenizer()
        return self._tokenizer

    async def failure_of(
        self,
        episode: Episode,
        sampling: Mapping[str, Any],
        expected: ExpectedEntries,
        engine: Engine | None = None,
    ) -> BaseException | None:
        """Have an episode played and return its error, or ``None``.

        Raises:
            WorkersFailedError: if a worker died more than ``max_restarts`` times in a row.
        """
        episode.shows_images = self._shows_images
        self._playing[episode.traj_id] = episode
        self._watch()
        try:
            played = await self.workers.play(Task.of(episode, sampling))
            played.enter(episode)
            if played.error is not None:
                return read_failure(played.error)
            if episode.valid is False:
                episode.entries = expected.blank(len(episode.turns))
            else:
                expected.check(episode.entries)
        except WorkersFailedError:
            raise
        except BaseException as error:
            return error
        finally:
            del self._playing[episode.traj_id]
        return None

    def close(self, timeout: float | None = None) -> None:
        """End the workers."""
        self.workers.close(timeout)

    def _watch(self) -> None:
        """Ask for reports for as long as episodes run."""

        async def watch() -> None:
            while self._playing:
                await asyncio.sleep(_WATCH_SECONDS)
                self.workers.watch(_WATCH_SECONDS, self._limits)

        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(watch())


def _enter_report(playing: Mapping[int, Episode], report: Report) -> None:
    """Write what a worker reports into the records of running episodes."""
    for traj_id, (oldest, seconds, what) in report.episodes.items():
        if (episode := playing.get(traj_id)) is not None:
            episode.oldest_elsewhere = oldest
            episode.calls.elsewhere = (time.monotonic() - seconds, what) if what else None


class RemoteEngine:
    """The engines of the workers as one: their weights and their version.

    Args:
        workers: have the engines.
        on_update: called with new weights, instead of sending them to the workers; may be ``async``.
    """

    def __init__(self, workers: Workers, on_update: Callable[[Any], Any] | None = None) -> None:
        self._workers = workers
        self._on_update = on_update
        self._servers: SharedServers | None = None
        if isinstance(on_update, ServerWeights):
            self._servers = SharedServers(on_update, workers)
        self._lock = threading.Lock()
        self.version = workers.version
        self.max_total_tokens = workers.facts["max_total_tokens"]
        self.max_new_tokens = workers.facts["max_new_tokens"]

    async def generate(self, prompt_ids: Any, **arguments: Any) -> Completion:
        """Refuse to sample here.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the engines of this collector sample in its workers only.")

    def update_weights(self, source: Any) -> int:
        """Send weights to all workers, or call ``on_update``; return the new version.

        Raises:
            RuntimeError: if the collector was shut down.
        """
        with self._lock:
            self._workers.check_open()
            try:
                if self._servers is not None:
                    self._servers.update(source)
                elif self._on_update is not None:
                    hand_on(self._on_update, source)
                    self._workers.count_update()
                else:
                    merge = not self._workers.facts["has_adapters"]
                    packed = None if source is None else pack_weights(source, merge=merge)
                    self._workers.update(packed)
            finally:  # An update that missed some servers counts, too.
                self.version = self._workers.version
            return self.version

    def count_update(self) -> int:
        """Count an update that was made elsewhere; return the new version."""
        with self._lock:
            counted = self._workers if self._servers is None else self._servers
            counted.count_update()
            self.version = self._workers.version
            return self.version

    def count_from(self, version: int) -> None:
        """Count versions from ``version``."""
        with self._lock:
            self._workers.count_from(version)
            self.version = version

    def close(self) -> None:
        """Do nothing: the workers close their engines."""
