"""Files of one entry of one episode, for formats that are folders.

A dense entry is an array in ``NAME.npy``. Objects are JSON texts, one a line, in ``NAME.jsonl``. A
ragged entry is the folder ``NAME`` with all values in ``values.npy``, one row after the other, and the
shape of each row in ``shapes.npy``. No two keys have the same name, on any file system.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path as FilePath

import numpy as np

from torchrl_mt.data._store.steps import Path
from torchrl_mt.datasets._encoding.schema import Field
from torchrl_mt.datasets._encoding.stored_columns import (
    DenseRows,
    RaggedRows,
    StoredRows,
    TextRows,
    array_dtype,
)
from torchrl_mt.datasets._files.checksums import CheckedFiles
from torchrl_mt.datasets._files.readers import DatasetError

__all__ = [
    "EntryFiles",
    "entry_name",
    "errors_named",
    "read_array",
    "read_rows",
    "read_shapes",
    "with_suffix",
    "write_array",
    "write_rows",
]

_PLAIN = re.compile(r"[a-z0-9_][a-z0-9_-]*")
_LONGEST = 100
_SUFFIXES = ("npy", "jsonl", "mp4")
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)
"""Names that Windows keeps for devices, whatever follows a dot."""


def entry_name(path: Path) -> str:
    """Return the name of an entry's files, without a suffix.

    It is the key's parts, joined by dots. A name that would be unclear or unsafe on some file system (it
    has capitals, dots or other characters, or is long) is made plain and has a hash of the key behind
    a tilde.

    Examples:
        >>> entry_name(("next", "reward"))
        'next.reward'
        >>> entry_name(("../qPos",))
        'qPos~3cf671805a8fc36b'
    """
    name = ".".join(path)
    is_plain = all(map(_PLAIN.fullmatch, path)) and len(name) <= _LONGEST
    if is_plain and path[-1] not in _SUFFIXES and not _DEVICES.fullmatch(path[0]):
        return name
    slug = re.sub(r"[^a-zA-Z0-9_.-]+", "_", name)[: _LONGEST // 2].strip("_.-")
    if not slug or _DEVICES.fullmatch(slug.split(".")[0]):
        slug = f"_{slug}"
    key = hashlib.sha256(json.dumps(path).encode())
    return f"{slug}~{key.hexdigest()[:16]}"


def with_suffix(base: FilePath, suffix: str) -> FilePath:
    """Return the file of an entry; ``base`` is its name, dots and all."""
    return base.with_name(f"{base.name}.{suffix}")


@contextmanager
def errors_named(file: FilePath) -> Iterator[None]:
    """Turn errors of reading a file into a ``DatasetError`` that names it."""
    try:
        yield
    except (ImportError, DatasetError):
        raise
    except Exception as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged: {error}"
        raise DatasetError(
            f"{file} {why.rstrip('.')}. Restore it from a copy, or leave the episode out, as "
            f"episodes(skip_unreadable=True) does."
        ) from error


def write_rows(base: FilePath, stored: StoredRows) -> None:
    """Write all rows of an entry."""
    if isinstance(stored, TextRows):
        lines = "".join(f"{text}\n" for text in stored.texts)
        with_suffix(base, "jsonl").write_bytes(lines.encode())
    elif isinstance(stored, DenseRows):
        write_array(with_suffix(base, "npy"), stored.values)
    else:
        base.mkdir()
        write_array(base / "values.npy", stored.values)
        write_array(base / "shapes.npy", stored.shapes)


@dataclass(frozen=True)
class EntryFiles:
    """The files of one entry of one episode, to be read."""

    files: CheckedFiles
    folder: FilePath
    """That of the episode."""
    episode: int
    name: str
    """:func:`entry_name` of the entry."""

    def mapped(self, end: str) -> FilePath:
        """Return the file ``name + end``, which is as it was written; errors name it."""
        with errors_named(self.path(end)):
            return self.files.mapped(self.folder, self.episode, self.name + end)

    def data(self, end: str) -> bytes:
        """Read a file; likewise."""
        with errors_named(self.path(end)):
            return self.files.data(self.folder, self.episode, self.name + end)

    def path(self, end: str) -> FilePath:
        """Return the path of a file, which may not be there."""
        return self.folder / (self.name + end)


def read_rows(entry: EntryFiles, field: Field, rows: np.ndarray) -> StoredRows:
    """Read these rows of an entry.

    Raises:
        DatasetError: if they cannot be read; names the file.
    """
    if field.kind == "object":
        return _read_texts(entry.mapped(".jsonl"), rows)
    dtype = array_dtype(field)
    if field.kind == "dense":
        file = entry.mapped(".npy")
        with errors_named(file):
            return DenseRows(read_array(file, dtype, field.shape)[rows])
    shapes = read_shapes(entry, field)
    ends = shapes.prod(1).cumsum()
    file = entry.mapped("/values.npy")
    with errors_named(file):
        values = read_array(file, dtype, ())
        if len(values) != ends[-1]:
            raise ValueError(f"it has {len(values)} values, and the shapes have {ends[-1]}.")
        starts = ends - shapes.prod(1)
        parts = [values[begin:end] for begin, end in zip(starts[rows], ends[rows], strict=True)]
        return RaggedRows(np.concatenate(parts), shapes[rows])


def read_shapes(entry: EntryFiles, field: Field) -> np.ndarray:
    """Read the shape of every row of a ragged entry: int64 ``[R, ndim]``."""
    file = entry.mapped("/shapes.npy")
    with errors_named(file):
        shapes = read_array(file, np.dtype(np.int64), (len(field.shape),)).copy()
        if not len(shapes) or shapes.min(initial=0) < 0:
            raise ValueError("it has no rows, or negative sizes.")
        return shapes


def write_array(file: FilePath, values: np.ndarray) -> None:
    """Write an array in rows."""
    np.save(file, np.ascontiguousarray(values), allow_pickle=False)


def read_array(file: FilePath, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Map an array ``[R, *shape]``, for reading only; ``ValueError`` if it is another."""
    values = np.asarray(np.lib.format.open_memmap(file, mode="r"))
    if values.dtype != dtype or values.ndim < 1 or values.shape[1:] != shape:
        raise ValueError(
            f"it has {values.dtype} {values.shape}, expected {dtype} rows of shape {shape}."
        )
    return values


def _read_texts(file: FilePath, rows: np.ndarray) -> TextRows:
    """Read these lines of a file."""
    wanted = rows.tolist()
    with errors_named(file), open(file, "rb") as lines:
        found = list(islice(lines, max(wanted) + 1))
        texts = [found[row].decode() for row in wanted]
        for text in texts:
            if not text.endswith("\n"):
                raise ValueError("its last line is cut off.")
        return TextRows(texts)
