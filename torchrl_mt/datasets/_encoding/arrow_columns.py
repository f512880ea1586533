"""Stored columns as Arrow arrays with one value per row.

``rows(path, arrays(columns)[path], index)`` has the rows ``index`` of ``columns[path]``, bit for bit.

- A dense row is a number, or a fixed-size list.
- A ragged row is a list. With more than one dimension, a second column has its shape.
- An object is a string: itself if it is one, and JSON otherwise.
- Complex numbers are pairs. A dtype that NumPy lacks is an integer of its size.
- Rows without any values, such as those of shape ``[0]``, have no column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from torchrl_mt.data._store.steps import Path, name_of
from torchrl_mt.datasets._encoding.schema import EpisodeSchema, Field
from torchrl_mt.datasets._encoding.stored_columns import (
    DenseRows,
    RaggedRows,
    StoredRows,
    TextRows,
    array_dtype,
)
from torchrl_mt.datasets._files.readers import runs_of

__all__ = ["ArrowColumns"]

_MOST_VALUES = 2**31 - 1
"""Most values, or bytes of text, of one Arrow list array."""
_json = json.JSONDecoder(parse_int=len)
"""Says whether a text is JSON, however many digits its numbers have."""


class ArrowColumns:
    """The Arrow columns of a schema.

    Args:
        schema: the schema; shared entries have no column.
        name: returns the name of an entry's column.
        reserved: names that are taken.
        nested: whether a dense row ``[2, 3]`` is a list of lists, and not one list of 6 numbers.
    """

    def __init__(
        self,
        schema: EpisodeSchema,
        name: Callable[[Path], str],
        reserved: Collection[str],
        *,
        nested: bool,
    ) -> None:
        self._nested = nested
        self._fields = {path: field for path, field in schema.fields.items() if not field.shared}
        taken = set(reserved)

        def unused(wanted: str) -> str:
            found, number = wanted, 2
            while found.lower() in taken:
                found, number = f"{wanted}_{number}", number + 1
            taken.add(found.lower())
            return found

        self.names: dict[Path, list[str]] = {}
        """Names of the columns of each entry: of its values and, perhaps, of their shapes."""
        for path, field in self._fields.items():
            if 0 in field.shape:
                self.names[path] = []
                continue
            self.names[path] = [unused(name(path))]
            if field.kind == "ragged" and len(field.shape) > 1:
                self.names[path].append(unused(name((*path, "shape"))))

    def arrays(self, columns: Mapping[Path, StoredRows]) -> dict[str, Any]:
        """Convert columns to Arrow arrays, by name.

        Raises:
            ValueError: if a column has more values than Arrow's lists can have; names it.
        """
        found: dict[str, Any] = {}
        for path, names in self.names.items():
            if names:
                made = self._arrays(path, self._fields[path], columns[path])
                found |= dict(zip(names, made, strict=True))
        return found

    def rows(self, path: Path, arrays: Sequence[Any], index: np.ndarray) -> StoredRows:
        """Copy rows out of the Arrow arrays of an entry.

        Args:
            path: the entry.
            arrays: its arrays, in the order of its names.
            index: int64 ``[N]``, positions in them.
        """
        field = self._fields[path]
        if field.kind == "object":
            return TextRows([_json_text(text) for text in arrays[0].take(index).to_pylist()])
        if not arrays:
            return DenseRows(np.empty((len(index), *field.shape), array_dtype(field)))
        if field.kind == "dense":
            values = arrays[0]
            for _ in self._lists(field):
                values = values.flatten()
            return DenseRows(_numbers(values, field).reshape(-1, *field.shape)[index])
        if not field.shape:
            shapes = np.empty((len(index), 0), dtype=np.int64)
            return RaggedRows(_numbers(arrays[0], field)[index], shapes)
        offsets = arrays[0].offsets.to_numpy().astype(np.int64)
        first, counts = offsets[index], np.diff(offsets)[index]
        every = _numbers(arrays[0].values, field)
        if len(index) and (first[1:] == first[:-1] + counts[:-1]).all():
            values = every[first[0] : first[-1] + counts[-1]].copy()
        else:
            values = every[runs_of(first, counts, 1)]
        if len(field.shape) == 1:
            return RaggedRows(values, counts[:, None])
        shapes = arrays[1].flatten().to_numpy().reshape(-1, len(field.shape))[index]
        return RaggedRows(values, shapes)

    def _lists(self, field: Field) -> tuple[int, ...]:
        """Return the sizes of the nested lists of a dense row."""
        size = math.prod(field.shape)
        if size == 1:
            return ()
        return field.shape if self._nested else (size,)

    def _arrays(self, path: Path, field: Field, stored: StoredRows) -> list[Any]:
        import pyarrow as pa

        if isinstance(stored, TextRows):
            texts = [_readable(text) for text in stored.texts]
            _check_size(path, sum(len(text.encode()) for text in texts))
            return [pa.array(texts, pa.string())]
        values = stored.values.reshape(-1)
        made = pa.array(np.ascontiguousarray(values).view(_real(values.dtype)))
        if values.dtype.kind == "c":
            made = pa.FixedSizeListArray.from_arrays(made, 2)
        if isinstance(stored, DenseRows):
            for size in reversed(self._lists(field)):
                made = pa.FixedSizeListArray.from_arrays(made, size)
            return [made]
        if not field.shape:
            return [made]
        _check_size(path, len(values))
        ends = stored.shapes.prod(1).cumsum()
        offsets = np.concatenate([np.zeros(1, np.int64), ends]).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), made)
        if len(field.shape) == 1:
            return [lists]
        shapes = pa.array(np.ascontiguousarray(stored.shapes).reshape(-1))
        return [lists, pa.FixedSizeListArray.from_arrays(shapes, len(field.shape))]


def _real(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the numbers of a pair; other dtypes as they are."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def _numbers(array: Any, field: Field) -> np.ndarray:
    """View an Arrow array of numbers as a NumPy array."""
    dtype = array_dtype(field)
    if dtype.kind == "c":
        array = array.flatten()
    numbers: np.ndarray = array.to_numpy(zero_copy_only=dtype.kind != "b")
    return numbers.view(dtype)


def _check_size(path: Path, size: int) -> None:
    if size > _MOST_VALUES:
        raise ValueError(
            f"{name_of(path)} has {size} values or bytes of text in one episode, and the format takes "
            f"{_MOST_VALUES}: use format='hdf5' or 'folder', or split the episode."
        )


def _readable(text: str) -> str:
    """Return the string that a JSON text stands for, unless it would read as JSON; else the text."""
    if not text.startswith('"'):
        return text
    string: str = json.loads(text)
    return text if _is_json(string) else string


def _json_text(text: str) -> str:
    """Invert :func:`_readable`."""
    return text if _is_json(text) else json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        _json.decode(text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True
