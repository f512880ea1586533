"""A log of the newest episodes, for formats whose large files hold many episodes.

Each episode is appended to the log before its record is in the list of episodes, which makes it count.
From time to time, and at the end, the log is folded into a large file. The number of episodes in the
large files says what is in the log, so an episode is never read twice, whenever the writer is killed.
"""

from __future__ import annotations

import io
import re
from abc import abstractmethod
from collections.abc import Sequence
from itertools import islice
from pathlib import Path as FilePath
from typing import Any

from torchrl_mt.datasets._files.checksums import crcs_of
from torchrl_mt.datasets._files.episode_folder import EpisodeFolder, write_all
from torchrl_mt.datasets._files.readers import DatasetError
from torchrl_mt.datasets._files.writers import EncodedEpisode, FormatWriter
from torchrl_mt.datasets.registry import Mode
from torchrl_mt.paths import inside

__all__ = ["LoggedWriter", "has_log", "read_log"]

_LOG = re.compile(r"recent-\d{9,}\.arrows")


class LoggedWriter(FormatWriter):
    """Writes a format through a log.

    Args:
        folder: writes the list of episodes; the log is in its ``data``.
        mode: see :func:`~torchrl_mt.datasets.open_episodes`.
    """

    fold_bytes = 2**26
    """Bytes of the log at which it is folded."""
    fold_episodes = 2**12
    """Episodes of the log at which it is folded; each costs a reader some kilobytes."""

    def __init__(self, folder: EpisodeFolder, mode: Mode) -> None:
        super().__init__(folder.path, mode)
        self.folder = folder
        self.schema = folder.schema
        self._log: _Log | None = None
        if self.schema is not None:
            first, end = self.num_folded(), folder.num_episodes
            killed = [each for each in folder.data.iterdir() if _LOG.fullmatch(each.name)]
            if first < end:
                self.fold(first, read_log(folder.data, first, end - first))
            for each in killed:
                each.unlink(missing_ok=True)
            self.tidy()

    @abstractmethod
    def num_folded(self) -> int:
        """Return how many of the first episodes the large files have."""

    @abstractmethod
    def batch(self, episode: EncodedEpisode) -> Any:
        """Return the ``RecordBatch`` of an episode, whose number is ``folder.num_episodes``."""

    @abstractmethod
    def fold(self, first: int, batches: Sequence[Any]) -> None:
        """Put episodes, the first of which has the number ``first``, into a large file, in one step."""

    @abstractmethod
    def tidy(self) -> None:
        """Delete what killed writers left, and join small files where there are many."""

    def write(self, episode: EncodedEpisode) -> None:
        """Write an episode."""
        if self._log is not None:
            count = self.folder.num_episodes - self._log.first
            if self._log.size >= self.fold_bytes or count >= self.fold_episodes:
                self._fold_log()
        batch = self.batch(episode)
        if self._log is None:
            self._log = _Log(self.folder.make(), self.folder.num_episodes, batch.schema)
        self._log.append(self.folder.num_episodes, batch)
        self.folder.commit(episode, crcs_of(episode.schema, episode.columns))

    def close(self) -> None:
        """Finish the data set."""
        try:
            self._fold_log()
        except BaseException:
            # What is in the log counts, unless it was to replace something.
            if self.mode == "overwrite":
                self.abort()
            raise
        self.folder.finish()
        if self.folder.num_episodes:
            self.tidy()

    def abort(self) -> None:
        """Give up an ``overwrite``."""
        if self._log is not None:
            self._log.close()
        self.folder.abort()

    def _fold_log(self) -> None:
        log = self._log
        if log is None:
            return
        count = self.folder.num_episodes - log.first
        if count:
            self.fold(log.first, read_log(self.folder.data, log.first, count))
        self._log = None
        log.close()
        (self.folder.data / log.name).unlink()


def has_log(data: FilePath, first: int) -> bool:
    """Whether there is a log whose first episode has this number."""
    return (data / _name(first)).exists()


def read_log(data: FilePath, first: int, count: int) -> list[Any]:
    """Read the episodes that are in no large file: one ``RecordBatch`` each, not copied.

    Args:
        data: the folder of the log.
        first: number of the first of them.
        count: how many there are.

    Raises:
        FileNotFoundError: if there is no log that begins there.
        DatasetError: if it has fewer.
    """
    import pyarrow as pa

    path = inside(data, _name(first))
    try:
        # What comes after them, a killed writer left.
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            batches = list(islice(stream, count))
        for batch in batches:
            batch.validate(full=True)  # Offsets that are wrong would be followed.
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DatasetError(f"{path} is damaged: {error}") from error
    if len(batches) < count:
        raise DatasetError(f"{path} is damaged: it has {len(batches)} episodes of {count}.")
    return batches


class _Log:
    """An Arrow IPC stream with one record batch per episode.

    Args:
        data: folder of the log.
        first: number of its first episode.
        schema: of the batches.
    """

    def __init__(self, data: FilePath, first: int, schema: Any) -> None:
        self.name, self.first = _name(first), first
        self._file = io.FileIO(data / self.name, "w")
        write_all(self._file, schema.serialize())
        self._ends = [self.size]
        """Where each episode begins, and the last one ends."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.tell()

    def append(self, number: int, batch: Any) -> None:
        """Write the episode of this number, in the place of one that was not committed."""
        del self._ends[number - self.first + 1 :]
        if self.size > self._ends[-1]:
            self._file.seek(self._ends[-1])
            self._file.truncate()
        write_all(self._file, batch.serialize())
        self._ends.append(self.size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _name(first: int) -> str:
    return f"recent-{first:09d}.arrows"
