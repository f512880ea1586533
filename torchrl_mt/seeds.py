"""Seeds of episodes, also for libraries that draw from Python's or numpy's global generators.

Episodes run concurrently, so a seed of a global generator says nothing about one of them. Modules of
such a library draw from generators of the episode instead; the global ones are neither read nor changed.
"""

from __future__ import annotations

import importlib
import operator
import random
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np

from torchrl_mt.checks import refuse_misspelt_keys

__all__ = [
    "EpisodeGenerators",
    "drawing_from",
    "import_package",
    "read_item",
    "redirect_draws",
    "seed_of",
]


def read_item(data: Any, keys: Sequence[str]) -> Mapping[str, Any]:
    """Check an episode's data; return it, with its seed as an ``int`` if it has one.

    Args:
        data: a mapping, or ``None``, which is an empty one.
        keys: keys that the environment reads, including ``"seed"``.

    Raises:
        TypeError: if the data is no mapping, or its seed no integer.
        ValueError: if a key is misspelt.

    Examples:
        >>> read_item({"seed": np.int64(3), "label": "a"}, ["seed"])
        {'seed': 3, 'label': 'a'}
    """
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise TypeError(
            f"data must be a mapping such as {{{keys[0]!r}: ...}}, got {type(data).__name__} "
            f"({str(data)[:80]})."
        )
    refuse_misspelt_keys(data, keys)
    seed = data.get("seed")
    if seed is None:
        return data
    try:
        return {**data, "seed": operator.index(seed)}
    except TypeError:
        raise TypeError(f"data['seed'] must be an integer, got {seed!r}.") from None


def seed_of(data: Mapping[str, Any] | None) -> int | None:
    """The seed of an episode's data: its ``"seed"``, or else one that its content determines.

    The same content has the same seed, in every process, so that all episodes of a group play the same.

    Returns:
        ``None`` for no data.

    Examples:
        >>> seed_of({"seed": 3}), seed_of(None)
        (3, None)
        >>> seed_of({"label": 1, "x": np.zeros(2)}) == seed_of({"x": np.zeros(2), "label": 1})
        True
    """
    if data is None:
        return None
    seed = data.get("seed")
    return zlib.crc32(_content(data).encode()) % 2**31 if seed is None else int(seed)


def _content(value: Any) -> str:
    """A text of a value that does not depend on the order of keys or on addresses in memory."""
    if isinstance(value, Mapping):
        return f"{{{sorted((_content(key), _content(part)) for key, part in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{sorted(map(_content, value))}}}"
    if isinstance(value, (list, tuple)):
        return f"{list(map(_content, value))}"
    if hasattr(value, "tolist"):  # Long arrays have a short representation.
        return _content(value.tolist())
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def import_package(name: str, needed_by: str) -> Any:
    """Import an optional package.

    Raises:
        ImportError: says what to install.

    Examples:
        >>> import_package("no_such", "SomeEnv")
        Traceback (most recent call last):
            ...
        ImportError: SomeEnv needs the package no_such: pip install no-such (No module named 'no_such').
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs the package {name}: pip install {name.replace('_', '-')} ({error})."
        ) from error


class EpisodeGenerators:
    """The generators of an episode, which take the place of the global ones.

    Args:
        seed: seed of both.
    """

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.numpy = np.random.RandomState(seed % 2**32)


_current: ContextVar[EpisodeGenerators | None] = ContextVar("generators", default=None)


@contextmanager
def drawing_from(generators: EpisodeGenerators) -> Iterator[None]:
    """Let redirected modules draw from these generators, in this thread or task, within the context."""
    token = _current.set(generators)
    try:
        yield
    finally:
        _current.reset(token)


def redirect_draws(package: str) -> None:
    """Redirect the draws of a package's imported modules to the generators of :func:`drawing_from`.

    Outside of :func:`drawing_from`, they draw from the global generators as before.

    Args:
        package: name of the package. Modules that are imported later need another call.
    """
    with _redirecting:
        for name, module in list(sys.modules.items()):
            if name == package or name.startswith(f"{package}."):
                for key, value in list(vars(module).items()):
                    if isinstance(value, ModuleType) and value.__name__ in _STAND_INS:
                        setattr(module, key, _STAND_INS[value.__name__])


_redirecting = threading.Lock()


def _redirected(
    module: ModuleType, generator: type, of: Callable[[EpisodeGenerators], Any]
) -> ModuleType:
    """A copy of a module of random numbers, whose functions draw from the current generators."""

    def drawing(name: str) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            current = _current.get()
            return getattr(module if current is None else of(current), name)(*args, **kwargs)

        return draw

    names: Iterable[str] = module.__all__
    return _copied(module, {name: drawing(name) for name in names if hasattr(generator, name)})


def _copied(module: ModuleType, changes: Mapping[str, Any]) -> ModuleType:
    copied = ModuleType(module.__name__, module.__doc__)
    vars(copied).update(vars(module), **changes)
    return copied


_numpy_random = _redirected(np.random, np.random.RandomState, lambda own: own.numpy)
_STAND_INS = {
    "random": _redirected(random, random.Random, lambda own: own.python),
    "numpy": _copied(np, {"random": _numpy_random}),
    "numpy.random": _numpy_random,
}
