"""Rows of one HDF5 dataset: appended one episode at a time, and read many at once.

``GrowingRows`` writes straight to the file: rows are there when ``write`` returns. ``MappedRows`` copies
rows from a map of the file, which is a hundred times as fast as many small reads of h5py. h5py reads
those that do not lie in the file as they are (compressed, of another byte order).
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

from torchrl_mt.checks import import_extra
from torchrl_mt.datasets._files.readers import DatasetError, runs_of

__all__ = ["GrowingRows", "MappedRows", "check_own", "create_rows", "own_node"]

_EPISODES_PER_CHUNK = 16
_LEAST_CHUNK, _MOST_CHUNK = 1 << 12, 1 << 20
"""Bytes of a chunk."""
_LONG = 1 << 8
"""Bytes of a run that is worth a copy of its own."""


def own_node(file: Any, place: str) -> Any:
    """Return a group or dataset that is in the file itself.

    Raises:
        DatasetError: if a link leads to it, it has its data elsewhere, or it is missing.
    """
    h5py = import_extra("h5py", "hdf5")
    names = place.split("/")
    for i in range(len(names)):
        part = "/".join(names[: i + 1])
        if not isinstance(file.get(part, getlink=True), h5py.HardLink):
            how = "a link, which is not followed" if part in file else "missing"
            raise DatasetError(
                f"{part!r} of {file.file.filename} is {how}: copy the data into the file."
            )
    return check_own(file[place])


def check_own(node: Any) -> Any:
    """Refuse a dataset whose data are in other files (``DatasetError``)."""
    h5py = import_extra("h5py", "hdf5")
    if isinstance(node, h5py.Dataset) and (node.is_virtual or node.external):
        raise DatasetError(
            f"{node.name!r} of {node.file.filename} has its data in other files, which are not read: "
            f"copy them into the file."
        )
    return node


def create_rows(file: Any, place: str, first: np.ndarray, *, zeros: bool = False) -> GrowingRows:
    """Create a dataset for rows like these.

    Args:
        file: an ``h5py.File``.
        place: path of the dataset in it.
        first: rows of the first episode; they set the size of the chunks.
        zeros: whether rows that were not written are zeros; otherwise they may be anything.
    """
    h5py = import_extra("h5py", "hdf5")
    size = first.itemsize * math.prod(first.shape[1:])
    chunk = min(max(_EPISODES_PER_CHUNK * first.nbytes, _LEAST_CHUNK), _MOST_CHUNK)
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((max(chunk // size, 1), *first.shape[1:]))
    created.set_fill_time(h5py.h5d.FILL_TIME_ALLOC if zeros else h5py.h5d.FILL_TIME_NEVER)
    linked = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    linked.set_create_intermediate_group(True)
    linked.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple((0, *first.shape[1:]), (h5py.h5s.UNLIMITED, *first.shape[1:]))
    kind = h5py.h5t.py_create(first.dtype, logical=True)
    return GrowingRows(
        h5py.h5d.create(file.id, place.encode(), kind, space, dcpl=created, lcpl=linked)
    )


class GrowingRows:
    """A dataset that rows are appended to.

    Args:
        dataset: an ``h5py.h5d.DatasetID`` without chunk cache.
    """

    def __init__(self, dataset: Any) -> None:
        self._h5s = import_extra("h5py.h5s", "hdf5")
        self._dataset, self._kind = dataset, dataset.get_type()
        self._extent, *tail = dataset.shape
        self._tail = tuple(tail)
        self._zeros = (0,) * len(tail)

    def write(self, rows: np.ndarray, at: int) -> None:
        """Write rows from the row ``at`` on, over what is there or at the end."""
        if at + len(rows) > self._extent:
            self._dataset.set_extent((at + len(rows), *self._tail))
            self._extent = at + len(rows)
        if rows.size:
            there = self._h5s.create_simple((self._extent, *self._tail))
            there.select_hyperslab((at, *self._zeros), rows.shape)
            here = self._h5s.create_simple(rows.shape)
            self._dataset.write(here, there, np.ascontiguousarray(rows), self._kind)


class MappedRows:
    """A dataset that rows are read from.

    Args:
        dataset: an ``h5py.Dataset``; its file must stay open only if ``in_map`` is False.
        contents: a map of the file.
        dtype: of the arrays to return; None for that of the dataset.
    """

    def __init__(self, dataset: Any, contents: mmap.mmap, dtype: np.dtype | None = None) -> None:
        self._contents = contents
        self._count, *tail = dataset.shape
        self._shape = tuple(tail)
        self._dtype = np.dtype(dataset.dtype if dtype is None else dtype)
        self._size = self._dtype.itemsize * math.prod(tail)
        places = _places(dataset, self._dtype)
        self.in_map = places is not None
        """Whether the map is all that is needed."""
        if places is None:
            self._dataset = dataset
        else:
            self._chunk, self._addresses = places
            begins = np.arange(len(self._addresses)) * self._chunk
            ends = self._addresses + np.minimum(self._count - begins, self._chunk) * self._size
            written = int(self._addresses.min(initial=0)) >= 0
            self._intact = written and int(ends.max(initial=0)) <= len(contents)

    def take(self, first: np.ndarray, counts: np.ndarray, stride: int = 1) -> np.ndarray:
        """Read rows: see :meth:`FlatReader.take`.

        Raises:
            DatasetError: if the file lacks some.
        """
        count = int(counts[0]) if len(counts) else 0
        same = bool((counts == count).all())
        total = count * len(counts) if same else int(counts.sum())
        if not total:
            return np.empty((0, *self._shape), self._dtype)
        if not same:
            first, counts = first[counts > 0], counts[counts > 0]
        last = int(first.max() if same else (first + (counts - 1) * stride).max())
        if same:
            last += (count - 1) * stride
        if last >= self._count:
            raise DatasetError(f"row {last} is missing, the file has {self._count}: it is damaged.")
        if not self.in_map:
            rows = self._read(first, counts, stride)
        elif same and (stride == 1 or count == 1):
            rows = self._windows(first, count)
        elif stride == 1 and total * self._size >= _LONG * len(counts):
            rows = np.empty(total, f"V{self._size}")
            self._copy(first, counts, rows)
        else:
            rows = self._windows(runs_of(first, counts, stride), 1)
        return rows.view(self._dtype).reshape(total, *self._shape)

    def _windows(self, first: np.ndarray, count: int) -> np.ndarray:
        """Read runs of the same length."""
        chunks, within = np.divmod(first, self._chunk)
        begins = self._addresses[chunks] + within * self._size
        width, size = count * self._size, len(self._contents)
        split = within > self._chunk - count
        splits = bool(split.any())
        if not self._intact:
            for begin in begins[~split].tolist():
                self._check(begin, begin + width)
        if splits:
            begins = np.clip(begins, 0, size - width)  # What is read beyond a chunk is replaced.
        # Every place of the file as a value as wide as a run, so that NumPy copies a run at once.
        runs = np.ndarray((size - width + 1,), f"V{width}", self._contents, 0, (1,))[begins]
        for i in np.flatnonzero(split).tolist() if splits else ():
            self._copy(first[i : i + 1], np.array([count]), runs[i : i + 1])
        return runs

    def _copy(self, first: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
        """Read runs piece by piece, each piece of one chunk."""
        target, source = out.view(np.uint8).data, memoryview(self._contents)
        done = 0
        for begin, count in zip(first.tolist(), counts.tolist(), strict=True):
            end = begin + count
            while begin < end:
                chunk, within = divmod(begin, self._chunk)
                rows = min(end - begin, self._chunk - within)
                place = int(self._addresses[chunk]) + within * self._size
                width = rows * self._size
                self._check(place, place + width)
                target[done : done + width] = source[place : place + width]
                begin, done = begin + rows, done + width

    def _check(self, begin: int, end: int) -> None:
        if begin < 0 or end > len(self._contents):
            raise DatasetError(
                f"the file has {len(self._contents)} bytes, and these steps are not among them: it is "
                f"cut off or damaged."
            )

    def _read(self, first: np.ndarray, counts: np.ndarray, stride: int) -> np.ndarray:
        """Read runs through h5py."""
        parts = [
            self._dataset[begin : begin + count * stride : stride]
            for begin, count in zip(first.tolist(), counts.tolist(), strict=True)
        ]
        return np.ascontiguousarray(np.concatenate(parts), self._dtype)


def _places(dataset: Any, dtype: np.dtype) -> tuple[int, np.ndarray] | None:
    """Return the rows per chunk and the addresses of the chunks; None if only h5py can read them."""
    h5py = import_extra("h5py", "hdf5")
    made, shape = dataset.id.get_create_plist(), dataset.shape
    native = h5py.h5t.py_create(dtype, logical=True)
    if dataset.file.userblock_size or made.get_external_count() or made.get_nfilters():
        return None
    if not native.equal(dataset.id.get_type()):
        return None
    if made.get_layout() == h5py.h5d.CONTIGUOUS:
        address = dataset.id.get_offset()
        return None if address is None else (max(shape[0], 1), np.array([address]))
    if made.get_layout() != h5py.h5d.CHUNKED or dataset.chunks[1:] != shape[1:]:
        return None
    chunk = dataset.chunks[0]
    addresses = np.full(-(-shape[0] // chunk), -1)
    found: list[tuple[int, int]] = []
    dataset.id.chunk_iter(lambda info: found.append((info.chunk_offset[0], info.byte_offset)))
    for row, address in found:
        if row < shape[0]:
            addresses[row // chunk] = address
    if addresses.min(initial=0) < 0 and made.get_fill_time() != h5py.h5d.FILL_TIME_NEVER:
        return None  # What was not written reads as the fill value.
    return chunk, addresses
