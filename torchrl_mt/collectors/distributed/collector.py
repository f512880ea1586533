"""Collectors whose episodes are played in other processes.

What is played, counted and delivered is decided in one place, as with one process: every item is given
out once, and groups are whole. Only the playing is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

from torchrl_mt.checks import check_at_least, check_choice, check_positive_integer
from torchrl_mt.collectors.collector import MultiTurnCollector
from torchrl_mt.collectors.distributed.player import RemoteEngine, RemotePlayer, pickle_setup
from torchrl_mt.collectors.distributed.process_backend import ProcessBackend
from torchrl_mt.collectors.distributed.ray_backend import RayBackend
from torchrl_mt.collectors.items.curriculum import Curriculum
from torchrl_mt.collectors.playing.episode_player import Player

__all__ = ["MultiProcessCollector", "RayMultiTurnCollector"]

BackendName = Literal["ray", "process"]


class RayMultiTurnCollector(MultiTurnCollector):
    """A :class:`~torchrl_mt.collectors.MultiTurnCollector` whose episodes are played by Ray actors.

    Each actor has an engine of its own, its environments and an event loop. All else stays in this
    process: items, groups, retries, staleness, counts, batches and the replay buffer. New weights are
    sent once, and :meth:`update_policy_weights_` returns when every actor has them. :doc:`/scaling` says
    how episodes are shared out, and what happens when an actor dies.

    Args:
        env: as for :class:`~torchrl_mt.collectors.MultiTurnCollector`; it is pickled.
        policy_factory: makes the engine, or TorchRL LLM wrapper, of an actor: a function or class
            without arguments, its name as ``"package.module.function"``, or a list of one per actor.
        data: as for :class:`~torchrl_mt.collectors.MultiTurnCollector`.
        num_collectors: number of actors.
        remote_configs: options of ``ray.remote`` for all actors, such as ``{"num_gpus": 1}``, or a list
            of one for each.
        ray_init_config: arguments of ``ray.init``, if Ray is not initialised.
        backend: ``"ray"``, or ``"process"`` for processes on this machine.
        on_update: loads new weights into sampling servers that the actors share, instead of sending
            them: ``VLLMWeights``, ``SGLangWeights``, or a plain or ``async`` function.
        max_restarts: number of times in a row that an actor is started again without having finished an
            episode. The next death ends the run.
        **options: further arguments of :class:`~torchrl_mt.collectors.MultiTurnCollector`. ``accept``
            is called by the actors, ``accept_group`` and ``postproc`` in this process.

    Raises:
        TypeError: if ``policy_factory`` makes no engine, or an argument cannot be pickled.
        ValueError: if a number is out of range, ``backend`` is unknown, or ``port`` is given.
        ImportError: if Ray is not installed.
        Exception: the error of ``policy_factory``; the cause is its traceback in the actor.

    Examples:
        >>> collector = RayMultiTurnCollector(  # doctest: +SKIP
        ...     GuessNumber(16), make_engine, num_collectors=4, episodes_per_batch=256
        ... )
        >>> for batch in collector:  # doctest: +SKIP
        ...     train(model, batch)
        ...     collector.update_policy_weights_(model)
    """

    def __init__(
        self,
        env: Any,
        policy_factory: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        data: Iterable[Any] | Curriculum | None = None,
        *,
        num_collectors: int,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        backend: BackendName = "ray",
        on_update: Callable[[Any], Any] | None = None,
        max_restarts: int = 8,
        **options: Any,
    ) -> None:
        check_positive_integer("num_collectors", num_collectors)
        check_choice("backend", backend, get_args(BackendName))
        check_at_least("max_restarts", max_restarts, 0)
        self.num_collectors = num_collectors
        self._make_backend: Any = ProcessBackend
        if backend == "ray":
            self._make_backend = partial(
                RayBackend,
                number=num_collectors,
                remote_configs=remote_configs,
                ray_init_config=ray_init_config,
            )
        self._of_workers: dict[str, Any] = {"max_restarts": max_restarts, "on_update": on_update}
        try:
            super().__init__(env, policy_factory, data, **options)
        except BaseException:
            if "_player" in vars(self):
                self._player.close(0.0)
            raise

    def _make_player(self, env: Any, policy: Any, **options: Any) -> Player:
        setup = pickle_setup(env, policy, self.num_collectors, **options)
        return RemotePlayer(
            partial(self._make_backend, setup),
            self.num_collectors,
            limits=options["limits"],
            tokenizer=options["tokenizer"],
            processor=options["processor"],
            **self._of_workers,
        )

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed as :meth:`MultiTurnCollector.set_seed` does, and the generators of the workers."""
        following = super().set_seed(seed, static_seed)
        assert isinstance(self._player, RemotePlayer)
        self._player.workers.set_seed(seed)
        return following

    def _continue_from(self, version: int) -> None:
        assert isinstance(self.engine, RemoteEngine)
        if version > self.engine.version:
            self.engine.count_from(version)


class MultiProcessCollector(RayMultiTurnCollector):
    """A :class:`~torchrl_mt.collectors.MultiTurnCollector` whose episodes are played in processes.

    It is :class:`RayMultiTurnCollector` with processes on this machine in the place of actors, and needs
    no Ray. The processes import the main module anew, so a script needs
    ``if __name__ == "__main__":``. They end when this process does, even if it is killed.

    Args:
        env: see :class:`RayMultiTurnCollector`, also for the others.
        policy_factory: makes the engine of each process.
        data: the items.
        num_collectors: number of processes.
        on_update: called with new weights, instead of sending them.
        max_restarts: number of times in a row that a process is started again.
        **options: further arguments of :class:`~torchrl_mt.collectors.MultiTurnCollector`.

    Raises:
        TypeError: if ``policy_factory`` makes no engine, or an argument cannot be pickled.
        ValueError: if a number is out of range, or ``port`` is given.
        Exception: the error of ``policy_factory``; the cause is its traceback in the process.

    Examples:
        >>> if __name__ == "__main__":  # doctest: +SKIP
        ...     collector = MultiProcessCollector(
        ...         PlaysChess, make_engine, data, num_collectors=4, episodes_per_batch=256
        ...     )
    """

    def __init__(
        self,
        env: Any,
        policy_factory: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        data: Iterable[Any] | Curriculum | None = None,
        *,
        num_collectors: int,
        on_update: Callable[[Any], Any] | None = None,
        max_restarts: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(
            env,
            policy_factory,
            data,
            num_collectors=num_collectors,
            backend="process",
            on_update=on_update,
            max_restarts=max_restarts,
            **options,
        )
