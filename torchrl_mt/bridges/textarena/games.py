"""Games of TextArena that are made once and copied, so that copies play without regard to each other.

A module of TextArena may keep what it works on in global variables: the games of such a module take
turns.
"""

from __future__ import annotations

import copy
import dis
import importlib
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from types import CodeType, ModuleType
from typing import Any

from torchrl_mt.seeds import (
    EpisodeGenerators,
    drawing_from,
    import_package,
    redirect_draws,
)

__all__ = ["GameTemplate", "accept_swapped_arguments"]


class GameTemplate:
    """A game that is constructed and not begun. All environments of an ``env_id`` copy the same one.

    Args:
        env_id: name of the game.
        options: further arguments of ``textarena.make``.
    """

    def __init__(self, env_id: str, options: Mapping[str, Any]) -> None:
        arena = import_package("textarena", "TextArenaEnv")
        registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        if env_id not in registry:
            raise ValueError(f"env_id must be a registered game of TextArena, got {env_id!r}.")
        self._make = lambda: arena.make(env_id, **options)
        self._args = (env_id, options)
        entry = registry[env_id].entry_point
        module = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
        importlib.import_module(module)
        for package in ("textarena", module):
            redirect_draws(package)
        self.turns = _turns_of(module)
        """What a thread holds while it begins a game or makes a move."""
        self._game = self._made()
        self._words = _word_lists(self._game)
        try:
            self.copy()
        except Exception:  # Such as of a client with locks, of which every game then makes its own.
            self._game = None

    def copy(self) -> Any:
        """A new game."""
        if self._game is None:
            return self._made()
        return copy.deepcopy(self._game, {id(words): words for words in self._words})

    def _made(self) -> Any:
        with self.turns, drawing_from(EpisodeGenerators(0)):
            return self._make()

    def __deepcopy__(self, memo: Any) -> GameTemplate:
        return self

    def __reduce__(self) -> tuple[type[GameTemplate], tuple[Any, ...]]:
        return GameTemplate, self._args


def accept_swapped_arguments(state: Any) -> None:
    """Let ``state.set_invalid_move`` take a number and a text as the reward and the reason in any order.

    Countdown, Cryptarithm, Slitherlink and ThreeCardMonte give the number first, where TextArena expects
    the reason. It would make the text the reward.
    """
    if hasattr(state, "set_invalid_move"):
        # Not a closure: a copy of the state needs one that refers to the copy.
        state.set_invalid_move = partial(_set_invalid_move, state)


def _set_invalid_move(state: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 2 and isinstance(args[0], Real) and isinstance(args[1], str):
        args = args[::-1]
    return type(state).set_invalid_move(state, *args, **kwargs)


_locks: dict[str, threading.RLock] = {}
"""Of packages whose games take turns."""


def _turns_of(module: str) -> AbstractContextManager[Any]:
    """A lock of all games of a module's package if that assigns global variables, else nothing."""
    package = module if hasattr(sys.modules[module], "__path__") else module.rpartition(".")[0]
    parts = [
        part
        for name, part in list(sys.modules.items())
        if name == module or (package and name.startswith(f"{package}."))
    ]
    if any(_assigns_globals(part) for part in parts):
        return _locks.setdefault(package or module, threading.RLock())
    return nullcontext()


def _assigns_globals(module: ModuleType) -> bool:
    """Whether a function of a module assigns a global variable, as far as its code can be read."""
    spec: Any = getattr(module, "__spec__", None)
    if not hasattr(getattr(spec, "loader", None), "get_code"):
        return False
    waiting = [spec.loader.get_code(spec.name)]
    while waiting:
        code = waiting.pop()
        if code is None:
            continue
        if any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(code)):
            return True
        waiting.extend(part for part in code.co_consts if isinstance(part, CodeType))
    return False


def _word_lists(game: Any) -> list[Any]:
    """Dictionaries of a game, of some 100,000 words, which it only looks up."""
    while hasattr(game, "is_wrapped_with"):
        game = game.env
    return [value for value in vars(game).values() if type(value).__name__ == "EnglishDictionary"]
