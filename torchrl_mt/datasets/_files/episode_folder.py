"""A data set in a folder: its header, the list of its episodes, and a folder for their data.

The header names the folder of the data, so replacing the header replaces everything at once. An episode
counts from when its record is in the list, which is written last.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from torchrl_mt.datasets._encoding.schema import EpisodeSchema
from torchrl_mt.datasets._encoding.values import from_json_text
from torchrl_mt.datasets._files.checksums import Checksums, sealed
from torchrl_mt.datasets._files.readers import DatasetError, check_version
from torchrl_mt.datasets._files.write_lock import replace, unfinished_path
from torchrl_mt.datasets._files.writers import EncodedEpisode
from torchrl_mt.datasets.registry import Mode
from torchrl_mt.paths import inside, replace_file

__all__ = [
    "EpisodeFolder",
    "EpisodeList",
    "checked_header",
    "foreign_entries",
    "format_in",
    "open_folder",
    "read_header",
    "write_all",
]

_HEADER = "DATASET"
_RECORDS = "episodes.index"
_METADATA = "episodes.metadata"
_CHECKSUMS = "episodes.crc32"
_VERSION = 2
_FIRST = [("length", "<i8"), ("own_next", "<i8"), ("metadata_end", "<i8")]
_RECORD = {1: np.dtype(_FIRST), 2: np.dtype([*_FIRST, ("crcs_end", "<i8")])}
"""Of each version; the first had no checksums."""
_DATA = re.compile(r"data-[0-9a-f]{12}")
_PARTS = re.compile(
    r"episodes\.(index|metadata|crc32)|chunk-\d{3,}|\.unfinished|recent-\d{9,}\.arrows|"
    r"\.?episodes-\d{9,}-\d{9,}\.parquet(\.[0-9a-f]{32}\.unfinished)?"
)
"""Names in a folder of data."""
_MADE = re.compile(rf"{_HEADER}|\.{_HEADER}\.[0-9a-f]{{32}}")
"""Names of files in the folder of a data set."""
_LANCE = ("_versions", "_transactions", "_deletions", "_indices")
"""Its folders, beside ``data``."""


def format_in(path: Path) -> str | None:
    """Return the format that the header of a folder names; None if it is no such folder."""
    try:
        header = json.loads(inside(path, _HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    name = header.get("format") if isinstance(header, dict) else None
    return name if isinstance(name, str) else None


class EpisodeList:
    """The episodes of a folder: their lengths, metadata and checksums.

    Args:
        folder: the folder of the data.
        header: that of the data set.

    Raises:
        FileNotFoundError: if there is no list.
        DatasetError: if it is damaged.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self._metadata = folder / _METADATA
        file, record = folder / _RECORDS, _RECORD[header["version"]]
        try:
            for name in (_RECORDS, _METADATA, _CHECKSUMS):
                inside(folder, name)
            # A killed writer may have left part of a record.
            records = np.fromfile(file, record, file.stat().st_size // record.itemsize)
            self.lengths = records["length"].astype(np.int64)
            self.own_next = records["own_next"].astype(np.int64)
            self._ends = records["metadata_end"].astype(np.int64)
            if len(records) < header.get("episodes", 0):
                raise ValueError(f"it has {len(records)} episodes of {header['episodes']}")
            if (self.lengths < 1).any() or (np.diff(self._ends, prepend=0) < 1).any():
                raise ValueError("it has lengths below 1")
            self.checksums: Checksums | None = None
            self.crcs_end = 0
            if header["version"] > 1:
                ends = records["crcs_end"].astype(np.int64)
                values = np.fromfile(folder / _CHECKSUMS, "<u4")
                self.checksums = Checksums(values, ends, self.lengths, self.own_next)
                self.crcs_end = int(ends[-1]) if len(ends) else 0
        except ValueError as error:
            raise DatasetError(f"{file} is damaged: {error}. Restore it from a copy.") from error

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        begin, end = int(self._ends[i - 1]) if i else 0, int(self._ends[i])
        with open(self._metadata, "rb") as file:
            file.seek(begin)
            text = file.read(end - begin)
        try:
            if self.checksums is not None:
                self.checksums.check_metadata(i, text)
            return dict(from_json_text(text))
        except (ValueError, TypeError) as error:
            raise DatasetError(f"{self._metadata} is damaged: {error}.") from error

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
        self._files: list[io.FileIO] = []
        """Metadata, records and checksums; open from the first episode on."""
        self._version = _VERSION
        self._new: Path | None = None
        """What becomes ``path`` with the first episode."""
        header = self.read_header()
        self._replaces = mode == "overwrite"
        self._before: Path | None = None
        if header is not None:
            self._before = inside(self.path, header["data"], to_write=True)
            self._delete_leftovers(header["data"])
        if header is not None and not self._replaces:
            self._version = header["version"]
            self.options |= header.get("options", {})
            self._check_same(given or {})
            self.schema = EpisodeSchema.from_json(header["schema"])
            self.data = self.path / header["data"]
            for name in (_RECORDS, _METADATA, _CHECKSUMS):
                inside(self.data, name, to_write=True)
            episodes = EpisodeList(self.data, header)
            self.num_episodes = self._counted = len(episodes.lengths)
            self._open()
            # What a killed writer left of an episode that does not count.
            crcs = [4 * episodes.crcs_end] * (self._version > 1)
            records = self.num_episodes * _RECORD[self._version].itemsize
            self._truncate([episodes.size, *crcs, records])
        else:
            self.options |= {
                name: value for name, value in (given or {}).items() if value is not None
            }
            self._counted = 0
            self._name = f"data-{uuid.uuid4().hex[:12]}"
            self._new = None if self._before is not None else unfinished_path(self.path)
            self.data = (self._new or self.path) / self._name

    def _delete_leftovers(self, current: str) -> None:
        """Delete the folders that killed writers left: nobody else writes now."""
        for each in self.path.iterdir():
            ours = _DATA.fullmatch(each.name) and each.name != current and not each.is_symlink()
            if ours and ((each / _RECORDS).exists() or not any(each.iterdir())):
                _delete_data(each)

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
        if not self._files:
            self.data.mkdir(parents=True, exist_ok=True)
            self._open()
        return self.data

    def commit(self, episode: EncodedEpisode, crcs: np.ndarray) -> None:
        """Count an episode, whose data are written and have these checksums."""
        self.make()
        before, ends = self.num_episodes, [os.fstat(file.fileno()).st_size for file in self._files]
        try:
            text = f"{episode.metadata}\n".encode()
            seal = sealed(episode.length, episode.own_next, text, crcs).tobytes()
            record = np.zeros(1, _RECORD[self._version])
            record["length"], record["own_next"] = episode.length, episode.own_next
            record["metadata_end"] = ends[0] + len(text)
            if len(self._files) > 2:
                record["crcs_end"] = (ends[1] + len(seal)) // 4
            for file, data in zip(self._files, (text, seal)[: len(self._files) - 1], strict=False):
                write_all(file, data)
            write_all(self._files[-1], record.tobytes())
            self.schema = episode.schema
            if self._new is not None and not self._replaces:
                self._publish(self._new)
            self.num_episodes = before + 1
        except BaseException:
            # The disk is full, or the user interrupted: the episode does not count.
            self.num_episodes = before
            self._truncate(ends)
            raise

    def finish(self) -> None:
        """Close the files; put what was written in the place of what was there."""
        self._close()
        if not self._replaces or not self.num_episodes:
            if self.num_episodes > self._counted:
                with contextlib.suppress(OSError):  # The episodes count without it.
                    self.write_count()
            self.abort()
        elif self._new is not None:
            self._publish(self._new)
        else:
            assert self._before is not None
            self.write_header(self.path)
            _delete_data(self._before)

    def write_count(self) -> None:
        """Note how many episodes there are at least, so that a list that is cut is noticed."""
        self.write_header(self.path)

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
        header = {
            "format": self.format,
            "version": self._version,
            "data": self.data.name,
            "options": self.options,
            "schema": self.schema.to_json(),
            "episodes": self.num_episodes,
        }
        return header | {"crc32": _header_crc(header)}

    def read_header(self) -> dict[str, Any] | None:
        """Read the header of what is there; None if there is no data set."""
        return read_header(self.path) if (self.path / _HEADER).exists() else None

    def write_header(self, folder: Path) -> None:
        """Put the header into ``folder``, in one step, in the place of the one that is there."""
        replace_file(folder / _HEADER, json.dumps(self.header).encode())

    def _open(self) -> None:
        # Without a buffer: what failed to be written must not be written later.
        names = [_METADATA, _CHECKSUMS, _RECORDS] if self._version > 1 else [_METADATA, _RECORDS]
        self._files = [(self.data / name).open("ab", buffering=0) for name in names]

    def _truncate(self, ends: Sequence[int]) -> None:
        for file, end in zip(self._files, ends, strict=False):
            file.truncate(end)

    def _close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()


def open_folder(path: Path) -> tuple[dict[str, Any], Path, EpisodeList]:
    """Return the header of a folder, the folder of its data, and its episodes.

    Raises:
        DatasetError: if there is none, it is damaged, or it is of a newer version.
    """
    header = read_header(path)
    while True:
        data = inside(path, header["data"])
        try:
            return header, data, EpisodeList(data, header)
        except FileNotFoundError as error:
            before, header = header, read_header(path)
            if header["data"] == before["data"]:  # Otherwise a writer has just replaced it.
                raise DatasetError(f"{error.filename} is missing: restore it.") from error


def read_header(path: Path) -> dict[str, Any]:
    """Read the header of a folder; errors as for :func:`open_folder`."""
    try:
        header = json.loads(inside(path, _HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path / _HEADER} is no header of a data set: {error!r}.") from error
    return checked_header(path / _HEADER, header)


def checked_header(path: Path, header: Any) -> dict[str, Any]:
    """Return a header that was read from ``path``; errors as for :func:`open_folder`.

    Its data are in a folder that a writer has named: nothing else is read, written or removed.
    """
    version = header.get("version") if isinstance(header, dict) else None
    if not isinstance(version, int) or version < 1:
        raise DatasetError(f"{path} is no header of a data set: it has no version.")
    check_version(path, version, _VERSION)
    crc = header.pop("crc32", None)
    if (version > 1 or crc is not None) and crc != _header_crc(header):
        raise DatasetError(f"{path} is not as it was written: restore it from a copy.")
    name, options = header.get("data"), header.get("options", {})
    if not (isinstance(name, str) and _DATA.fullmatch(name) and isinstance(options, dict)):
        raise DatasetError(
            f"{path} must name a folder like data-0123456789ab, got {name!r}: it is damaged or "
            f"not to be trusted."
        )
    return dict(header)


def _header_crc(header: Mapping[str, Any]) -> int:
    return crc32(json.dumps(header).encode())


def foreign_entries(path: Path) -> list[str]:
    """List what lies in the folder of a data set and no format of this package made."""
    found = []
    for each in sorted(path.iterdir()):
        if each.is_dir() and (each.name == "data" or _DATA.fullmatch(each.name)):
            known = _PARTS if each.name != "data" else re.compile(r".*\.lance")
            inner = (x.name for x in each.iterdir() if not known.fullmatch(x.name))
            found += [f"{each.name}/{name}" for name in inner]
        elif not _MADE.fullmatch(each.name) and each.name not in _LANCE:
            found.append(each.name)
    return found


def _delete_data(folder: Path) -> None:
    """Delete a folder of data, but nothing in it that we did not make; its list is deleted last."""
    for each in sorted(folder.iterdir(), key=lambda each: each.name == _RECORDS):
        if _PARTS.fullmatch(each.name):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def write_all(file: io.FileIO, data: Any) -> None:
    """Write data to a file without a buffer, which may take a part of it at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
