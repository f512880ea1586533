"""What a checkpoint keeps of a column: named tensors of the rows that count, oldest first.

They are written to files as they lie in memory, a few megabytes at a time, and read back the same
way, or mapped. A file is checked while it is read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.files.hashes import CHUNK, HashedFile, check_hash, damaged, hashing
from torchrl_mt.data._store.steps import Objects, own

__all__ = ["FileParts", "Form", "MappedParts", "Part", "SavedParts", "TensorParts", "write_part"]


@dataclass(frozen=True)
class Part:
    """A tensor of a column."""

    pieces: list[Tensor]
    """Views of the rows that count, oldest first: at least one, of none or more rows each."""
    saved_as: Callable[[Tensor], Tensor] | None = None
    """What some rows of it are saved as; None for as they are."""

    def whole(self) -> Tensor:
        """All rows, as new memory."""
        return torch.cat([self._saved(piece) for piece in self.pieces])

    def chunks(self) -> Iterator[Tensor]:
        """The rows, some at a time: contiguous, on the CPU."""
        for piece in self.pieces:
            for some in piece.split(_rows_at_a_time(piece)):
                yield self._saved(some).contiguous().cpu()

    def _saved(self, rows: Tensor) -> Tensor:
        return rows if self.saved_as is None else self.saved_as(rows)


@dataclass(frozen=True)
class Form:
    """The file that holds a part, and what it looks like."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_part(part: Part, file: HashedFile, name: str) -> Form:
    """Write the rows of a part to a file of that name."""
    for chunk in part.chunks():
        file.write(_bytes(chunk))
    first = part.pieces[0]
    rows = sum(map(len, part.pieces))
    return Form(name, (rows, *first.shape[1:]), first.dtype)


class SavedParts(Protocol):
    """The saved parts of a column, to be loaded.

    Rows that are asked for end with the last; other numbers are a ``ValueError``.
    """

    def __contains__(self, name: str) -> bool:
        """Whether there is such a part."""

    def rows(self, name: str) -> int:
        """How many rows were saved."""

    def into(self, name: str, rows: range, tensor: Tensor) -> Tensor:
        """Load the rows into the first rows of ``tensor``, and give it back; or give them as they lie
        in a file that is mapped, in place of ``tensor``.
        """

    def new(self, name: str, rows: range, memory: Memory) -> Tensor:
        """The rows as a tensor of their own."""

    def objects(self, name: str, rows: range) -> list[object]:
        """The Python objects of the rows, with tensors of their own."""


class TensorParts:
    """Parts that are in memory.

    Args:
        parts: by name.
        device: where objects are to have their tensors.
    """

    def __init__(self, parts: Mapping[str, Tensor | Objects], device: torch.device) -> None:
        self._parts = parts
        self._device = device

    def __contains__(self, name: str) -> bool:
        """Whether there is such a part."""
        return name in self._parts

    def rows(self, name: str) -> int:
        """How many rows were saved."""
        return len(self._tensor(name))

    def into(self, name: str, rows: range, tensor: Tensor) -> Tensor:
        """Load the rows into the first rows of ``tensor``."""
        _check_rows(name, rows, self.rows(name))
        tensor[: len(rows)].copy_(self._tensor(name)[rows.start :])
        return tensor

    def new(self, name: str, rows: range, memory: Memory) -> Tensor:
        """The rows as a tensor of their own."""
        saved = self._tensor(name)
        return self.into(name, rows, memory.empty((len(rows), *saved.shape[1:]), saved.dtype))

    def objects(self, name: str, rows: range) -> list[object]:
        """The Python objects of the rows, with tensors of their own."""
        return _objects(self._parts[name], name, rows, self._device)

    def _tensor(self, name: str) -> Tensor:
        saved = self._parts[name]
        assert isinstance(saved, Tensor)
        return saved


class FileParts:
    """Parts that are in files, which are checked as they are read.

    Args:
        parts: by name: the form of a tensor, or objects.
        folder: where the files are.
        hashes: of the files.
        device: where objects are to have their tensors.
    """

    def __init__(
        self,
        parts: Mapping[str, Form | Objects],
        folder: Path,
        hashes: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._parts = parts
        self._folder = folder
        self._hashes = hashes
        self._device = device

    def __contains__(self, name: str) -> bool:
        """Whether there is such a part."""
        return name in self._parts

    def rows(self, name: str) -> int:
        """How many rows were saved."""
        return self._form(name).shape[0]

    def into(self, name: str, rows: range, tensor: Tensor) -> Tensor:
        """Load the rows into the first rows of ``tensor``."""
        form = self._form(name)
        _check_rows(name, rows, form.shape[0])
        file, found = self._folder / form.file, hashing()
        places = tensor[: len(rows)]
        with open(file, "rb") as stream:

            def read(some: Tensor) -> None:
                data = _bytes(some)
                if stream.readinto(data.data) != data.nbytes:
                    raise damaged(file, "is too short")
                found.update(data)

            def passing(some: int) -> Tensor:
                return torch.empty((some, *form.shape[1:]), dtype=form.dtype, device="cpu")

            at_a_time = _rows_at_a_time(places)
            for done in range(0, rows.start, at_a_time):
                read(passing(min(at_a_time, rows.start - done)))
            for place in places.split(at_a_time):
                if place.device.type == "cpu" and place.is_contiguous():
                    read(place)
                else:
                    values = passing(len(place))
                    read(values)
                    place.copy_(values)
        if found.hexdigest() != self._hashes[form.file]:
            raise damaged(file)
        return tensor

    def new(self, name: str, rows: range, memory: Memory) -> Tensor:
        """The rows as a tensor of their own."""
        form = self._form(name)
        return self.into(name, rows, memory.empty((len(rows), *form.shape[1:]), form.dtype))

    def objects(self, name: str, rows: range) -> list[object]:
        """The Python objects of the rows, with tensors of their own."""
        return _objects(self._parts[name], name, rows, self._device)

    def check(self) -> None:
        """Read every file, to see whether it is as it was written.

        Raises:
            ValueError: if one is damaged.
        """
        for part in self._parts.values():
            if isinstance(part, Form):
                check_hash(self._folder / part.file, self._hashes[part.file])

    def _form(self, name: str) -> Form:
        form = self._parts[name]
        assert isinstance(form, Form)
        return form


class MappedParts(FileParts):
    """Parts that are in files, which are mapped, not read: whoever writes to one has a copy."""

    def into(self, name: str, rows: range, tensor: Tensor) -> Tensor:
        """The rows as they lie in their file."""
        form = self._form(name)
        _check_rows(name, rows, form.shape[0])
        shape = (len(rows), *form.shape[1:])
        if not math.prod(shape):
            return torch.empty(shape, dtype=form.dtype, device="cpu")
        with open(self._folder / form.file, "rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        begin = rows.start * math.prod(shape[1:]) * form.dtype.itemsize
        mapped = torch.frombuffer(data, dtype=torch.uint8, offset=begin)
        return mapped.view(form.dtype).view(shape)

    def new(self, name: str, rows: range, memory: Memory) -> Tensor:
        """The rows as they lie in their file."""
        return self.into(name, rows, torch.empty(0, device="cpu"))


def _check_rows(name: str, rows: range, saved: int) -> None:
    """Refuse parts that do not belong together."""
    if rows.stop != saved:
        raise ValueError(f"{name} must have been saved with {rows.stop} rows, it has {saved}")


def _objects(saved: object, name: str, rows: range, device: torch.device) -> list[object]:
    """The objects of the rows, with tensors of their own on ``device``."""
    assert isinstance(saved, Objects)
    _check_rows(name, rows, len(saved.items))
    return [own(item, device) for item in saved.items[rows.start :]]


def _rows_at_a_time(rows: Tensor) -> int:
    """How many rows to copy at a time."""
    return max(1, CHUNK // max(1, math.prod(rows.shape[1:]) * rows.element_size()))


def _bytes(rows: Tensor) -> np.ndarray:
    """The memory of contiguous rows on the CPU."""
    # A tensor of one element is contiguous whatever its strides are, and a view of bytes asks for 1.
    return rows.detach().as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy()
