"""Factories of players: the environment, workflow or agent that plays an episode.

``resolve`` makes one from any form of a collector's ``env``.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torchrl.envs import EnvBase

from torchrl_mt.collectors.workflow import Workflow
from torchrl_mt.envs import ChatEnvAdapter, TextEnv

__all__ = [
    "Make",
    "MakePlayer",
    "Player",
    "is_agent",
    "is_reward",
    "is_workflow",
    "misfit",
    "named",
    "resolve",
]

Player: TypeAlias = "TextEnv | Workflow | Any"
"""An environment, a workflow (it has ``arun_episode``) or an agent (it has ``run``)."""

MakePlayer: TypeAlias = "Make | _Adapting"
"""Makes the player of an episode, in any thread. A workflow or an agent may be the same for all."""

_AT_ONCE = 0.002
"""Seconds that making a player may block the event loop."""


def resolve(env: Any, workflow_kwargs: Mapping[str, Any] | None = None) -> MakePlayer:
    """Make a factory of players.

    Args:
        env: a ``TextEnv`` (copied for each episode), a :class:`Workflow`, an agent, a class of these or
            its name ``"package.module.Class"``, or a callable that makes a ``TextEnv`` or a TorchRL chat
            environment.
        workflow_kwargs: arguments for the class.

    Raises:
        TypeError: if ``env`` is none of these, cannot be copied, takes other arguments, or lacks a
            method.
        ImportError: if the name cannot be imported.
    """
    if isinstance(env, str):
        env = named(env, "env")
    kwargs = dict(workflow_kwargs or {})
    if isinstance(env, type):
        if not (issubclass(env, (TextEnv, EnvBase)) or is_workflow(env) or is_agent(env)):
            raise _not_a_player(f"the class {env.__name__}")
        _require_fit(env, kwargs)
        if issubclass(env, TextEnv):
            return Make(partial(env, **kwargs), at_once=env.inline)
        if issubclass(env, EnvBase):
            return _Adapting(partial(env, **kwargs))
        env, kwargs = env(**kwargs), {}
    if kwargs:
        raise TypeError(
            f"workflow_kwargs are for a class, or the name of one, got {type(env).__name__} and "
            f"{sorted(kwargs)}."
        )
    if isinstance(env, TextEnv):
        is_quick = _seconds_to_copy(env) < _AT_ONCE
        return Make(partial(copy.deepcopy, env), at_once=env.inline and is_quick)
    if is_workflow(env):
        if not inspect.iscoroutinefunction(env.arun_episode):
            raise TypeError(
                f"{type(env).__name__}.arun_episode must be an async method: async def "
                "arun_episode(self, engine, data)."
            )
        return Make(lambda: env, at_once=True)
    if is_agent(env):
        return Make(lambda: env, at_once=True, is_agent=True)
    if callable(env) and not isinstance(env, EnvBase):
        if error := misfit(env):
            raise TypeError(
                "env, a callable that makes an environment, must be called without arguments: "
                f"{error}."
            )
        return _Adapting(env)
    raise _not_a_player(type(env).__name__)


def is_workflow(env: Any) -> bool:
    """Whether an object, or the instances of a class, are workflows."""
    return hasattr(env, "arun_episode")


def is_agent(env: Any) -> bool:
    """Whether an object, or the instances of a class, are agents."""
    return callable(getattr(env, "run", None)) and not is_workflow(env)


def is_reward(task: Any) -> bool:
    """Whether a task must be called with two arguments: a reward function of messages and item."""
    if isinstance(task, type) or not callable(task):
        return False
    needed = [p for p in inspect.signature(task).parameters.values() if p.default is p.empty]
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed) == 2


def _require_fit(cls: type, kwargs: Mapping[str, Any]) -> None:
    """Raise if a class is abstract or does not take these arguments."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise TypeError(
            f"env must define all methods that it needs, but {cls.__name__} has no {missing}."
        )
    # TorchRL's environments are made by a metaclass that hides the signature.
    function: Any = vars(cls).get("__init__", EnvBase.__init__) if issubclass(cls, EnvBase) else cls
    args = () if function is cls else (None,)
    if error := misfit(function, *args, **kwargs):
        raise TypeError(
            f"workflow_kwargs must be the arguments of {cls.__name__}{inspect.signature(function)}, got "
            f"{sorted(kwargs)}: {error}."
        )


def misfit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Why a function does not take these arguments; empty if it does or cannot be inspected."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Such as functions that are written in C.
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _seconds_to_copy(env: TextEnv) -> float:
    """Measure how long a copy of an environment takes; raise if it cannot be copied."""
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
    """A factory that calls a function."""

    make: Callable[[], Player]
    at_once: bool
    """Whether making a player takes next to no time."""
    is_agent: bool = False
    """Whether every player is an agent."""

    def __call__(self) -> Player:
        """Make a player for one episode."""
        return self.make()


class _Adapting:
    """A factory that calls a function and adapts TorchRL's environments."""

    is_agent = False

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
            if isinstance(made, TextEnv) or is_workflow(made) or is_agent(made):
                return made
            if not isinstance(made, EnvBase):
                raise _not_a_player(f"a callable that makes {type(made).__name__}")
            made.close()
            with self._lock:
                # Copies share the data loader's draws, so that the episodes of a group share an item.
                self._adapter = self._adapter or ChatEnvAdapter(self._factory)
        return copy.deepcopy(self._adapter)


def _not_a_player(got: str) -> TypeError:
    return TypeError(
        "env must be a TextEnv, a workflow (an object with async def arun_episode(engine, data)), an "
        "agent (an object with run(data, *, base_url, api_key, http_client)), a class of these, its "
        'name as "package.module.Class", or a callable that makes a TextEnv or a TorchRL chat '
        f"environment, got {got}."
    )


def named(name: str, argument: str) -> Any:
    """Import the object that an argument such as ``"package.module.Class"`` names."""
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name or not attribute:
        raise ImportError(f'{argument} must be named as "package.module.Class", got {name!r}.')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ImportError(
            f"{argument} {name!r}: importing the module {module_name!r} failed: {type(error).__name__}: "
            f"{error}."
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ImportError(
            f"{argument} {name!r}: the module {module_name!r} was imported, but has no {attribute!r}; "
            f"its classes are {sorted(known)}."
        ) from None
