"""What plays an episode: an environment that talks, or a workflow that plays it by itself.

``resolve`` finds out which of them it was given, and says what it tried if it is neither.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_mt.collectors.episode import Episode, as_number, is_finite
from torchrl_mt.engines import Engine
from torchrl_mt.envs import ChatEnvAdapter, TextEnv

__all__ = ["Make", "MakePlayer", "Player", "Rejected", "Workflow", "enter_result", "resolve"]

Player: TypeAlias = "TextEnv | Workflow"

_AT_ONCE = 0.002
"""Seconds that the making of a player may hold up the others."""


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
            counts and whose other entries are kept. Rewards must be finite.
        """


class Rejected(Exception):
    """An episode is not wanted, without anything having gone wrong.

    Args:
        cause: as it is counted.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class MakePlayer(Protocol):
    """Makes the player of an episode, in any thread."""

    @property
    def at_once(self) -> bool:
        """Whether that takes no time to speak of."""
        ...

    def __call__(self) -> Player:
        """A player for one episode; a workflow may be the same each time."""
        ...


def resolve(env: Any, workflow_kwargs: Mapping[str, Any] | None = None) -> MakePlayer:
    """What makes the player of an episode.

    Args:
        env: a ``TextEnv`` (copied for each episode), a class of them or a callable that makes one or a
            TorchRL chat environment; a :class:`Workflow`, a class of them, or a string,
            ``"package.module.Class"``, that names one of the classes.
        workflow_kwargs: arguments for the class.

    Raises:
        TypeError: if it is none of these, an instance that cannot be copied, a class or callable that
            takes other arguments, or a class without a method that it needs.
        ImportError: if the string names nothing or what it names cannot be imported; says what was
            tried.
    """
    if isinstance(env, str):
        env = _named(env)
    kwargs = dict(workflow_kwargs or {})
    if isinstance(env, type):
        can_play = issubclass(env, (TextEnv, EnvBase)) or hasattr(env, "arun_episode")
        if not can_play:
            raise _not_a_player(f"the class {env.__name__}")
        _require_fit(env, kwargs)
        if issubclass(env, TextEnv):
            return Make(partial(env, **kwargs), at_once=env.inline)
        if issubclass(env, EnvBase):
            return _MadeBy(partial(env, **kwargs))
        env, kwargs = env(**kwargs), {}
    if kwargs:
        raise TypeError(
            f"workflow_kwargs are for a class, or the name of one, got {type(env).__name__} and "
            f"{sorted(kwargs)}"
        )
    if isinstance(env, TextEnv):
        is_quick = _seconds_to_copy(env) < _AT_ONCE
        return Make(partial(copy.deepcopy, env), at_once=env.inline and is_quick)
    if hasattr(env, "arun_episode"):
        if not inspect.iscoroutinefunction(env.arun_episode):
            raise TypeError(
                f"{type(env).__name__}.arun_episode must be an async method: async def "
                "arun_episode(self, engine, data)"
            )
        return Make(lambda: env, at_once=True)
    if callable(env) and not isinstance(env, EnvBase):
        _require_no_arguments(env)
        return _MadeBy(env)
    raise _not_a_player(type(env).__name__)


def enter_result(episode: Episode, result: Any) -> None:
    """Enter what a workflow returned in the episode that it played.

    Raises:
        Rejected: if it returned ``None``.
        TypeError: if it returned something else than a workflow may.
        ValueError: if it returned rewards of more or fewer turns than were played, one that is not
            finite, or the engine was never called.
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
        episode.entries, rewards = _entries(result, len(turns))
    elif isinstance(result, Sequence) and not isinstance(result, str):
        rewards = _numbers(result)
    else:
        rewards = [0.0] * (len(turns) - 1) + _numbers([result])
    if len(rewards) != len(turns):
        raise ValueError(
            f"a workflow must return one reward for each turn: {len(turns)} were played, got "
            f"{len(rewards)} rewards"
        )
    for k, reward in enumerate(rewards):
        if not is_finite(reward):
            raise ValueError(
                f"a workflow must return finite rewards, as float32, got {reward} for turn {k}: return "
                "None where an episode cannot be judged"
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
    return [as_number(value) for value in values]


def _require_fit(cls: type, kwargs: Mapping[str, Any]) -> None:
    """Refuse a class that cannot be made with these arguments."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise TypeError(
            f"env must define all methods that it needs, but {cls.__name__} has no {missing}."
        )
    # TorchRL's environments are made by a metaclass, whose signature says nothing.
    function: Any = vars(cls).get("__init__", EnvBase.__init__) if issubclass(cls, EnvBase) else cls
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C
        return
    try:
        signature.bind(*(() if function is cls else (None,)), **kwargs)
    except TypeError as error:
        raise TypeError(
            f"workflow_kwargs must be the arguments of {cls.__name__}{signature}, got "
            f"{sorted(kwargs)}: {error}"
        ) from None


def _require_no_arguments(factory: Callable[..., Any]) -> None:
    """Refuse a callable that cannot be called as it is."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(
            f"env, a callable that makes an environment, must be called without arguments: {error}"
        ) from None


def _seconds_to_copy(env: TextEnv) -> float:
    """How long it takes to copy an environment; one that cannot be copied is refused."""
    begin = time.perf_counter()
    try:
        copy.deepcopy(env)
        return time.perf_counter() - begin
    except Exception as error:
        name = type(env).__name__
        raise TypeError(
            f"env is copied for each episode, but this {name} cannot be copied "
            f"({type(error).__name__}: {error}): give the class {name}, with its arguments as "
            f"workflow_kwargs, or a callable that makes one, lambda: {name}(...)."
        ) from error


@dataclass(frozen=True)
class Make:
    """Players made by a function."""

    make: Callable[[], Player]
    at_once: bool

    def __call__(self) -> Player:
        """A player for one episode."""
        return self.make()


class _MadeBy:
    """Players made by a factory; TorchRL's environments are adapted."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._adapter: ChatEnvAdapter | None = None
        self._lock = threading.Lock()

    @property
    def at_once(self) -> bool:
        return self._adapter is not None

    def __call__(self) -> Player:
        if self._adapter is None:
            made = self._factory()
            if isinstance(made, TextEnv) or hasattr(made, "arun_episode"):
                return made
            if not isinstance(made, EnvBase):
                raise _not_a_player(f"a callable that makes {type(made).__name__}")
            made.close()
            with self._lock:
                # Its copies share what they draw of a data loader, so that groups share an item.
                self._adapter = self._adapter or ChatEnvAdapter(self._factory)
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
    except Exception as error:
        raise ImportError(
            f"env {name!r}: importing the module {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ImportError(
            f"env {name!r}: the module {module_name!r} was imported, but has no {attribute!r}; its "
            f"classes are {sorted(known)}"
        ) from None
