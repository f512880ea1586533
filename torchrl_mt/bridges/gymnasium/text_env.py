"""Gymnasium's environments in text: observations are rendered, actions are parsed.

An action that cannot be parsed, or is not in the action space, is named to the model and not executed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from torchrl_mt.envs import Message, TextEnv, TextStep
from torchrl_mt.seeds import import_package, read_item, seed_of

__all__ = ["GymTextEnv"]


class GymTextEnv(TextEnv):
    r"""A Gymnasium environment, played in text (``pip install gymnasium``).

    ``render`` makes a user's message of an observation, and ``parse`` an action of the content of a
    response. Rewards, ``terminated``, ``truncated`` and ``info`` are those of the environment's steps.
    The model is told ``"error: ..."`` of an action that is not in the action space, and of a
    ``ValueError`` of ``parse``: that costs a turn with reward 0, and the environment takes no step. All
    other errors reject the episode. See :doc:`/bridges`.

    The episode's data sets what ``reset`` receives: ``{"seed": 3}``, with ``"options"`` or without. If
    it has no seed, as ``{"label": 1}``, its content determines one, so that a group begins alike.
    ``None`` sets none.

    The environment is made at the first reset and used for all episodes of an instance, one after the
    other. Copies make their own. Its methods are called from different threads, never two at a time,
    except ``close``.

    Args:
        make: the id of a registered environment, or a function or class that makes a new one each time.
        render: called with an observation and the ``info`` that came with it; returns its text.
        parse: called with the content of a response; returns an action.
        prompt: what comes before the first observation: a text, which begins the same message, or a list
            of messages. Or a function of the episode's data that returns one of these.

    Raises:
        TypeError: if ``make`` is an environment, or makes a vector environment, or an argument is of
            another wrong type.
        ImportError: if ``make`` is an id, and Gymnasium is not installed. gymnasium.error.Error: if no
            environment has this id.

    Examples:
        >>> env = GymTextEnv(
        ...     "Blackjack-v1",
        ...     render=lambda hand, info: f"you have {hand[0]}, the dealer shows {hand[1]}",
        ...     parse=lambda response: {"hit": 1, "stand": 0}.get(response, response),
        ...     prompt="Answer hit or stand.",
        ... )
        >>> env.reset({"seed": 3})[0]["content"]
        'Answer hit or stand.\n\nyou have 7, the dealer shows 10'
        >>> env.step("double").messages[0]["content"]
        "error: 'double' is not in the action space Discrete(2)"
    """

    def __init__(
        self,
        make: str | Callable[[], Any],
        *,
        render: Callable[[Any, Mapping[str, Any]], str],
        parse: Callable[[str], Any],
        prompt: str | Sequence[Message] | Callable[[Any], str | Sequence[Message]] | None = None,
    ) -> None:
        if isinstance(make, str):
            import_package("gymnasium", type(self).__name__).spec(make)
        elif not callable(make):
            raise TypeError(
                "make must be the id of an environment or a function that makes one, got "
                f"{type(make).__name__}: each episode has an environment of its own."
            )
        _refuse_vector(make, "make")
        for name, function in (("render", render), ("parse", parse)):
            if not callable(function):
                raise TypeError(f"{name} must be a function, got {function!r}.")
        self.make = make
        self.render = render
        self.parse = parse
        self.prompt = prompt
        self._made = _Made()

    def reset(self, data: Any = None) -> Sequence[Message]:
        """Reset the environment with the seed and the options of the data.

        Raises:
            TypeError: if the data, what ``make`` made, or what was returned is of a wrong type.
            ValueError: if a key of the data is misspelt, or ``make`` made the same environment before.
            Exception: the error of the environment, of ``render`` or of ``prompt``.
        """
        self._made.is_playing = False
        item = read_item(data, ("seed", "options"))
        env = self._made.get(self._make_env)
        given = {"seed": seed_of(data), "options": item.get("options")}
        returned = env.reset(**{key: value for key, value in given.items() if value is not None})
        if not (_is_tuple(returned, 2) and isinstance(returned[1], Mapping)):
            raise TypeError(
                f"reset of {_name(env)} must return (observation, info), as Gymnasium's does, got "
                f"{_shown(returned)}: wrap an environment of the older gym."
            )
        opening = self._opening(data, self._rendered(*returned))
        self._made.is_playing = True
        return opening

    def step(self, response: str) -> TextStep:
        """Take the action of a response.

        Raises:
            RuntimeError: if no episode is under way.
            TypeError: if the environment or ``render`` returns something else.
            Exception: the error of the environment or of ``render``; of ``parse``, unless it is a
                ``ValueError``.
        """
        self._under_way(self._made.is_playing or None)
        env = self._made.get(self._make_env)
        try:
            action = _in_space(self.parse(response), getattr(env, "action_space", None))
        except ValueError as error:
            return TextStep([_user(f"error: {error}")], info={"error": str(error)})
        self._made.is_playing = False
        returned = env.step(action)
        if not (_is_tuple(returned, 5) and isinstance(returned[4], Mapping)):
            raise TypeError(
                f"step of {_name(env)} must return (observation, reward, terminated, truncated, info), "
                f"as Gymnasium's does, got {_shown(returned)}: wrap an environment of the older gym."
            )
        observation, reward, terminated, truncated, info = returned
        done = bool(terminated or truncated)
        messages = [_user(self._rendered(observation, info))]
        self._made.is_playing = not done
        return TextStep(
            messages,
            float(reward),
            done=done,
            truncated=done and not terminated,
            info={key: _copied(value) for key, value in info.items()} or None,
        )

    def close(self) -> None:
        """Close the environment; one that is still being made is closed once it is there."""
        self._made.is_playing = False
        self._made.close()

    def _make_env(self) -> Any:
        if isinstance(self.make, str):
            return import_package("gymnasium", type(self).__name__).make(self.make)
        env = self.make()
        _refuse_vector(env, "what make returned")
        if not callable(getattr(env, "step", None)) or not callable(getattr(env, "reset", None)):
            raise TypeError(
                f"make must make an environment with reset and step, got {_shown(env)}."
            )
        _refuse_second_use(env)
        return env

    def _rendered(self, observation: Any, info: Mapping[str, Any]) -> str:
        text = self.render(observation, info)
        if not isinstance(text, str):
            raise TypeError(f"render must return a text, got {_shown(text)}.")
        return text

    def _opening(self, data: Any, observed: str) -> list[Message]:
        prompt = self.prompt(data) if callable(self.prompt) else self.prompt
        if prompt is None:
            return [_user(observed)]
        if isinstance(prompt, str):
            return [_user(f"{prompt}\n\n{observed}")]
        if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
            raise TypeError(
                "prompt must be a text, a list of messages or a function that returns one of these, got "
                f"{_shown(prompt)}."
            )
        return [*prompt, _user(observed)]


class _Made:
    """The environment of an instance, and whether an episode is under way. A copy has none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._env: Any = None
        self._closed = False
        self.is_playing = False

    def get(self, make: Callable[[], Any]) -> Any:
        """The environment, which is made if there is none.

        Raises:
            RuntimeError: if it was closed, perhaps while it was made.
        """
        if self._env is None and not self._closed:
            env = make()
            with self._lock:
                if not self._closed:
                    self._env = env
            if self._env is not env:
                _close(env)
        if self._closed:
            raise RuntimeError("the environment is closed.")
        return self._env

    def close(self) -> None:
        with self._lock:
            env, self._env, self._closed = self._env, None, True
        _close(env)

    def __deepcopy__(self, memo: Any) -> _Made:
        return _Made()

    def __reduce__(self) -> tuple[type[_Made], tuple[()]]:
        return _Made, ()


def _close(env: Any) -> None:
    if hasattr(env, "close"):
        env.close()


_in_use: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""What was made, without its wrappers, by its ``id``."""
_noting = threading.Lock()


def _refuse_second_use(env: Any) -> None:
    """Refuse an environment that was made before: two episodes would play in it at a time."""
    inner = getattr(env, "unwrapped", env)
    with _noting:
        if _in_use.get(id(inner)) is inner:
            raise ValueError(
                f"make must make a new environment each time, got the same {_name(inner)} again: each "
                "episode has an environment of its own."
            )
        with suppress(TypeError):  # It takes no weak references.
            _in_use[id(inner)] = inner


def _copied(value: Any) -> Any:
    """A copy, since environments may change what they returned; the value if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _in_space(action: Any, space: Any) -> Any:
    """An action of a space, in its dtype; ``ValueError`` if it is not in the space."""
    if space is None:
        return action
    if type(space).__name__ == "Box":
        try:
            action = np.asarray(action, dtype=space.dtype)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{action!r} is not in the action space {space}") from error
    if not space.contains(action):
        raise ValueError(f"{action!r} is not in the action space {space}")
    return action


def _refuse_vector(env: Any, what: str) -> None:
    """Refuse vector environments, and classes of them."""
    for cls in env.__mro__ if isinstance(env, type) else type(env).__mro__:
        if cls.__name__ == "VectorEnv":
            raise TypeError(
                f"{what} must be a single environment, got the vector environment {_name(env)}: "
                "collectors play many episodes at a time, each with an environment of its own."
            )


def _is_tuple(value: Any, length: int) -> bool:
    return isinstance(value, tuple) and len(value) == length


def _name(env: Any) -> str:
    return env.__name__ if isinstance(env, type) else type(env).__name__


def _shown(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple) else ""
    return f"{type(value).__name__}{size} ({str(value)[:80]})"


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
