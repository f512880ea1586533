"""Files of a column in a checkpoint: named tensors of the live rows, oldest first.

They are written as they lie in memory, a few megabytes at a time, and read back the same way, or
mapped. A file is checked while it is read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.files.manifest import CHUNK, damaged, hashing
from torchrl_mt.data._store.plain import dtype_from, plain_dtype
from torchrl_mt.data._store.steps import own

__all__ = ["Part", "SavedColumn", "SavedFile", "write_part"]


@dataclass(frozen=True)
class Part:
    """A tensor of a column, to be saved."""

    pieces: list[Tensor]
    """At least one view of live rows, oldest first; a view may be empty."""
    saved_as: Callable[[Tensor], Tensor] | None = None
    """Converts rows before they are saved; None saves them as they are."""

    def whole(self) -> Tensor:
        """Copy all rows."""
        return torch.cat([self._saved(piece) for piece in self.pieces])

    def chunks(self) -> Iterator[Tensor]:
        """Iterate over the rows, a few megabytes at a time: contiguous, on the CPU."""
        for piece in self.pieces:
            for some in piece.split(_rows_at_a_time(piece.shape, piece.dtype)):
                yield self._saved(some).contiguous().cpu()

    def _saved(self, rows: Tensor) -> Tensor:
        return rows if self.saved_as is None else self.saved_as(rows)


def write_part(part: Part, file: Any, name: str) -> dict[str, Any]:
    """Write the rows of a part to an open file of that name; return name, shape and dtype."""
    for chunk in part.chunks():
        file.write(_bytes(chunk))
    first = part.pieces[0]
    rows = sum(map(len, part.pieces))
    return {"file": name, "shape": (rows, *first.shape[1:]), "dtype": plain_dtype(first.dtype)}


@dataclass(frozen=True)
class SavedFile:
    """A file of rows to load."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    hash: str

    @staticmethod
    def of(folder: Path, saved: dict[str, Any], digest: str) -> SavedFile:
        """Find the file in a folder of which :func:`write_part` returned this."""
        shape, dtype = tuple(saved["shape"]), dtype_from(saved["dtype"])
        return SavedFile(folder / saved["file"], shape, dtype, digest)

    def read(self, first: int, to: Tensor) -> None:
        """Read the rows from ``first`` on into the first rows of ``to``; ``ValueError`` if damaged."""
        found, rows = hashing(), self.shape[0]
        at_a_time = min(_rows_at_a_time(self.shape, self.dtype), rows)
        passing = torch.empty((at_a_time, *self.shape[1:]), dtype=self.dtype, device="cpu")
        with open(self.file, "rb") as stream:
            for begin in range(0, rows, max(1, at_a_time)):
                some = passing[: rows - begin]
                data = _bytes(some)
                if stream.readinto(data.data) != data.nbytes:
                    raise damaged(self.file, "is too short")
                found.update(data)
                some = some[max(first - begin, 0) :]
                stop = min(begin + at_a_time, rows) - first
                if len(some):
                    to[stop - len(some) : stop].copy_(some)
        if found.hexdigest() != self.hash:
            raise damaged(self.file)

    def mapped(self, first: int) -> Tensor:
        """Map the rows from ``first`` on into memory; writing to a row copies it."""
        shape = (self.shape[0] - first, *self.shape[1:])
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        with open(self.file, "rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        before = first * math.prod(shape[1:]) * self.dtype.itemsize
        return torch.frombuffer(data, dtype=torch.uint8, offset=before).view(self.dtype).view(shape)


class SavedColumn:
    """The saved parts of a column. Ranges of rows to load must end with the last row.

    Args:
        parts: a tensor, the file of one, or objects, by name.
        device: device of tensors among objects.
        mapped: whether to map files into memory instead of reading them.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor | SavedFile | list[Any]],
        device: torch.device,
        *,
        mapped: bool = False,
    ) -> None:
        self._parts: Mapping[str, Any] = parts
        self._device = device
        self._mapped = mapped

    def rows(self, name: str) -> int:
        """Number of saved rows."""
        return int(self._parts[name].shape[0])

    def into(self, name: str, rows: range, tensor: Tensor) -> Tensor:
        """Load rows into the first rows of ``tensor`` and return it; a mapped file replaces it."""
        _check_rows(name, rows, self.rows(name))
        saved: Tensor | SavedFile = self._parts[name]
        if self._mapped and isinstance(saved, SavedFile):
            return saved.mapped(rows.start)
        if isinstance(saved, SavedFile):
            saved.read(rows.start, tensor)
        else:
            tensor[: len(rows)].copy_(saved[rows.start :])
        return tensor

    def new(self, name: str, rows: range, memory: Memory) -> Tensor:
        """Load rows as a new tensor."""
        saved = self._parts[name]
        shape = (0 if self._mapped else len(rows), *saved.shape[1:])
        return self.into(name, rows, memory.empty(shape, saved.dtype))

    def objects(self, name: str, rows: range) -> list[object]:
        """Load Python objects; tensors among them are copied."""
        items: list[Any] = self._parts[name]
        _check_rows(name, rows, len(items))
        return [own(item, self._device) for item in items[rows.start :]]


def _check_rows(name: str, rows: range, saved: int) -> None:
    """Refuse parts with different numbers of rows."""
    if rows.stop != saved:
        raise ValueError(f"{name} must have been saved with {rows.stop} rows, it has {saved}.")


def _rows_at_a_time(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Number of rows to copy at a time."""
    return max(1, CHUNK // max(1, math.prod(shape[1:]) * dtype.itemsize))


def _bytes(rows: Tensor) -> np.ndarray:
    """View contiguous rows on the CPU as bytes."""
    # A tensor of one element is contiguous with any strides, but a view of bytes needs stride 1.
    return rows.detach().as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy()
