"""A data set in a folder: its header, the list of its episodes, and a folder for their data.

The header names the folder of the data, so replacing the header replaces everything at once. An episode
counts from when its record is in the list, which is written last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchrl_mt.datasets.readers import DatasetError
from torchrl_mt.datasets.registry import Mode
from torchrl_mt.datasets.schema import EpisodeSchema
from torchrl_mt.datasets.values import from_json_text
from torchrl_mt.datasets.write_lock import replace, unfinished_path

__all__ = ["EpisodeFolder", "EpisodeList", "format_in"]

_HEADER = "DATASET"
_RECORDS = "episodes.index"
_METADATA = "episodes.metadata"
_VERSION = 1
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
    """

    def __init__(self, path: Path, format: str, mode: Mode) -> None:
        self.path = path.absolute()
        self.format = format
        self.schema: EpisodeSchema | None = None
        self.num_episodes = 0
        self._records: BinaryIO | None = None
        self._metadata: BinaryIO | None = None
        self._new: Path | None = None
        """What becomes ``path`` with the first episode."""
        header = read_header(self.path) if (self.path / _HEADER).exists() else None
        self._replaces = mode == "overwrite"
        self._before = None if header is None else self.path / header["data"]
        if header is not None:
            # What killed writers left: nobody else writes now.
            for each in self.path.glob("data-*"):
                if each.name != header["data"]:
                    shutil.rmtree(each, ignore_errors=True)
        if header is not None and not self._replaces:
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
            self._name = f"data-{uuid.uuid4().hex[:12]}"
            self._new = None if self._before is not None else unfinished_path(self.path)
            self.data = (self._new or self.path) / self._name

    def make(self) -> Path:
        """Make the folder of the data, if it is not there, and return it."""
        if self._records is None:
            self.data.mkdir(parents=True, exist_ok=True)
            self._open()
        return self.data

    def commit(self, schema: EpisodeSchema, length: int, own_next: int, metadata: str) -> None:
        """Count an episode, whose data are written."""
        self.make()
        assert self._records is not None
        assert self._metadata is not None
        text = metadata.encode()
        self._metadata.write(text)
        self._metadata.flush()
        record = np.array([(length, own_next, self._metadata.tell())], _RECORD)
        self._records.write(record.tobytes())
        self._records.flush()
        self.schema = schema
        self.num_episodes += 1
        if self._new is not None and not self._replaces:
            self._publish(self._new)

    def finish(self) -> None:
        """Close the files; put what was written in the place of what was there."""
        self._close()
        if not self._replaces or not self.num_episodes:
            self.abort()
        elif self._new is not None:
            self._publish(self._new)
        else:
            assert self._before is not None
            self._write_header(self.path)
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
        self._write_header(new)
        if self._replaces and self.path.exists():
            replace(new, self.path)
        else:
            if self.path.is_dir():
                self.path.rmdir()  # It is empty.
            os.rename(new, self.path)
        self._new, self.data = None, self.path / self._name

    def _write_header(self, folder: Path) -> None:
        assert self.schema is not None
        header = {
            "format": self.format,
            "version": _VERSION,
            "data": self._name,
            "schema": self.schema.to_json(),
        }
        partial = folder / f".{_HEADER}.{uuid.uuid4().hex}"
        partial.write_text(json.dumps(header), encoding="utf-8")
        os.replace(partial, folder / _HEADER)

    def _open(self) -> None:
        self._records = (self.data / _RECORDS).open("ab")
        self._metadata = (self.data / _METADATA).open("ab")

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
        version, _ = header["version"], header["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{path / _HEADER} is no header of a data set: {error!r}.") from error
    if version > _VERSION:
        raise DatasetError(
            f"{path} was written by a newer torchrl_mt (version {version} of its layout, this one "
            f"reads {_VERSION}): upgrade torchrl_mt."
        )
    return dict(header)
