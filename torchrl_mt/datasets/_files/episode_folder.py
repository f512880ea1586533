"""A data set in a folder: its header, the list of its episodes, and a folder for their data.

The header names the folder of the data, so replacing the header replaces everything at once. An episode
counts from when its record is in the list, which is written last.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_mt.datasets._encoding.schema import EpisodeSchema
from torchrl_mt.datasets._encoding.values import from_json_text
from torchrl_mt.datasets._files.readers import DatasetError
from torchrl_mt.datasets._files.write_lock import replace, unfinished_path
from torchrl_mt.datasets._files.writers import EncodedEpisode
from torchrl_mt.datasets.registry import Mode

__all__ = ["EpisodeFolder", "EpisodeList", "format_in"]

_HEADER = "DATASET"
_RECORDS = "episodes.index"
_METADATA = "episodes.metadata"
_VERSION = 2
_RECORD = np.dtype([("length", "<i8"), ("own_next", "<i8"), ("metadata_end", "<i8")])


def format_in(path: Path) -> str | None:
    """Return the format that the header of a folder names; None if it is no such folder."""
    try:
        header = json.loads((path / _HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    name = header.get("format") if isinstance(header, dict) else None
    return name if isinstance(name, str) else None


class EpisodeList:
    """The episodes of a folder: their lengths and metadata.

    Args:
        folder: the folder of the data.
    """

    def __init__(self, folder: Path) -> None:
        self._metadata = folder / _METADATA
        size = (folder / _RECORDS).stat().st_size
        # A killed writer may have left part of a record.
        records = np.fromfile(folder / _RECORDS, _RECORD, size // _RECORD.itemsize)
        self.lengths = records["length"].astype(np.int64)
        self.own_next = records["own_next"].astype(np.int64)
        self._ends = records["metadata_end"].astype(np.int64)

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        begin, end = int(self._ends[i - 1]) if i else 0, int(self._ends[i])
        with open(self._metadata, "rb") as file:
            file.seek(begin)
            text = file.read(end - begin)
        return dict(from_json_text(text))

    @property
    def size(self) -> int:
        """Bytes of the metadata of all episodes."""
        return int(self._ends[-1]) if len(self._ends) else 0


class EpisodeFolder:
    """Writes the header and the list of a folder of episodes.

    Write the data of an episode into ``data`` first, then :meth:`commit` it.

    Args:
        path: the folder of the data set.
        format: name of its format.
        mode: ``"append"`` or ``"error"`` write into ``path`` from the first episode on, ``"overwrite"``
            when it is finished.
        given: options of the format that the user gives, kept in the header; None means not given.
        defaults: the options of a new data set where they are not given.

    Raises:
        ValueError: if an option is given and is not that of the data set to append to.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        mode: Mode,
        given: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path.absolute()
        self.format = format
        self.options = dict(defaults or {})
        """Options of the format; a reader finds them in the header."""
        self.schema: EpisodeSchema | None = None
        self.num_episodes = 0
        self._records: io.FileIO | None = None
        self._metadata: io.FileIO | None = None
        self._new: Path | None = None
        """What becomes ``path`` with the first episode."""
        header = self.read_header()
        self._replaces = mode == "overwrite"
        self._before = None if header is None else self.path / header["data"]
        if header is not None:
            # What killed writers left: nobody else writes now.
            for each in self.path.glob("data-*"):
                if each.name != header["data"]:
                    shutil.rmtree(each, ignore_errors=True)
        if header is not None and not self._replaces:
            self.options |= header.get("options", {})
            self._check_same(given or {})
            self.schema = EpisodeSchema.from_json(header["schema"])
            self.data = self.path / header["data"]
            episodes = EpisodeList(self.data)
            self.num_episodes = len(episodes.lengths)
            self._open()
            assert self._records is not None
            assert self._metadata is not None
            # What a killed writer left of an episode that does not count.
            self._records.truncate(self.num_episodes * _RECORD.itemsize)
            self._metadata.truncate(episodes.size)
        else:
            self.options |= {
                name: value for name, value in (given or {}).items() if value is not None
            }
            self._name = f"data-{uuid.uuid4().hex[:12]}"
            self._new = None if self._before is not None else unfinished_path(self.path)
            self.data = (self._new or self.path) / self._name

    def _check_same(self, given: Mapping[str, Any]) -> None:
        """Refuse options that differ from those of the data set to append to (``ValueError``)."""
        for name, value in given.items():
            if value is not None and value != self.options[name]:
                raise ValueError(
                    f"{name} must be that of the data set to append to, {self.options[name]!r}, got "
                    f"{value!r}: leave it out, or write another data set."
                )

    def make(self) -> Path:
        """Make the folder of the data, if it is not there, and return it."""
        if self._records is None:
            self.data.mkdir(parents=True, exist_ok=True)
            self._open()
        return self.data

    def commit(self, episode: EncodedEpisode) -> None:
        """Count an episode, whose data are written."""
        self.make()
        assert self._records is not None
        assert self._metadata is not None
        before, end = self.num_episodes, os.fstat(self._metadata.fileno()).st_size
        try:
            text = f"{episode.metadata}\n".encode()
            _write_all(self._metadata, text)
            record = (episode.length, episode.own_next, end + len(text))
            _write_all(self._records, np.array([record], _RECORD).tobytes())
            self.schema = episode.schema
            if self._new is not None and not self._replaces:
                self._publish(self._new)
            self.num_episodes = before + 1
        except BaseException:
            # The disk is full, or the user interrupted: the episode does not count.
            self.num_episodes = before
            self._records.truncate(before * _RECORD.itemsize)
            self._metadata.truncate(end)
            raise

    def finish(self) -> None:
        """Close the files; put what was written in the place of what was there."""
        self._close()
        if not self._replaces or not self.num_episodes:
            self.abort()
        elif self._new is not None:
            self._publish(self._new)
        else:
            assert self._before is not None
            self.write_header(self.path)
            shutil.rmtree(self._before, ignore_errors=True)

    def abort(self) -> None:
        """Delete what was written and is not part of the data set."""
        self._close()
        if self._new is not None:
            shutil.rmtree(self._new, ignore_errors=True)
        elif self._replaces:
            shutil.rmtree(self.data, ignore_errors=True)

    def _publish(self, new: Path) -> None:
        """Put a new folder at the path, where there is nothing, an empty folder, or another format."""
        self.write_header(new)
        if self._replaces and self.path.exists():
            replace(new, self.path)
        else:
            if self.path.is_dir():
                self.path.rmdir()  # It is empty.
            os.rename(new, self.path)
        self._new, self.data = None, self.path / self._name

    @property
    def root(self) -> Path:
        """The folder that is or becomes the data set."""
        return self._new or self.path

    @property
    def header(self) -> dict[str, Any]:
        """The header of what is being written."""
        assert self.schema is not None
        return {
            "format": self.format,
            "version": _VERSION,
            "data": self.data.name,
            "options": self.options,
            "schema": self.schema.to_json(),
        }

    def read_header(self) -> dict[str, Any] | None:
        """Read the header of what is there; None if there is no data set."""
        return read_header(self.path) if (self.path / _HEADER).exists() else None

    def write_header(self, folder: Path) -> None:
        """Put the header into ``folder``, in one step, in the place of the one that is there."""
        partial = folder / f".{_HEADER}.{uuid.uuid4().hex}"
        partial.write_text(json.dumps(self.header), encoding="utf-8")
        os.replace(partial, folder / _HEADER)

    def _open(self) -> None:
        # Without a buffer: what failed to be written must not be written later.
        self._records = (self.data / _RECORDS).open("ab", buffering=0)
        self._metadata = (self.data / _METADATA).open("ab", buffering=0)

    def _close(self) -> None:
        for file in (self._records, self._metadata):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


def read_header(path: Path) -> dict[str, Any]:
    """Read the header of a folder.

    Raises:
        DatasetError: if there is none, or it is of a newer version.
    """
    try:
        header = json.loads((path / _HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path / _HEADER} is no header of a data set: {error!r}.") from error
    return checked_header(path / _HEADER, header)


def checked_header(path: Path, header: Any) -> dict[str, Any]:
    """Return a header that was read from ``path``; errors as for :func:`read_header`."""
    try:
        version, _ = header["version"], header["data"]
        newer = version > _VERSION
    except (KeyError, TypeError) as error:
        raise DatasetError(f"{path} has no header of a data set: {error!r}.") from error
    if newer:
        raise DatasetError(
            f"{path} was written by a newer torchrl_mt (version {version} of its layout, this one "
            f"reads {_VERSION}): upgrade torchrl_mt."
        )
    return dict(header)


def _write_all(file: io.FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
