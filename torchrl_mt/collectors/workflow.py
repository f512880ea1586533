"""What plays an episode: an environment that talks, or a workflow that plays it by itself.

``resolve`` finds out which of them it was given, and says what it tried if it is neither.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_mt.collectors.episode import Episode
from torchrl_mt.engines import Engine
from torchrl_mt.envs import ChatEnvAdapter, TextEnv

__all__ = ["Rejected", "Workflow", "enter_result", "resolve"]

Player: TypeAlias = "TextEnv | Workflow"


@runtime_checkable
class Workflow(Protocol):
    """Plays an episode by itself: it calls the engine as it likes, and says what came of it.

    One instance plays all episodes, many at a time.

    Examples:
        >>> class Once:
        ...     async def arun_episode(self, engine, data):
        ...         answer = await engine.generate(data["prompt_ids"])
        ...         return float(len(answer.token_ids) < 5)
        >>> isinstance(Once(), Workflow)
        True
    """

    async def arun_episode(self, engine: Engine, data: Any) -> Any:
        """Play one episode.

        Args:
            engine: answers prompts; every call is recorded as a turn of the episode.
            data: the item that the episode is played for.

        Returns:
            ``None`` to reject the episode; a number, the reward of the last turn; a list of numbers,
            one for each turn; or a TED TensorDict, ``[T]``, a step a turn, whose ``("next", "reward")``
            counts and whose other entries are kept.
        """


class Rejected(Exception):
    """An episode is not wanted, without anything having gone wrong.

    Args:
        cause: as it is counted.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


def resolve(env: Any, workflow_kwargs: Mapping[str, Any] | None = None) -> Callable[[], Player]:
    """What makes the player of an episode.

    Args:
        env: a ``TextEnv`` (copied for each episode), a class of them or a callable that makes one or a
            TorchRL chat environment; a :class:`Workflow`, a class of them, or a string,
            ``"package.module.Class"``, that names one of the classes.
        workflow_kwargs: arguments for the class.

    Raises:
        TypeError: if it is none of these.
        ImportError: if the string names nothing; says what was tried.
    """
    if isinstance(env, str):
        env = _named(env)
    kwargs = dict(workflow_kwargs or {})
    if inspect.isclass(env):
        if issubclass(env, TextEnv):
            return lambda: env(**kwargs)
        if issubclass(env, EnvBase):
            return _MadeBy(partial(env, **kwargs))
        if not hasattr(env, "arun_episode"):
            raise _not_a_player(f"the class {env.__name__}")
        env, kwargs = env(**kwargs), {}
    if kwargs:
        raise TypeError(
            f"workflow_kwargs are for a class, or the name of one, got {type(env).__name__} and "
            f"{sorted(kwargs)}"
        )
    if isinstance(env, TextEnv):
        return lambda: copy.deepcopy(env)
    if hasattr(env, "arun_episode"):
        if not inspect.iscoroutinefunction(env.arun_episode):
            raise TypeError(
                f"{type(env).__name__}.arun_episode must be an async method: async def "
                "arun_episode(self, engine, data)"
            )
        return lambda: env
    if callable(env) and not isinstance(env, EnvBase):
        return _MadeBy(env)
    raise _not_a_player(type(env).__name__)


def enter_result(episode: Episode, result: Any) -> None:
    """Enter what a workflow returned in the episode that it played.

    Raises:
        Rejected: if it returned ``None``.
        TypeError: if it returned something else than a workflow may.
        ValueError: if it returned rewards of more or fewer turns than were played, or the engine was
            never called.
    """
    if result is None:
        raise Rejected("declined")
    turns = episode.turns
    if not turns:
        raise ValueError(
            "a workflow must call the engine at least once: there is nothing to learn from"
        )
    if isinstance(result, torch.Tensor):
        result = result.tolist()
    if isinstance(result, TensorDictBase):
        episode.extra, rewards = _entries(result, len(turns))
    elif isinstance(result, Sequence) and not isinstance(result, str):
        rewards = _numbers(result)
    else:
        rewards = [0.0] * (len(turns) - 1) + _numbers([result])
    if len(rewards) != len(turns):
        raise ValueError(
            f"a workflow must return one reward for each turn: {len(turns)} were played, got "
            f"{len(rewards)} rewards"
        )
    for turn, reward in zip(turns, rewards, strict=True):
        turn.reward = reward


def _entries(result: TensorDictBase, turns: int) -> tuple[TensorDictBase, list[float]]:
    """The entries of a workflow's TensorDict beside the ledger's own, and the rewards."""
    if result.batch_size != (turns,):
        raise ValueError(
            f"a workflow's TensorDict must have a step for each turn, batch size [{turns}], got "
            f"{list(result.batch_size)}"
        )
    reward = result.get(("next", "reward"), None)
    if reward is None:
        raise ValueError('a workflow\'s TensorDict must have ("next", "reward"), got none')
    own = ("tokens", "log_probs", "versions", "collector", "group", ("next", "reward"))
    flags = tuple(("next", name) for name in ("done", "terminated", "truncated"))
    return result.exclude(*own, *flags), reward.reshape(turns, -1).sum(1).tolist()


def _numbers(values: Sequence[Any]) -> list[float]:
    """Rewards as plain numbers."""
    for value in values:
        if not isinstance(value, Real) and not (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            raise TypeError(
                "a workflow must return None, a number, a list of numbers or a TensorDict, got "
                f"{type(value).__name__} ({str(value)[:80]})"
            )
    return [float(value) for value in values]


class _MadeBy:
    """Players made by a factory; TorchRL's environments are adapted."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._adapter: ChatEnvAdapter | None = None

    def __call__(self) -> Player:
        if self._adapter is None:
            made = self._factory()
            if isinstance(made, TextEnv) or hasattr(made, "arun_episode"):
                return made
            if not isinstance(made, EnvBase):
                raise _not_a_player(f"a callable that makes {type(made).__name__}")
            made.close()
            # Its copies share what they draw of a data loader, so that groups share an item.
            self._adapter = ChatEnvAdapter(self._factory)
        return copy.deepcopy(self._adapter)


def _not_a_player(got: str) -> TypeError:
    return TypeError(
        "env must be a TextEnv, a workflow (an object with async def arun_episode(engine, data)), a "
        'class of either, its name as "package.module.Class", or a callable that makes a TextEnv or a '
        f"TorchRL chat environment, got {got}."
    )


def _named(name: str) -> Any:
    """What a string such as ``"package.module.Class"`` names."""
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name or not attribute:
        raise ImportError(f'env must be named as "package.module.Class", got {name!r}')
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(
            f"env {name!r}: importing the module {module_name!r} failed: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ImportError(
            f"env {name!r}: the module {module_name!r} was imported, but has no {attribute!r}; its "
            f"classes are {sorted(known)}"
        ) from None
