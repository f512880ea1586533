"""Plain forms of schemas and steps: what saved states hold instead of classes of this package.

``schema_from(plain_schema(schema)) == schema``, and likewise for steps. Plain are tensors, numbers,
strings, tuples, lists and dicts. The user's own objects and tensorclasses stay as they are.
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.schema import Entry, Schema
from torchrl_mt.data._store.steps import Column, Objects, Rows, Steps
from torchrl_mt.vision.images import StoredImage, kept_image

__all__ = [
    "dtype_from",
    "is_plain",
    "is_trusted",
    "load_plainly",
    "plain_dtype",
    "plain_schema",
    "plain_steps",
    "save_plainly",
    "schema_from",
    "steps_from",
    "trusting",
]

_PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)


_HARMLESS: list[Any] = [
    kept_image,
    np.ndarray,
    np.dtype,
    *(value.__reduce__()[0] for value in (np.empty(0), np.float32(0))),
    *{type(np.dtype(code)) for code in "?bhilqpBHILQPefdgFDGSUmM"},
]
"""What a file may call besides what torch admits: makers of images, and of NumPy's numbers and texts."""
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


def is_plain(state: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` reads a state.

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
        return type(state) in _PLAIN
    return all(map(is_plain, inside))


class _Pickler(pickle.Pickler):
    """Saves images as tensors: in the protocol that torch reads, bytes take half as much again."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not StoredImage:
            return NotImplemented
        make, (data, *rest) = value.__reduce__()
        return make, (torch.frombuffer(bytearray(data), dtype=torch.uint8), *rest)


def save_plainly(state: Any, file: Any) -> None:
    """Save a state so that :func:`load_plainly` reads it, if the user's data allow it."""
    torch.save(state, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))


def load_plainly(path: Path, *, device: str | None = "cpu", mmap: bool = False) -> Any:
    """Read what :func:`save_plainly` wrote; other Python objects only within :func:`trusting`.

    Args:
        path: the file.
        device: device of all tensors; None for those that they were on.
        mmap: whether to map large tensors instead of reading them.

    Raises:
        ValueError: if the file holds other objects, whose classes may run code, or is damaged.
    """
    torch.serialization.add_safe_globals(_HARMLESS)
    try:
        return torch.load(path, map_location=device, mmap=mmap, weights_only=not is_trusted())
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = (
            f"{found[1]} objects" if found else "more than tensors, numbers, texts and containers"
        )
        raise ValueError(
            f"{path} holds {what}, or is damaged. Reading objects may run code: give trust=True if you "
            f"trust whoever wrote the file."
        ) from error


@contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Let :func:`load_plainly` read any Python object, if ``trust``."""
    token = _trusted.set(trust or is_trusted())
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    """Whether any Python object may be read."""
    return _trusted.get()


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
    entries = []
    for path, entry in schema.entries.items():
        dtype = None if entry.dtype is None else plain_dtype(entry.dtype)
        entries.append({**vars(entry), "path": path, "dtype": dtype})
    return {"entries": entries, "root_class": schema.root_class}


def schema_from(saved: dict[str, Any] | None) -> Schema | None:
    """Return the schema that :func:`plain_schema` converted."""
    if saved is None:
        return None
    entries = {}
    for entry in map(dict, saved["entries"]):
        path, dtype = entry.pop("path"), entry["dtype"]
        entries[path] = Entry(**{**entry, "dtype": None if dtype is None else dtype_from(dtype)})
    return Schema(entries, saved["root_class"])


def plain_steps(steps: Steps) -> dict[str, Any]:
    """Convert steps to plain data, without a copy of their tensors."""

    def plain(column: Column) -> Tensor | dict[str, list[Any]]:
        if isinstance(column, Tensor):
            return column
        return {"rows" if isinstance(column, Rows) else "objects": column.items}

    columns = {path: plain(column) for path, column in steps.columns.items()}
    return {"length": steps.length, "columns": columns, "root_class": steps.root_class}


def steps_from(saved: dict[str, Any]) -> Steps:
    """Return the steps that :func:`plain_steps` converted."""

    def column(plain: Tensor | dict[str, list[Any]]) -> Column:
        if isinstance(plain, Tensor):
            return plain
        return Rows(plain["rows"]) if "rows" in plain else Objects(plain["objects"])

    columns = {path: column(plain) for path, plain in saved["columns"].items()}
    return Steps(saved["length"], columns, saved["root_class"])
