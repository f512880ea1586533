"""Checksums (CRC-32) of what a data set holds, so that bytes that changed are never read as data.

The rows of an entry of an episode have one for every block of about a megabyte, however the format
stores them; it is compared when a row of the block is first read. Formats whose entries are files of
their own have one for each file instead (:class:`CheckedFiles`). All of an episode, its length and its
metadata are covered by one more, which is compared when the data set is opened.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any
from zlib import crc32

import numpy as np

from torchrl_mt.data._store.steps import Path
from torchrl_mt.datasets._encoding.schema import EpisodeSchema, Field
from torchrl_mt.datasets._encoding.stored_columns import (
    DenseRows,
    RaggedRows,
    StoredRows,
    TextRows,
    array_dtype,
)
from torchrl_mt.paths import inside

__all__ = [
    "CheckedFiles",
    "Checksums",
    "block_rows",
    "crcs_of",
    "crcs_of_files",
    "crcs_of_parts",
    "sealed",
]

_BLOCK = 1 << 20
"""Bytes of a block, unless a row is larger."""
_FILES = "~crc32.json"
"""The checksums of the files of an episode; no entry has this name."""


def block_rows(field: Field) -> int:
    """Return the rows of a block; all rows of an entry of no fixed shape are one."""
    if field.kind != "dense":
        return 1 << 40
    return max(1, _BLOCK // max(1, math.prod(field.shape) * array_dtype(field).itemsize))


def crcs_of(schema: EpisodeSchema, columns: Mapping[Path, StoredRows]) -> np.ndarray:
    """Return the checksums of an episode: uint32 ``[blocks]``, entry after entry."""
    found: list[int] = []
    for path, stored in columns.items():
        size, rows = block_rows(schema.fields[path]), len(stored)
        found += crcs_of_parts(stored, [min(size, rows - begin) for begin in range(0, rows, size)])
    return np.array(found, np.uint32)


def crcs_of_parts(stored: StoredRows, counts: list[int]) -> list[int]:
    """Return the checksum of each part of so many rows."""
    return [_crc(part) for part in _split(stored, counts)]


def _split(stored: StoredRows, counts: list[int]) -> Iterator[StoredRows]:
    ends = np.cumsum(counts).tolist()
    if isinstance(stored, RaggedRows):
        last = [0, *stored.shapes.prod(1).cumsum().tolist()]
    for begin, end in zip([0, *ends], ends, strict=False):
        if isinstance(stored, TextRows):
            yield TextRows(stored.texts[begin:end])
        elif isinstance(stored, DenseRows):
            yield DenseRows(stored.values[begin:end])
        else:
            yield RaggedRows(stored.values[last[begin] : last[end]], stored.shapes[begin:end])


def _crc(stored: StoredRows) -> int:
    if isinstance(stored, TextRows):
        return crc32("\n".join(stored.texts).encode())
    shapes = b"" if isinstance(stored, DenseRows) else stored.shapes.tobytes()
    values = np.ascontiguousarray(stored.values).reshape(-1)
    return crc32(values.view(np.uint8).data, crc32(shapes))


# ---- of all episodes ------------------------------------------------------------------------------


def sealed(length: int, own_next: int, metadata: bytes, crcs: np.ndarray) -> np.ndarray:
    """Append the checksum of the metadata, and one of everything, to the checksums of an episode."""
    known = np.append(crcs, np.uint32(crc32(metadata)))
    return np.append(known, np.uint32(_seal(length, own_next, known))).astype("<u4")


def _seal(length: int, own_next: int, known: np.ndarray) -> int:
    return crc32(known.tobytes(), crc32(b"%d %d" % (length, own_next)))


class Checksums:
    """What :func:`sealed` returned for every episode.

    Args:
        values: uint32, one episode after the other.
        ends: int64 ``[E]``, where those of each episode end.
        lengths: int64 ``[E]``.
        own_next: int64 ``[E]``.

    Raises:
        ValueError: if a length or checksum is not as it was written.
    """

    def __init__(
        self, values: np.ndarray, ends: np.ndarray, lengths: np.ndarray, own_next: np.ndarray
    ) -> None:
        self.values, self.ends = values, ends
        self.starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
        rows = zip(
            self.starts.tolist(), ends.tolist(), lengths.tolist(), own_next.tolist(), strict=True
        )
        for i, (begin, end, length, own) in enumerate(rows):
            if not 0 <= begin < end - 1 < len(values) or values[end - 1] != _seal(
                length, own, values[begin : end - 1]
            ):
                raise ValueError(f"the record of episode {i} is not as it was written")

    def check_metadata(self, i: int, text: bytes) -> None:
        """Refuse other metadata than were written (``ValueError``)."""
        if crc32(text) != self.values[self.ends[i] - 2]:
            raise ValueError(f"the metadata of episode {i} are not as they were written")


# ---- of files -------------------------------------------------------------------------------------


def crcs_of_files(folder: FilePath) -> np.ndarray:
    """Write the checksums of the files of an episode beside them; return that of what was written."""
    files = [FilePath(where, name) for where, _, names in os.walk(folder) for name in names]
    text = json.dumps({file.relative_to(folder).as_posix(): _file_crc(file) for file in files})
    (folder / _FILES).write_text(text, encoding="utf-8")
    return np.array([crc32(text.encode())], np.uint32)


def _file_crc(file: FilePath) -> int:
    found = 0
    with open(file, "rb") as stream:
        while data := stream.read(_BLOCK):
            found = crc32(data, found)
    return found


class CheckedFiles:
    """The files of episodes, which are checked before they are read.

    Args:
        root: folder of the data set; all of them lie in it.
        crcs: of what :func:`crcs_of_files` wrote for each episode; None if older software wrote them.
    """

    def __init__(self, root: FilePath, crcs: Checksums | None) -> None:
        self._root, self._crcs = root, crcs
        self._of_episode = lru_cache(maxsize=1024)(self._read)
        self._done: dict[str, set[int]] = {}
        """The episodes whose file of this name was checked."""

    def mapped(self, folder: FilePath, episode: int, name: str) -> FilePath:
        """Return a file that is mapped, or read in parts; it is checked once."""
        file = inside(self._root, (folder / name).relative_to(self._root))
        done = self._done.setdefault(name, set())
        if self._crcs is not None and episode not in done:
            self._check(folder, episode, name, _file_crc(file))
            done.add(episode)
        return file

    def data(self, folder: FilePath, episode: int, name: str) -> bytes:
        """Read a file."""
        data = inside(self._root, (folder / name).relative_to(self._root)).read_bytes()
        if self._crcs is not None:
            self._check(folder, episode, name, crc32(data))
        return data

    def _check(self, folder: FilePath, episode: int, name: str, found: int) -> None:
        if self._of_episode(folder, episode).get(name) != found:
            raise ValueError("it is not as it was written")

    def _read(self, folder: FilePath, episode: int) -> dict[str, Any]:
        assert self._crcs is not None
        file = inside(self._root, (folder / _FILES).relative_to(self._root))
        data = file.read_bytes()
        if crc32(data) != self._crcs.values[self._crcs.starts[episode]]:
            raise ValueError(f"{file} is not as it was written")
        return dict(json.loads(data))
