"""The formats of data sets, by name; a format of your own joins with :func:`register_format`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from torchrl_mt.checks import check_choice
from torchrl_mt.datasets._files.readers import DatasetError
from torchrl_mt.plugins import load_plugin, plugin_names

__all__ = ["Format", "Mode", "find_format", "register_format"]

Mode = Literal["error", "append", "overwrite"]


@dataclass(frozen=True)
class Format:
    """How data sets of one format are read and written; see :func:`register_format`."""

    name: str
    reader: Callable[[Path], Any] | None
    writer: Callable[..., Any] | None
    detect: Callable[[Path], bool]

    def check_options(self, options: Collection[str]) -> None:
        """Refuse options that the writer does not have (``TypeError``)."""
        assert self.writer is not None
        parameters = signature(self.writer).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return
        known = [each.name for each in parameters][2:]
        for odd in options:
            if odd not in known:
                listed = ", ".join(map(repr, known)) or "none"
                raise TypeError(f"format {self.name!r} has no option {odd!r}; it has {listed}.")


_OWN = {
    "hdf5": (".h5", ".hdf5"),
    "jsonl": (".jsonl",),
    "arrow": (),
    "folder": (),
}
"""Formats of this package and their suffixes; modules are imported when they are looked at."""
_registered: dict[str, Format] = {}


def register_format(
    name: str,
    reader: Callable[[Path], Any] | None,
    writer: Callable[..., Any] | None,
    detect: Callable[[Path], bool],
) -> None:
    """Add a format of data sets, or replace the one of this name.

    Args:
        name: what ``format=`` calls it.
        reader: ``reader(path)`` opens a data set. The result has ``lengths`` (steps of each episode) and
            ``episode(i)``, and may have ``metadata(i)`` and ``close()``. None if it cannot be read.
        writer: ``writer(path, mode)`` opens one for writing, with the ``mode`` of
            :func:`~torchrl_mt.datasets.open_episodes` and its further options as keywords. The result
            has ``write_episode(episode, metadata)``, which gets a TED TensorDict ``[T]`` and a dict,
            and ``close()``. It may have ``abort()``, which is called instead of ``close()`` if an
            ``overwrite`` ends with an exception. None if it cannot be written.
        detect: ``detect(path)`` says whether a path is a data set of this format; also asked for
            paths that do not exist yet, to be told by their name.

    Raises:
        TypeError: if an argument is not callable.

    Examples:
        >>> from torchrl_mt.datasets import EpisodeDataset, register_format
        >>> class Words:
        ...     def __init__(self, path):
        ...         self.episodes = path.read_text().split()
        ...         self.lengths = [len(word) for word in self.episodes]
        ...     def episode(self, i):
        ...         return {"letter": list(self.episodes[i])}
        >>> register_format("words", Words, None, lambda path: path.suffix == ".words")
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "two.words")
        >>> _ = file.write_text("yes no")
        >>> list(EpisodeDataset(file).episode(1)["letter"])
        ['n', 'o']
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a string, got {name!r}.")
    for argument, given in (("reader", reader), ("writer", writer)):
        if given is not None and not callable(given):
            raise TypeError(f"{argument} must be callable or None, got {given!r}.")
    if not callable(detect):
        raise TypeError(f"detect must be callable, got {detect!r}.")
    _registered.pop(name, None)  # The newest is asked first.
    _registered[name] = Format(name, reader, writer, detect)


def find_format(path: Path, name: str | None = None) -> Format:
    """Return the format of a data set.

    Args:
        path: where it is or will be.
        name: of the format; None finds it by the content, or by the name of a path that does not exist.

    Raises:
        ValueError: if there is no such format.
        DatasetError: if what is there is of no known format.
    """
    if name is not None:
        check_choice("format", name, _names())
        return _known(name)
    suffix, exists = path.suffix.lower(), path.exists()
    # The one that its name tells is asked first.
    own = sorted(_OWN, key=lambda each: suffix not in _OWN[each])
    others = [*own, *plugin_names("formats")] if suffix or exists else []
    for each in dict.fromkeys([*reversed(_registered), *others]):
        if _known(each).detect(path):
            return _known(each)
    if exists:
        raise DatasetError(
            f"{path} is no data set of a known format ({', '.join(_names())}): it may be damaged, or "
            f"give format=."
        )
    if suffix:
        suffixes = ", ".join(suffix for each in _OWN.values() for suffix in each)
        raise ValueError(
            f"the format of {path} is not clear: its suffix {path.suffix!r} is none of {suffixes}. "
            f"Give format=, such as format='folder'."
        )
    return _known("folder")


def _names() -> list[str]:
    return [*_OWN, *plugin_names("formats"), *_registered]


def _known(name: str) -> Format:
    """Return a format by its name."""
    if name in _registered:
        return _registered[name]
    if name not in _OWN:
        return load_plugin("formats", name)
    found: Format = import_module(f"torchrl_mt.datasets.formats.{name}").FORMAT
    return found
