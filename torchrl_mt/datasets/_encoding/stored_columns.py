"""Columns as files hold them: NumPy arrays and JSON texts.

``decode(field, encode(field, column))`` equals the column, bit for bit.

A dense entry is an array ``[R, *shape]``. A ragged one is all values in one vector, and the shape of
each row. An object is its JSON text. ``R`` is the number of rows that an episode of ``T`` steps has:
``T``; for ``k`` with a shared ``("next", k)`` it is ``T + 1``, or ``2 T`` where the two disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.steps import Column, Objects, Path, Rows, Steps, name_of
from torchrl_mt.datasets._encoding.schema import EpisodeSchema, Field
from torchrl_mt.datasets._encoding.values import from_json_text, to_json_text

__all__ = [
    "DenseRows",
    "RaggedRows",
    "StoredRows",
    "TextRows",
    "array_dtype",
    "as_array",
    "as_tensor",
    "decode",
    "encode_episode",
]


@dataclass(frozen=True)
class DenseRows:
    """Rows of one shape."""

    values: np.ndarray
    """``[R, *shape]``, of :func:`array_dtype`."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class RaggedRows:
    """Rows of any shape."""

    values: np.ndarray
    """All values of all rows, one row after the other: a vector of :func:`array_dtype`."""
    shapes: np.ndarray
    """int64 ``[R, ndim]``."""

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True)
class TextRows:
    """Python objects."""

    texts: list[str]
    """``R`` JSON texts."""

    def __len__(self) -> int:
        return len(self.texts)


StoredRows = DenseRows | RaggedRows | TextRows


def array_dtype(field: Field) -> np.dtype:
    """Return the dtype of a field's arrays: integers of the same size for what NumPy lacks."""
    assert field.dtype is not None
    try:
        return torch.empty(0, dtype=field.dtype, device="cpu").numpy().dtype
    except TypeError:
        return np.dtype(f"i{field.dtype.itemsize}")


def encode_episode(schema: EpisodeSchema, steps: Steps) -> tuple[int, dict[Path, StoredRows]]:
    """Encode a conformed episode for a file.

    Returns:
        What :meth:`EpisodeSchema.disagreeing` returns, and the rows of every entry that is not shared.

    Raises:
        TypeError: if an object cannot be written; names its entry and step.
    """
    own = schema.disagreeing(steps)
    stored = {
        path: encode(path, field, steps.columns[path])
        for path, field in schema.fields.items()
        if not field.shared
    }
    for i, path in enumerate(schema.shared):
        following = encode(path, schema.fields[path], steps.columns[path])
        here = stored[path[1:]]
        assert isinstance(here, DenseRows)
        assert isinstance(following, DenseRows)
        more = following.values if own >> i & 1 else following.values[-1:]
        stored[path[1:]] = DenseRows(np.concatenate([here.values, more]))
    return own, stored


def encode(path: Path, field: Field, column: Column) -> StoredRows:
    """Encode one conformed column; arguments and errors as for :func:`encode_episode`."""
    if isinstance(column, Objects):
        texts = []
        for step, item in enumerate(column.items):
            try:
                texts.append(to_json_text(item))
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name_of(path)} of step {step}: {error}") from error
        return TextRows(texts)
    if isinstance(column, Tensor):
        return DenseRows(as_array(column))
    shapes = np.array([item.shape for item in column.items], dtype=np.int64)
    values = torch.cat([item.reshape(-1) for item in column.items])
    return RaggedRows(as_array(values), shapes.reshape(len(column.items), len(field.shape)))


def decode(field: Field, stored: StoredRows) -> Column:
    """Decode rows that were read from a file.

    The tensors may share the memory of the arrays, which must be writable.

    Raises:
        ValueError: if a text is no JSON, or values are missing.
    """
    if isinstance(stored, TextRows):
        return Objects([from_json_text(text) for text in stored.texts])
    if isinstance(stored, DenseRows):
        return as_tensor(field, stored.values)
    values, shapes = as_tensor(field, stored.values), stored.shapes
    items = values.split(shapes.prod(1).tolist())
    return Rows([item.reshape(shape) for item, shape in zip(items, shapes.tolist(), strict=True)])


def as_array(tensor: Tensor) -> np.ndarray:
    """View a tensor as an array of :func:`array_dtype`."""
    try:
        array: np.ndarray = tensor.numpy()
    except TypeError:
        integer = getattr(torch, f"int{8 * tensor.dtype.itemsize}")
        array = tensor.contiguous().view(integer).numpy()
    return array


def as_tensor(field: Field, array: np.ndarray) -> Tensor:
    """View an array of :func:`array_dtype` as a tensor of the field's dtype."""
    assert field.dtype is not None
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == field.dtype else tensor.view(field.dtype)
