"""Writing episodes to disk or into memory, one by one, with the same methods.

An episode is written whole or not at all.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

from tensordict.utils import NestedKey
from torchrl.data import ReplayBuffer

from torchrl_mt.checks import check_choice
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.data._store.dataset_episodes import check_metadata, check_one_episode
from torchrl_mt.data._store.steps import Steps, pack, select
from torchrl_mt.datasets._encoding.episode_steps import steps_of
from torchrl_mt.datasets._encoding.growing_prompts import whole_schema
from torchrl_mt.datasets._encoding.schema import EpisodeSchema
from torchrl_mt.datasets._encoding.values import from_json_text, to_json_text
from torchrl_mt.datasets._files.episode_folder import foreign_entries
from torchrl_mt.datasets._files.readers import DatasetError
from torchrl_mt.datasets._files.write_lock import WriteLock, delete_unfinished
from torchrl_mt.datasets.dataset import open_reader
from torchrl_mt.datasets.registry import Format, Mode, find_format

__all__ = ["BufferWriter", "DatasetWriter", "EpisodeSink", "episode_writer", "open_episodes"]


class EpisodeSink(ABC):
    """What episodes are written to: a data set on disk, or a storage."""

    @abstractmethod
    def write_episode(self, episode: Any, metadata: dict[str, Any] | None = None) -> None:
        """Write one whole episode."""

    def write_episodes(self, episodes: Iterable[Any]) -> None:
        """Write episodes, one after the other; those before an error are written.

        Args:
            episodes: each as for :meth:`write_episode`, or a pair of it and its metadata.

        Raises:
            TypeError: as for :meth:`write_episode`, with the number of the episode; or if ``episodes``
                is a single one.
            ValueError: likewise.
        """
        write_all(self, episodes)

    def close(self) -> None:  # noqa: B027 - a storage needs no end
        """Finish writing."""

    def __enter__(self) -> EpisodeSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class DatasetWriter(EpisodeSink):
    """Writes episodes to a data set on disk; made by :func:`open_episodes`."""

    def __init__(
        self, path: str | os.PathLike[str], format: str | None, mode: Mode, options: dict[str, Any]
    ) -> None:
        check_choice("mode", mode, ("error", "append", "overwrite"))
        self.path = FilePath(path).expanduser().resolve()
        self.mode = mode
        exists = self.path.exists() and not _is_empty_folder(self.path)
        if exists and mode == "error":
            raise FileExistsError(
                f"{self.path} exists: give mode='append' to add episodes, or mode='overwrite' to "
                f"replace it."
            )
        try:
            known = find_format(self.path, None if exists else format)
        except DatasetError as error:
            raise DatasetError(f"{error} Nothing else is replaced or added to.") from None
        if mode == "overwrite":
            known = _replacing(self.path, known, format, exists)
        elif format is not None and known.name != format:
            raise ValueError(
                f"format must be that of the data set to append to, {known.name!r}, got {format!r}."
            )
        if known.writer is None:
            raise ValueError(f"format {known.name!r} can be read only: choose another one.")
        known.check_options(options)
        above = next(folder for folder in self.path.parents if folder.exists())
        if not above.is_dir():
            raise NotADirectoryError(f"{self.path} cannot be made: {above} is a file.")
        self.format = known.name
        self._schema: EpisodeSchema | None = None
        self._closed = False
        self._process, self._one_at_a_time = os.getpid(), threading.Lock()
        self._lock = WriteLock(self.path)
        try:
            delete_unfinished(self.path)
            if exists and mode == "append":
                reader = open_reader(self.path, known.name)
                self._schema = whole_schema(reader.schema) if len(reader.lengths) else None
                reader.close()
            self._writer = known.writer(self.path, mode, **options)
        except BaseException:
            self._lock.release()
            raise
        self._abort = getattr(self._writer, "abort", self._writer.close)
        replaces = mode == "overwrite"
        end = self._abort if replaces else self._writer.close
        self._unclosed = weakref.finalize(
            self, _end_unclosed, self.path, replaces, end, self._lock, self._process
        )

    def write_episode(self, episode: Any, metadata: dict[str, Any] | None = None) -> None:
        """Write one whole episode. It is readable once this returns (``overwrite``: once closed).

        Args:
            episode: a TED TensorDict ``[T]``, or a dict of arrays ``[T, ...]`` or of lists of steps.
            metadata: what holds for the whole episode: a dict of numbers, strings, lists, dicts.

        Raises:
            ValueError: if it is empty, does not fit the first episode, or the writer is closed. Nothing
                is written then.
            TypeError: if it is no episode, or a value cannot be written to a file.
        """
        metadata = _checked_metadata(metadata)
        steps = steps_of(episode, self._schema.fields if self._schema else {})
        check_one_episode(steps)
        with self._one_at_a_time:
            if self._closed:
                raise ValueError(
                    f"the writer of {self.path} is closed: open it with mode='append'."
                )
            if self._process != os.getpid():
                raise RuntimeError(
                    f"the writer of {self.path} belongs to another process: write from that one, or "
                    f"open a data set in each."
                )
            schema = self._schema or EpisodeSchema.of(steps)
            self._writer.write_episode(pack(schema.conform(steps), unread=True), metadata)
            self._schema = schema

    def close(self) -> None:
        """Finish the data set. Without any episode, nothing is made or replaced."""
        if not self._closed:
            self._finish(self._writer.close)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; with ``overwrite``, what was there remains if an exception ended the block."""
        if not self._closed:
            unfinished = kind is not None and self.mode == "overwrite"
            self._finish(self._abort if unfinished else self._writer.close)

    def _finish(self, finish: Callable[[], None]) -> None:
        self._closed = True
        self._unclosed.detach()
        try:
            finish()
        finally:
            self._lock.release()

    def __repr__(self) -> str:
        return f"DatasetWriter({str(self.path)!r}, format={self.format!r}, mode={self.mode!r})"


class BufferWriter(EpisodeSink):
    """Writes episodes into a storage; made by :func:`episode_writer`."""

    def __init__(
        self,
        storage: EpisodeStorage,
        key_filter: Callable[[Any], Any] | Collection[NestedKey] | None,
    ) -> None:
        self.storage = storage
        self._filter = key_filter

    def write_episode(self, episode: Any, metadata: dict[str, Any] | None = None) -> None:
        """Store one whole episode; arguments and errors as for :class:`DatasetWriter`.

        Raises:
            ValueError: also if it exceeds a budget of the storage.
        """
        metadata = _checked_metadata(metadata)
        if callable(self._filter):
            episode = self._filter(episode)
        schema = self.storage.schema
        steps = steps_of(episode, schema.entries if schema else {})
        if self._filter is not None and not callable(self._filter):
            steps = Steps(steps.length, select(steps.columns, self._filter, "key_filter"))
        self.storage.append(pack(steps, unread=True), metadata=metadata)


def open_episodes(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    mode: Mode = "error",
    **options: Any,
) -> DatasetWriter:
    """Open a data set on disk to write episodes to.

    Use it in a ``with`` block. An episode is on disk once ``write_episode`` returns, and stays readable
    even if the process is killed. An exception in the block loses only the episode that was being
    written. One writer at a time may have a data set open.

    Args:
        path: file or folder; missing parent folders are made.
        format: ``"hdf5"``, ``"folder"``, ``"arrow"``, ``"lance"``, ``"video"``, ``"jsonl"``, or one of
            :func:`register_format`. None finds it by the suffix (``.h5``, ``.hdf5``, ``.lance``,
            ``.jsonl``; none means ``"folder"``) or by what is there.
        mode: ``"error"`` refuses a path that exists, ``"append"`` adds to what is there, and
            ``"overwrite"`` replaces it at once when the writer is closed. If an exception ends the
            ``with`` block of an ``"overwrite"``, what was there remains.
        **options: further options of the format, such as ``jpeg_quality`` of ``"folder"``.

    Raises:
        FileExistsError: if ``path`` exists and ``mode`` is ``"error"``.
        NotADirectoryError: if a parent of ``path`` is a file.
        TypeError: if the format has no such option.
        BlockingIOError: if another writer has it open.
        ValueError: if ``mode`` or ``format`` is unknown, or ``format`` is not that of what is there.
        DatasetError: if what is there is no data set, or cannot be read.
        ImportError: if the format needs a library that is not installed; names the extra.

    Examples:
        >>> import tempfile, torch
        >>> path = FilePath(tempfile.mkdtemp(), "demos.jsonl")
        >>> with open_episodes(path) as out:
        ...     out.write_episode({"action": [0, 1, 1]}, metadata={"player": "Ann"})
        >>> with open_episodes(path, mode="append") as out:
        ...     out.write_episode({"action": [0.5]})
        Traceback (most recent call last):
            ...
        ValueError: 'action' must be as in the first episode: expected () torch.int64 per step, got
            () torch.float32 per step. Integers and floats do not mix: give float(value) from the first
            episode on.
    """
    return DatasetWriter(path, format, mode, options)


def episode_writer(
    buffer: EpisodeStorage | ReplayBuffer,
    key_filter: Callable[[Any], Any] | Collection[NestedKey] | None = None,
) -> BufferWriter:
    """Return a writer like that of :func:`open_episodes`, into a buffer in memory.

    Whatever writes episodes to disk can so write to a buffer.

    Args:
        buffer: an :class:`~torchrl_mt.data.EpisodeStorage`, or a ``ReplayBuffer`` on one.
        key_filter: the keys to store (of the others, nothing is stored), or a function that gets each
            episode as it was given and returns the one to store; None stores all.

    Raises:
        TypeError: if ``buffer`` has no ``EpisodeStorage``.
        KeyError: when an episode is written that has none of one of the keys.

    Examples:
        >>> from torchrl_mt.data import EpisodeStorage
        >>> storage = EpisodeStorage(100)
        >>> with episode_writer(storage, key_filter=["action"]) as out:
        ...     out.write_episode({"action": [0, 1], "debug": ["a", "b"]}, metadata={"task": 3})
        >>> storage.episode(0)["action"], storage.metadata(0)
        (tensor([0, 1]), {'task': 3})
    """
    storage = storage_of(buffer, "buffer")
    if isinstance(key_filter, str):
        raise TypeError(f"key_filter must be a list of keys or a function, got {key_filter!r}.")
    return BufferWriter(storage, key_filter)


def write_all(out: EpisodeSink, episodes: Iterable[Any]) -> int:
    """Write episodes and return their number; see :meth:`EpisodeSink.write_episodes`."""
    is_one = isinstance(episodes, Mapping) and getattr(episodes, "ndim", 1) == 1
    if is_one or not isinstance(episodes, Iterable):
        raise TypeError(
            f"the episodes must be a list or another iterable of episodes, got "
            f"{type(episodes).__name__}: a single episode goes to write_episode."
        )
    number = 0
    for each in episodes:
        episode, metadata = each if isinstance(each, tuple) else (each, None)
        try:
            out.write_episode(episode, metadata)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"episode {number}: {error}") from error
        number += 1
    return number


def storage_of(buffer: Any, name: str) -> EpisodeStorage:
    """Return the ``EpisodeStorage`` of a buffer; ``TypeError`` if it has none."""
    storage = buffer.storage if isinstance(buffer, ReplayBuffer) else buffer
    if not isinstance(storage, EpisodeStorage):
        raise TypeError(
            f"{name} must be an EpisodeStorage or a ReplayBuffer on one, got "
            f"{type(storage).__name__}."
        )
    return storage


def _checked_metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy of the metadata; ``TypeError`` if a file could not hold it."""
    check_metadata(metadata)
    try:
        return dict(from_json_text(to_json_text(metadata or {})))  # A copy, as a file gives it.
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: {error}") from error


def _end_unclosed(
    path: FilePath, replaces: bool, end: Callable[[], None], lock: WriteLock, process: int
) -> None:
    """End a writer that nobody closed, with a warning; a fork of the process has not opened it."""
    if process != os.getpid():
        return
    warnings.warn(
        f"the writer of {path} was never closed{', so nothing is replaced' * replaces}: call close(), "
        f"or use it in a with block.",
        ResourceWarning,
        stacklevel=2,
    )
    try:
        end()
    finally:
        lock.release()


def _replacing(path: FilePath, there: Format, format: str | None, exists: bool) -> Format:
    """Return the format that replaces what is there; refuse to delete what no writer here has made."""
    known = find_format(path, format or there.name)
    if exists and path.is_dir() and known.name != there.name:
        others = foreign_entries(path) if there.writer else [entry.name for entry in path.iterdir()]
        if others:
            raise DatasetError(
                f"{path} cannot be replaced by {known.name!r}, which would delete {others[0]!r}: no "
                f"writer of torchrl_mt made it. Move it away, or write to another path."
            )
    return known


def _is_empty_folder(path: FilePath) -> bool:
    return path.is_dir() and not any(path.iterdir())
