"""Plain forms of schemas and steps: what saved states hold instead of classes of this package.

``schema_from(plain_schema(schema)) == schema``, and likewise for steps. Plain are tensors, numbers,
strings, tuples, lists and dicts. The user's own objects and tensorclasses stay as they are. States of
release 0.1.0, which hold the classes, are read too.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchrl_mt.data._store.schema import Entry, Schema
from torchrl_mt.data._store.steps import Column, Objects, Rows, Steps

__all__ = [
    "dtype_from",
    "is_plain",
    "items_from",
    "plain_dtype",
    "plain_schema",
    "plain_steps",
    "save_plainly",
    "schema_from",
    "steps_from",
]


_PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)


def is_plain(state: Any, *, with_bytes: bool = True) -> bool:
    """Whether ``torch.load(weights_only=True)`` reads a state; without bytes, only if it has none.

    Examples:
        >>> is_plain({"weight": torch.ones(2), "steps": [1, 2]}), is_plain(object())
        (True, False)
    """
    if type(state) in (dict, OrderedDict):
        inside: Iterable[Any] = [*state, *state.values(), *getattr(state, "__dict__", {}).values()]
    elif type(state) in (list, tuple, set):
        inside = state
    elif type(state) is Tensor:
        return state.layout is torch.strided and not (state.is_nested or vars(state))
    else:
        return type(state) in _PLAIN or (with_bytes and type(state) is bytes)
    return all(is_plain(value, with_bytes=with_bytes) for value in inside)


def save_plainly(state: Any, file: Any) -> None:
    """Save a state so that ``torch.load(weights_only=True)`` reads it, if the user's data allow it."""
    # It reads torch's own pickle protocol only, in which bytes, such as images, take half as much again.
    short = not is_plain(state, with_bytes=False)
    protocol = pickle.DEFAULT_PROTOCOL if short else torch.serialization.DEFAULT_PROTOCOL
    torch.save(state, file, pickle_protocol=protocol)


def plain_dtype(dtype: torch.dtype) -> str:
    """Name a dtype.

    Examples:
        >>> plain_dtype(torch.int64), dtype_from("int64")
        ('int64', torch.int64)
    """
    return str(dtype).removeprefix("torch.")


def dtype_from(saved: str) -> torch.dtype:
    """Return the dtype of a name."""
    dtype: torch.dtype = getattr(torch, saved)
    return dtype


def plain_schema(schema: Schema | None) -> dict[str, Any] | None:
    """Convert a schema, or None, to plain data."""
    if schema is None:
        return None
    entries = [
        {
            "path": path,
            "kind": entry.kind,
            "shape": tuple(entry.shape),
            "dtype": None if entry.dtype is None else plain_dtype(entry.dtype),
            "lazy": entry.lazy,
            "shared": entry.shared,
        }
        for path, entry in schema.entries.items()
    ]
    return {"entries": entries, "root_class": schema.root_class}


def schema_from(saved: Any) -> Schema | None:
    """Return the schema that :func:`plain_schema` converted."""
    if saved is None or isinstance(saved, Schema):
        return saved
    entries = {}
    for entry in saved["entries"]:
        dtype = None if entry["dtype"] is None else dtype_from(entry["dtype"])
        shape, marks = tuple(entry["shape"]), {name: entry[name] for name in ("lazy", "shared")}
        entries[tuple(entry["path"])] = Entry(entry["kind"], shape, dtype, **marks)
    return Schema(entries, saved["root_class"])


def plain_steps(steps: Steps) -> dict[str, Any]:
    """Convert steps to plain data, without a copy of their tensors."""

    def plain(column: Column) -> Tensor | dict[str, list[Any]]:
        if isinstance(column, Tensor):
            return column
        return {"rows" if isinstance(column, Rows) else "objects": column.items}

    columns = {path: plain(column) for path, column in steps.columns.items()}
    return {"length": steps.length, "columns": columns, "root_class": steps.root_class}


def steps_from(saved: Any) -> Steps:
    """Return the steps that :func:`plain_steps` converted."""
    if isinstance(saved, Steps):
        return saved

    def column(plain: Tensor | dict[str, list[Any]]) -> Column:
        if isinstance(plain, Tensor):
            return plain
        return Rows(plain["rows"]) if "rows" in plain else Objects(plain["objects"])

    columns = {path: column(plain) for path, plain in saved["columns"].items()}
    return Steps(saved["length"], columns, saved["root_class"])


def items_from(saved: Any) -> list[Any]:
    """Return the objects of a saved column, which are a list."""
    return saved.items if isinstance(saved, Objects) else saved
