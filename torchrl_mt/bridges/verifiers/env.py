"""Environments of the ``verifiers`` library as agents of a collector."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torchrl_mt.checks import check_positive_integer
from torchrl_mt.threads import call_user

__all__ = ["VerifiersEnv"]


class VerifiersEnv:
    """An environment of the ``verifiers`` library, played by the library itself.

    The library plays its rollout: prompts, tools, rewards, judges. Its model is the collector's engine,
    which records every sampled token, so for the collector it is an :class:`~torchrl_mt.agents.Agent`.
    It plays environments of both APIs: of ``verifiers.v1``, in release 0.4 and later, and of the classic
    one (``load_environment``, ``MultiTurnEnv``), in releases 0.1.14 to 0.3.

    The rollout's reward is that of its last turn. The ``"info"`` of that turn has the library's
    ``"rewards"`` by name, its ``"metrics"`` and its ``"stop_condition"``. An error that the library
    recorded, and a time limit of the environment, reject the episode. A limit of the collector ends the
    rollout, and what was played is scored.

    **Agents of** ``verifiers.v1`` that have no harness of their own are plain chats. They are played on
    the collector's event loop, without a process or a container. ``config`` can choose another harness:
    ``{"agent": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}}``. Where an environment has
    several agents, those that it trains play as the policy, and the last turn of each gets its reward.
    If one of them has no turn, its reward is only noted, by its name: in ``"rewards_without_turns"`` of
    the ``"info"`` of the episode's last turn. Agents that are not trained need engines in the
    collector's ``models``, by the agent's name or that of its model.

    Args:
        env: id of an installed environment or taskset; or a ``Taskset``, an ``EnvConfig`` or an ``Env``
            of ``verifiers.v1``; or a classic ``Environment``.
        config: with an id, the rest of the library's ``[env]`` block, such as
            ``{"agent": {"max_turns": 8}}``; for the classic API, arguments of ``load_environment``.
        num_tasks: number of tasks, from the first; all if ``None``, unless the taskset has no end.
        reward: gives the rewards in place of the library's. ``reward(record)``, plain (in a
            thread) or ``async``, returns what an agent returns, such as a list with one reward per turn.
            ``record`` is the library's ``Episode``, or the ``RolloutOutput`` of the classic API.

    Raises:
        ImportError: if ``verifiers`` is not installed, or not in a release that has the API of ``env``.
        TypeError, ValueError: if an argument is of the wrong type or out of range.

    Examples:
        >>> env = VerifiersEnv("gsm8k-v1")  # doctest: +SKIP
        >>> collector = MultiTurnCollector(  # doctest: +SKIP
        ...     env, engine, data=env.items(), episodes_per_batch=64, group_size=8
        ... )
    """

    def __init__(
        self,
        env: Any,
        *,
        config: Mapping[str, Any] | None = None,
        num_tasks: int | None = None,
        reward: Callable[[Any], Any] | None = None,
    ) -> None:
        if num_tasks is not None:
            check_positive_integer("num_tasks", num_tasks)
        if reward is not None and not callable(reward):
            raise TypeError(
                f"reward must be a function of the library's record, got {type(reward).__name__}."
            )
        if config and not isinstance(env, str):
            raise TypeError(
                f"config must be given with an id only, got one with {type(env).__name__}: configure "
                "that when it is made."
            )
        self._arguments = {"config": config, "num_tasks": num_tasks, "reward": reward}
        self._env = env
        self._player = _player_of(env)(env, config or {}, num_tasks)
        self._reward = reward

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self._env, self._arguments)

    def items(self) -> list[dict[str, Any]]:
        """The data of the tasks, for the collector's ``data``.

        Returns:
            A dict for each task, with its question, its right answer and whatever else it has. Those of
            ``verifiers.v1`` name the task by ``"idx"``; their other entries are not read again.

        Raises:
            ValueError: if the taskset has no end and ``num_tasks`` is ``None``.
        """
        return self._player.items()

    async def run(
        self, data: Any, *, base_url: str, api_key: str, http_client: Any, session: Any
    ) -> Any:
        """Play one episode; see :meth:`torchrl_mt.agents.Agent.run`.

        Args:
            data: an item of :meth:`items`, or ``{"seed": k}`` for task ``k``, modulo their number.
            base_url: address of the collector's server.
            api_key: key of the episode.
            http_client: a client that reaches the server without a socket.
            session: the :class:`~torchrl_mt.agents.Session` of the episode.

        Returns:
            Rewards by the id of the completion, or what ``reward`` returned.
        """
        record, rewards = await self._player.run(data, http_client, session)
        if self._reward is None:
            return rewards
        return await call_user(self._reward, record)


def _make(env: Any, arguments: dict[str, Any]) -> VerifiersEnv:
    return VerifiersEnv(env, **arguments)


def _player_of(env: Any) -> Callable[..., Any]:
    """What plays an environment: the API that the installed release has.

    Raises:
        ImportError: if ``verifiers`` or ``env`` is not installed, or ``env`` is an id of the other API.
    """
    from torchrl_mt.bridges.verifiers.classic import ClassicEnv
    from torchrl_mt.bridges.verifiers.v1 import V1Env

    try:
        library = importlib.import_module("verifiers")
    except ImportError as error:
        raise ImportError(
            "VerifiersEnv needs the library verifiers: pip install 'torchrl-mt[verifiers]'."
        ) from error
    if hasattr(library, "load_environment"):
        if not hasattr(library.Environment, "run_rollout"):
            raise ImportError(
                f"VerifiersEnv plays verifiers from 0.1.14 on, got {library.__version__}: pip install "
                "-U verifiers."
            )
        return partial(ClassicEnv, library)
    v1 = importlib.import_module("verifiers.v1")
    if isinstance(env, str):
        try:
            v1.taskset_config_type(env)
        except (AttributeError, TypeError) as error:  # It is installed, but has no taskset.
            raise ImportError(
                f"env {env!r} has no taskset of verifiers.v1 ({error}). An environment of the classic "
                "API needs an older release: pip install 'verifiers<0.4'."
            ) from error
    return partial(V1Env, v1)
