"""One HDF5 file, which h5py alone reads.

A dense entry is the dataset at its path (``/action``, ``/next/reward``), with the rows of all episodes
one after the other. A ragged entry is a group of ``values``, the ``shapes`` of its rows and their
``ends`` in the values; an object is a group of ``values`` (JSON in UTF-8) and ``ends``. ``k`` with a
shared ``("next", k)`` has ``T + 1`` rows per episode, or ``2 T`` where the two disagree. The steps of
each episode are in ``ep_len``.

While episodes are appended, the file is open for SWMR, so it is whole at every moment. An episode counts
from when its number in ``ep_len`` is not 0, which is written last, by one write of eight bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import mmap
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from torchrl_mt.checks import import_extra
from torchrl_mt.data._store.steps import Path
from torchrl_mt.datasets._encoding.episode_steps import as_ted
from torchrl_mt.datasets._encoding.schema import EpisodeSchema, Field
from torchrl_mt.datasets._encoding.stored_columns import (
    DenseRows,
    RaggedRows,
    StoredRows,
    TextRows,
    array_dtype,
)
from torchrl_mt.datasets._encoding.values import from_json_text
from torchrl_mt.datasets._files.checksums import Checksums, crcs_of, sealed
from torchrl_mt.datasets._files.hdf5_rows import (
    GrowingRows,
    MappedRows,
    check_own,
    create_rows,
    own_node,
)
from torchrl_mt.datasets._files.readers import DatasetError, FlatReader, check_version, runs_of
from torchrl_mt.datasets._files.write_lock import replace, unfinished_path
from torchrl_mt.datasets._files.writers import EncodedEpisode, FormatWriter
from torchrl_mt.datasets.registry import Format, Mode

__all__ = ["FORMAT"]

_logger = logging.getLogger("torchrl_mt")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_VERSION = 2
"""The first had no checksums."""
_LENGTHS, _OFFSETS = "ep_len", "ep_offset"
"""Steps of each episode, and steps of those before it; stable-worldmodel has them, too."""
_OWN_NEXT = "ep_own_next"
_METADATA = "ep_metadata"
_CHECKSUMS = "ep_crc32"
_COUNT = "ep_count"
"""Episodes when the file was last closed: lengths that were zeroed are noticed."""
_CACHE = 1 << 26
"""Bytes that h5py keeps of the chunks of a dataset that it reads."""
_LIBVER = ("v110", "v110")
"""The oldest layout that is whole at every moment, so that old readers can read it."""


def _h5py() -> Any:
    return import_extra("h5py", "hdf5")


def _is_hdf5(path: FilePath) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return path.suffix.lower() in (".h5", ".hdf5") and not path.exists()


def _place_of(path: Path) -> str:
    """Return where an entry is in the file; no two keys give the same place."""
    names = [re.sub(r"[%/\0]", lambda found: f"%{ord(found[0]):02X}", name) for name in path]
    names = ["%" if not name else "%2E" if name == "." else name for name in names]
    if names[0].startswith("ep_"):
        names[0] = "%65" + names[0][1:]
    return "/".join(names)


def _is_open(path: FilePath) -> bool:
    """Whether a file has a writer, or had one that was killed: the flags of its superblock say so."""
    with open(path, "rb") as file:
        head = file.read(12)
    return len(head) == 12 and head[8] >= 3 and bool(head[11] & 0b101)


def _open_to_read(path: FilePath) -> Any:
    try:
        # Without a writer, HDF5 reads without SWMR: with it, damage is read again and again.
        return _h5py().File(path, "r", swmr=_is_open(path), locking=False, rdcc_nbytes=_CACHE)
    except OSError as error:
        raise DatasetError(
            f"{path} is no HDF5 file that can be read: {error}. It is cut off or damaged: restore it "
            f"from a copy."
        ) from error


def _reader(path: FilePath) -> FlatReader:
    had_writer = _is_open(path)
    try:
        reader = _reader_of(path, _open_to_read(path))
    except (DatasetError, KeyError, RuntimeError):
        if had_writer or not _is_open(path):
            raise
        return _reader(path)
    if not had_writer and _is_open(path):  # A writer came while the file was being opened.
        reader.close()
        return _reader(path)
    return reader


def _reader_of(path: FilePath, file: Any) -> FlatReader:
    try:
        if _LENGTHS not in file:
            raise DatasetError(
                f"{path} is an HDF5 file but no data set of episodes: it has no {_LENGTHS!r}."
            )
        own_node(file, _LENGTHS)
        return _Reader(path, file) if "schema" in file.attrs else _FlatColumns(path, file)
    except BaseException:
        file.close()
        raise


def _map_of(file: Any) -> mmap.mmap:
    """Map the contents of an open file."""
    return mmap.mmap(file.id.get_vfd_handle(), 0, access=mmap.ACCESS_READ)


class _Reader(FlatReader):
    """Reads rows from a map of the file.

    h5py has the file open only if it must read some itself, because it opens a file that is open for
    reading to no writer in the same process.
    """

    def __init__(self, path: FilePath, file: Any) -> None:
        version = int(file.attrs["version"])
        check_version(path, version, _VERSION)
        schema = EpisodeSchema.from_json(json.loads(file.attrs["schema"]))
        contents = _map_of(file)
        lengths = file[_LENGTHS][:]
        unfinished = np.flatnonzero(lengths == 0)
        lengths = lengths[: unfinished[0]] if len(unfinished) else lengths
        least = int(own_node(file, _COUNT)[:].max(initial=0)) if version > 1 else 0
        if lengths.min(initial=1) < 1 or len(lengths) < least:
            raise DatasetError(f"{path}: {_LENGTHS!r} is damaged: restore it from a copy.")
        own = own_node(file, _OWN_NEXT)[: len(lengths)] if schema.shared else None
        super().__init__(schema, lengths, own)
        self._places = {path: _place_of(path) for path in schema.fields}
        self._rows: dict[str, MappedRows] = {}
        for place, shape, dtype in _layout(schema, version):
            if 0 not in shape:
                self._rows[place] = MappedRows(own_node(file, place), contents, dtype)
        if version > 1:
            values, ends = self._items(_CHECKSUMS, np.arange(len(lengths)))
            every = np.array(ends, np.int64) // 4
            self.checksums = Checksums(values.view("<u4"), every, lengths, self.own_next)
            self.identity = file.attrs["id"]
        self._file = file
        if all(rows.in_map for rows in self._rows.values()):
            file.close()

    def take(self, path: Path, first: np.ndarray, counts: np.ndarray, stride: int) -> StoredRows:
        """Read rows of an entry."""
        field, place = self.schema.fields[path], self._places[path]
        if field.kind == "dense":
            if place not in self._rows:
                return DenseRows(np.empty((counts.sum(), *field.shape), array_dtype(field)))
            return DenseRows(self._rows[place].take(first, counts, stride))
        values, ends = self._items(place, runs_of(first, counts, stride))
        if field.kind == "object":
            text = values.tobytes()
            begins = [0, *ends[:-1]]
            return TextRows([text[a:b].decode() for a, b in zip(begins, ends, strict=True)])
        if not field.shape:
            return RaggedRows(values, np.empty((len(ends), 0), np.int64))
        return RaggedRows(values, self._rows[f"{place}/shapes"].take(first, counts, stride))

    def _items(self, place: str, rows: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Read the values of rows of different sizes, and where each ends among them."""
        if not len(rows):
            return self._rows[f"{place}/values"].take(rows, rows), []
        begins, ends = self._span(place, rows)
        # Rows that follow each other are one run.
        new = np.concatenate([[True], begins[1:] != ends[:-1]])
        first, last = begins[new], ends[np.append(new[1:], True)]
        values = self._rows[f"{place}/values"].take(first, last - first)
        return values, (ends - begins).cumsum().tolist()

    def _span(self, place: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the values of rows begin and end."""
        stored, one = self._rows[f"{place}/ends"], np.ones_like(rows)
        ends = stored.take(rows, one)
        return np.where(rows, stored.take(np.maximum(rows - 1, 0), one), 0), ends

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        values, _ = self._items(_METADATA, np.array([i]))
        if self.checksums is not None:
            self.checksums.check_metadata(i, values.tobytes())
        return dict(from_json_text(values.tobytes()))

    def counts(self) -> dict[str, int]:
        """Return how many rows of each dataset count."""
        episodes, rows = len(self.lengths), self._rows
        counts = {_LENGTHS: episodes}
        numbers = dict.fromkeys((_OFFSETS, _OWN_NEXT, _METADATA, _CHECKSUMS), episodes)
        for path, field in self.schema.fields.items():
            if not field.shared:
                numbers[_place_of(path)] = int(self.rows_of(path).sum())
        for place, number in numbers.items():
            if place in rows:
                counts[place] = number
            elif f"{place}/ends" in rows:
                _, last = self._span(place, np.array([max(number - 1, 0)]))
                counts[f"{place}/values"] = int(last[0]) if number else 0
                counts |= {f"{place}/{part}": number for part in ("ends", "shapes")}
        return {place: number for place, number in counts.items() if place in (_LENGTHS, *rows)}

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._rows = {}


_Layout = list[tuple[str, tuple[int, ...], np.dtype[Any]]]


def _layout(schema: EpisodeSchema, version: int) -> _Layout:
    """List the datasets that grow with every episode: place, shape of a row and dtype."""
    number, byte = np.dtype(np.int64), np.dtype(np.uint8)
    layout: _Layout = [(_OFFSETS, (), number)]
    if schema.shared:
        layout.append((_OWN_NEXT, (), number))
    for place in (_METADATA, _CHECKSUMS)[:version]:
        layout += [(f"{place}/values", (), byte), (f"{place}/ends", (), number)]
    for path, field in schema.fields.items():
        place = _place_of(path)
        if field.kind == "dense" and not field.shared:
            layout.append((place, field.shape, array_dtype(field)))
        elif field.kind != "dense":
            dtype = array_dtype(field) if field.kind == "ragged" else byte
            layout += [(f"{place}/values", (), dtype), (f"{place}/ends", (), number)]
            if field.kind == "ragged":
                layout.append((f"{place}/shapes", (len(field.shape),), number))
    return layout


class _FlatColumns(FlatReader):
    """A file of another writer, such as stable-worldmodel's: a dataset per column, and no schema.

    Columns of numbers are dense, columns of text are objects; rewards and done flags are put under
    ``"next"``. h5py keeps the file open.
    """

    def __init__(self, path: FilePath, file: Any) -> None:
        lengths = file[_LENGTHS][:].astype(np.int64)
        fields: dict[Path, Field] = {}
        columns: dict[Path, Any] = {}

        def visit(name: str, dataset: Any) -> None:
            if name in (_LENGTHS, _OFFSETS) or not isinstance(dataset, _h5py().Dataset):
                return
            check_own(dataset)
            field = _field_of(dataset)
            if field is None or not dataset.shape or dataset.shape[0] < lengths.sum():
                _logger.warning("%s: %r is no column of numbers or text, and left out.", path, name)
                return
            fields[tuple(name.split("/"))] = field
            columns[tuple(name.split("/"))] = dataset

        file.visititems(visit)
        fields, self._columns = as_ted(fields), as_ted(columns)
        super().__init__(EpisodeSchema(fields), lengths)
        if _OFFSETS in file:
            first = own_node(file, _OFFSETS)[:].astype(np.int64)
            self._first_rows = dict.fromkeys(fields, first)
        self._file, self._contents = file, _map_of(file)
        self._rows: dict[Path, MappedRows] = {}

    def take(self, path: Path, first: np.ndarray, counts: np.ndarray, stride: int) -> StoredRows:
        """Read rows of a column."""
        field, column = self.schema.fields[path], self._columns[path]
        if field.kind == "object":
            text = column.asstr(errors="replace")
            rows = runs_of(first, counts, stride).tolist()
            return TextRows([json.dumps(text[row]) for row in rows])
        if path not in self._rows:
            self._rows[path] = MappedRows(column, self._contents, array_dtype(field))
        return DenseRows(self._rows[path].take(first, counts, stride))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._rows = {}


def _field_of(dataset: Any) -> Field | None:
    """Return the field of a column; None if it is something else."""
    if _h5py().check_string_dtype(dataset.dtype) is not None:
        return Field("object") if dataset.ndim == 1 else None
    if dataset.dtype.kind not in "biufc":
        return None
    try:
        dtype = torch.from_numpy(np.empty(0, dataset.dtype.newbyteorder("="))).dtype
    except TypeError:
        return None
    return Field("dense", tuple(dataset.shape[1:]), dtype)


class _Writer(FormatWriter):
    """Appends to a file that is open for SWMR.

    The chunks are not cached, so rows go straight to the file. Metadata follow with the flush, in an
    order that leaves the file whole. A new file is made beside the path, and moved there with its first
    episode (``overwrite``: when it is finished).
    """

    def __init__(self, path: FilePath, mode: Mode) -> None:
        super().__init__(path.absolute(), mode)
        self._file: Any = None
        self._unfinished: FilePath | None = None
        """Where the file is as long as it is not at its path."""
        self._broken = False
        """Whether a write has failed, since when the file is not open."""
        self._version = _VERSION
        self._rows: dict[str, GrowingRows] = {}
        self._counted = dict[str, int](), 0
        """Rows of each dataset that count, and steps of all episodes."""
        if mode == "append" and self.path.is_file():
            self._open()

    def write(self, episode: EncodedEpisode) -> None:
        """Write an episode."""
        if self._broken:
            self._open()
        metadata = episode.metadata.encode()
        rows = {
            _OFFSETS: np.array([self._counted[1]]),
            **self._items_of(_METADATA, [metadata]),
        }
        if self._version > 1:
            crcs = crcs_of(episode.schema, episode.columns)
            seal = sealed(episode.length, episode.own_next, metadata, crcs)
            rows |= self._items_of(_CHECKSUMS, [seal.tobytes()])
        if episode.schema.shared:
            rows[_OWN_NEXT] = np.array([episode.own_next])
        for path, stored in episode.columns.items():
            place = _place_of(path)
            if isinstance(stored, DenseRows):
                rows[place] = stored.values
            elif isinstance(stored, TextRows):
                rows |= self._items_of(place, [text.encode() for text in stored.texts])
            else:
                ends = self._count(f"{place}/values") + stored.shapes.prod(1).cumsum()
                rows |= {f"{place}/values": stored.values, f"{place}/ends": ends}
                rows[f"{place}/shapes"] = stored.shapes
        rows = {place: each for place, each in rows.items() if math.prod(each.shape[1:])}
        new = self._file is None
        try:
            if new:
                self._create(episode.schema, rows)
            self._append(rows, episode.length)
            if new:
                self._file.swmr_mode = True
                if self.mode != "overwrite":
                    self._show()
        except BaseException as error:
            if new:
                self._discard()
            elif isinstance(error, Exception):
                self._abandon()
            raise

    def _append(self, rows: Mapping[str, np.ndarray], length: int) -> None:
        counts, steps = self._counted
        lengths, number = self._rows[_LENGTHS], counts.get(_LENGTHS, 0)
        lengths.write(np.zeros(1, np.int64), number)
        for place, each in rows.items():
            self._rows[place].write(each, counts.get(place, 0))
        self._file.flush()
        lengths.write(np.array([length]), number)  # From here on, the episode counts.
        ends = {place: counts.get(place, 0) + len(each) for place, each in rows.items()}
        self._counted = ends | {_LENGTHS: number + 1}, steps + length

    def _items_of(self, place: str, items: list[bytes]) -> dict[str, np.ndarray]:
        """Return the rows of values of different sizes."""
        ends = self._count(f"{place}/values") + np.array([len(item) for item in items]).cumsum()
        values = np.frombuffer(b"".join(items), np.uint8)
        return {f"{place}/values": values, f"{place}/ends": ends}

    def _count(self, place: str) -> int:
        return self._counted[0].get(place, 0)

    def _create(self, schema: EpisodeSchema, first: Mapping[str, np.ndarray]) -> None:
        """Create a file for episodes like this one."""
        self._unfinished = unfinished_path(self.path)
        self._file = _h5py().File(
            self._unfinished, "w", libver=_LIBVER, locking=False, rdcc_nbytes=0
        )
        self._file.attrs["format"] = "torchrl_mt"
        self._file.attrs["version"] = _VERSION
        self._file.attrs["schema"] = json.dumps(schema.to_json())
        self._rows = {place: create_rows(self._file, place, each) for place, each in first.items()}
        self._file.attrs["id"] = uuid.uuid4().hex
        for place in (_LENGTHS, _COUNT):
            self._rows[place] = create_rows(self._file, place, np.zeros(1, np.int64), zeros=True)
        self._rows[_COUNT].write(np.zeros(1, np.int64), 0)

    def _show(self) -> None:
        """Put a new file at its path."""
        assert self._unfinished is not None
        replace(self._unfinished, self.path)
        self._unfinished = None

    def _discard(self) -> None:
        """Delete a new file that is not at its path."""
        if self._file is not None:
            self._abandon()
        self._broken = False
        if self._unfinished is not None:
            self._unfinished.unlink(missing_ok=True)
        self._unfinished, self._rows = None, {}

    def _abandon(self) -> None:
        """Close the file after a write that failed, as if the process were killed.

        What HDF5 has not yet written would be written in part, which makes a file unreadable. It goes
        nowhere instead.
        """
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._file.id.get_vfd_handle())
        os.close(nowhere)
        with contextlib.suppress(Exception):
            self._file.close()
        self._file, self._rows, self._broken = None, {}, True

    def _open(self) -> None:
        """Open the file that is there."""
        path = self._unfinished or self.path
        reader = _reader(path)
        counts = reader.counts() if isinstance(reader, _Reader) else None
        reader.close()
        if counts is None:
            raise DatasetError(
                f"{self.path} was written by another program, which episodes cannot be appended to: "
                f"write to another path, and copy its episodes there with save_episodes."
            )
        self.schema = reader.schema
        self._counted = counts, int(reader.lengths.sum())
        h5f = _h5py().h5f
        with _open_to_read(path) as file:
            self._version = int(file.attrs["version"])
            access = file.id.get_access_plist()
        access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
        access.set_cache(0, 521, 0, 0.75)  # No chunks are cached.
        how = h5f.ACC_RDWR | h5f.ACC_SWMR_WRITE
        try:
            # In this mode at once, so that readers that come now find it whole.
            opened = h5f.open(os.fsencode(path), how, fapl=access)
        except OSError:
            if not os.access(path, os.W_OK):
                raise
            # The writer before was killed. HDF5 has no call that makes such a file one to write to.
            self._renew(path)
            opened = h5f.open(os.fsencode(path), how, fapl=access)
        self._file, self._broken = _h5py().File(opened), False
        places = [*counts, _COUNT] if self._version > 1 else counts
        self._rows = {place: GrowingRows(self._file[place].id) for place in places}

    def _renew(self, path: FilePath) -> None:
        """Replace the file by a copy."""
        new = unfinished_path(self.path)
        try:
            with (
                _open_to_read(path) as old,
                _h5py().File(new, "w", libver=_LIBVER, locking=False) as copy,
            ):
                for name in old:
                    link = old.get(name, getlink=True)
                    if isinstance(link, _h5py().HardLink):
                        old.copy(name, copy)
                    else:  # It is not followed.
                        copy[name] = link
                for name, value in old.attrs.items():
                    copy.attrs[name] = value
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)

    def close(self) -> None:
        """Finish the data set."""
        if self._file is not None:
            try:
                if _COUNT in self._rows:
                    self._rows[_COUNT].write(np.array([self._count(_LENGTHS)]), 0)
                    self._file.flush()
            except Exception:
                self._abandon()
                raise
            self._file.close()
            self._file = None
        if self._unfinished is not None:
            self._show()

    def abort(self) -> None:
        """Give up an ``overwrite``."""
        if self._unfinished is not None:
            self._discard()
        self.close()


FORMAT = Format("hdf5", _reader, _Writer, _is_hdf5)
