"""A data set of whole episodes on disk, read as it is needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

from torchrl_mt.checks import check_positive_integer
from torchrl_mt.data._store.steps import Path, Steps, pack, select
from torchrl_mt.datasets._encoding.episode_steps import steps_of
from torchrl_mt.datasets._encoding.growing_prompts import read_steps, whole_schema
from torchrl_mt.datasets._encoding.schema import EpisodeSchema, Field
from torchrl_mt.datasets._files.readers import DatasetError, FormatReader, Runs, WholeReader
from torchrl_mt.datasets.registry import find_format

__all__ = ["EpisodeDataset", "open_reader", "open_saved"]

_logger = logging.getLogger("torchrl_mt")


class EpisodeDataset:
    """Episodes on disk, of any format.

    Opening one reads the number and lengths of its episodes; steps are read when they are asked for.
    Episodes that are appended later are not seen. Each process of a ``DataLoader`` opens the
    files for itself.

    Args:
        path: file or folder that :func:`~torchrl_mt.datasets.open_episodes` wrote, or a Minari or
            LeRobot (v3) folder.
        keys: entries to read; a key of a nested TensorDict, such as ``"next"``, names all in it. None
            reads all.
        format: name of the format; None finds it by the content.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        DatasetError: if it cannot be read.
        ImportError: if the format needs a library that is not installed; names the extra.
        KeyError: if ``keys`` names no entry.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_mt.datasets import open_episodes
        >>> path = FilePath(tempfile.mkdtemp(), "walks.jsonl")
        >>> with open_episodes(path) as out:
        ...     out.write_episode({"action": torch.arange(3)}, metadata={"task": "left"})
        ...     out.write_episode({"action": torch.arange(2)})
        >>> dataset = EpisodeDataset(path)
        >>> len(dataset), dataset.lengths, dataset.num_clips(2)
        (2, tensor([3, 2]), 3)
        >>> dataset.episode(0)["action"], dataset.metadata(0)
        (tensor([0, 1, 2]), {'task': 'left'})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keys: Sequence[NestedKey] | None = None,
        *,
        format: str | None = None,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a string or a path, got {type(path).__name__}.")
        if isinstance(keys, (str, tuple)):
            raise TypeError(f"keys must be a list of keys, got {keys!r}: give [{keys!r}].")
        self.path = FilePath(path).expanduser().resolve()
        if not self.path.exists():
            raise FileNotFoundError(f"there is no data set at {self.path}.")
        self.format = find_format(self.path, format).name
        reader = open_reader(self.path, self.format)
        self._opened: tuple[int, FormatReader] | None = os.getpid(), reader
        self._lengths = np.ascontiguousarray(reader.lengths, dtype=np.int64)
        self._identity = reader.identity
        if keys is None or not len(self._lengths):
            self._chosen: tuple[Path, ...] | None = None
        else:
            self._chosen = tuple(select(whole_schema(reader.schema).fields, keys, "keys"))

    @property
    def _reader(self) -> FormatReader:
        """The files, opened by this very process."""
        if self._opened is None or self._opened[0] != os.getpid():
            reader = open_reader(self.path, self.format)
            lengths = reader.lengths[: len(self._lengths)]
            if reader.identity != self._identity or not np.array_equal(lengths, self._lengths):
                raise self._replaced()
            self._opened = os.getpid(), reader
        return self._opened[1]

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self._lengths)

    def __getitem__(self, i: Any) -> NoReturn:
        """Refuse: a ``DataLoader`` would take episodes, which differ in length, for a batch."""
        raise TypeError(
            "an EpisodeDataset has no items: dataset.episode(i) is an episode, dataset.episodes() "
            "iterates over them, and a DataLoader takes ClipDataset(dataset, slice_len)."
        )

    @property
    def lengths(self) -> Tensor:
        """int64 ``[E]``: steps of each episode."""
        return torch.from_numpy(self._lengths.copy())

    @property
    def keys(self) -> list[NestedKey]:
        """The entries that are read."""
        return [unravel_key(path) for path in self.fields]

    def num_clips(self, span: int) -> int:
        """Count the clips: runs of ``span`` consecutive steps of one episode.

        Raises:
            ValueError: if ``span`` is not a positive integer.
        """
        span = check_positive_integer("span", span)
        return int(np.maximum(self._lengths - (span - 1), 0).sum())

    def episode(self, i: int) -> Any:
        """Return an episode as a TED TensorDict ``[T]``.

        Raises:
            IndexError: if there is no such episode. A negative ``i`` counts from the last.
            DatasetError: if it cannot be read.
        """
        i = self._number(i)
        return pack(self.read(Runs.whole(i, int(self._lengths[i]))))

    def episodes(self, *, skip_unreadable: bool = False) -> Iterator[Any]:
        """Iterate over the episodes.

        Args:
            skip_unreadable: whether to leave out episodes that cannot be read, with a warning, instead
                of raising.

        Raises:
            DatasetError: if one cannot be read.
        """
        for i in range(len(self)):
            try:
                episode = self.episode(i)
            except DatasetError as error:
                if not skip_unreadable:
                    raise
                _logger.warning("%s It is left out.", error)
                continue
            yield episode

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata that an episode was written with; ``{}`` without any.

        Raises:
            IndexError: if there is no such episode. A negative ``i`` counts from the last.
            DatasetError: if they cannot be read.
        """
        i = self._number(i)
        try:
            return self._reader.metadata(i)
        except Exception as error:
            raise self._unreadable(f"the metadata of episode {i}", error) from error

    def read(self, runs: Runs, paths: Iterable[Path] | None = None) -> Steps:
        """Read steps of several episodes at once, of these entries or of all.

        Raises:
            DatasetError: if one of the episodes cannot be read; names it.
        """
        try:
            return read_steps(self._reader, runs, self.fields if paths is None else paths)
        except ImportError:
            raise
        except Exception as error:
            if len(runs.episodes) > 1:
                # Which of them is it?
                for i in np.unique(runs.episodes).tolist():
                    self.read(Runs.whole(i, int(self._lengths[i])), paths)
            raise self._unreadable(f"episode {int(runs.episodes[0])}", error) from error

    @property
    def fields(self) -> Mapping[Path, Field]:
        """Kind, shape and dtype of the entries that are read."""
        fields = whole_schema(self._reader.schema).fields
        return fields if self._chosen is None else {path: fields[path] for path in self._chosen}

    def close(self) -> None:
        """Close the files. They are opened again when something is read."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[1].close()
        self._opened = None

    def __enter__(self) -> EpisodeDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __repr__(self) -> str:
        return (
            f"EpisodeDataset({str(self.path)!r}, format={self.format!r}, episodes={len(self)}, "
            f"steps={int(self._lengths.sum())})"
        )

    def _unreadable(self, what: str, error: Exception) -> DatasetError:
        """Say why something cannot be read."""
        if self._opened is not None and self._opened[1].was_replaced():
            return self._replaced()
        return DatasetError(f"{what} of {self.path} cannot be read: {error}")

    def _replaced(self) -> DatasetError:
        return DatasetError(
            f"{self.path} was replaced since it was opened: open it again, and make the clips of it "
            f"again."
        )

    def _number(self, i: int) -> int:
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise TypeError(f"i must be an integer, got {i!r}.")
        if not -len(self) <= i < len(self):
            raise IndexError(f"episode {i} is out of range: {self.path} has {len(self)} episodes.")
        return i % len(self)


def open_reader(path: FilePath, format: str) -> FormatReader:
    """Open a data set.

    Raises:
        ValueError: if its format cannot be read.
        DatasetError: if it cannot be read.
    """
    found = find_format(path, format)
    if found.reader is None:
        raise ValueError(f"format {format!r} can be written only: {path} cannot be read.")
    try:
        reader = found.reader(path)
    except (ImportError, DatasetError):
        raise
    except Exception as error:
        raise DatasetError(f"{path} cannot be read as {format!r}: {error}") from error
    return reader if isinstance(reader, FormatReader) else _OtherReader(reader)


class _OtherReader(WholeReader):
    """A reader that gives whole episodes only, as those of registered formats do."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        lengths = np.asarray(reader.lengths, dtype=np.int64).reshape(-1)
        first = steps_of(reader.episode(0)) if len(lengths) else Steps(0, {})
        super().__init__(EpisodeSchema.of(first, share_next=False), lengths)

    def whole(self, episode: int) -> Steps:
        """Read an episode."""
        return steps_of(self._reader.episode(episode), self.schema.fields)

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        return dict(self._reader.metadata(i)) if hasattr(self._reader, "metadata") else {}

    def close(self) -> None:
        """Close the reader."""
        if hasattr(self._reader, "close"):
            self._reader.close()


def open_saved(path: FilePath) -> Any:
    """Open the tensors of a ``.pt`` file, a TensorDict that ``save`` wrote, or a data set."""
    if path.suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    if (path / "meta.json").is_file():
        return TensorDict.load_memmap(path, allow_pickle=False)
    return EpisodeDataset(path)
