"""An episode as the JSON data of one line, from which it is read back bit for bit.

A line has

- ``length``: number of steps;
- ``messages``: the whole dialogue, if the entry ``"text"`` holds the new messages of each turn, and
  ``messages_per_turn``: how many each turn has (the entry itself is not written then);
- ``tools``: of the metadata, if they have some;
- ``reward``: sum of the steps' rewards, if there are any, for other tools;
- ``metadata``;
- ``steps``: the entries, nested like their keys, each a list with one value per step;
- ``crc32``: checksum of all else;
- ``dtypes``: nested likewise, such as ``"float32[3]"``; ``"int64[?]"`` if the length varies. What
  numbers of JSON cannot tell (NaN, infinities, sizes beside a 0) follows it, and is null in ``steps``.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.steps import Column, Objects, Path, Rows, name_of
from torchrl_mt.datasets._encoding.schema import Field
from torchrl_mt.datasets._encoding.stored_columns import (
    DenseRows,
    RaggedRows,
    StoredRows,
    TextRows,
    array_dtype,
    as_tensor,
)
from torchrl_mt.datasets._encoding.values import dtype_name, dtype_of, from_json_text
from torchrl_mt.datasets._files.writers import EncodedEpisode

__all__ = ["checked_line", "columns_of", "describe", "fields_of", "with_crc"]

_DTYPE = re.compile(
    r"(?P<dtype>\w+)(?:\[(?P<shape>[\d?, ]*)\])?(?P<stacked> stacked)?"
    r"(?: shapes=(?P<shapes>\S+))?(?: bytes=(?P<bytes>\S*))?"
)
_TEXT: Path = ("text",)
_REWARD: Path = ("next", "reward")


def describe(episode: EncodedEpisode) -> dict[str, Any]:
    """Return the line of an episode."""
    fields, columns = episode.schema.fields, episode.columns
    line: dict[str, Any] = {"length": episode.length}
    texts = columns.get(_TEXT)
    turns = [json.loads(text) for text in texts.texts] if isinstance(texts, TextRows) else None
    if turns is not None:
        spoken = all(map(_is_messages, turns))
        line["messages"] = [message for turn in turns for message in turn] if spoken else []
        line["messages_per_turn"] = list(map(len, turns)) if spoken else []
        if spoken:
            columns = {path: rows for path, rows in columns.items() if path != _TEXT}
    plain = json.loads(episode.metadata)
    if isinstance(plain.get("tools"), list) and "__type__" not in plain:
        line["tools"] = plain.pop("tools")
    line |= _reward(fields.get(_REWARD), columns.get(_REWARD))
    line |= {"metadata": plain, "steps": {}, "dtypes": {}}
    for path, field in fields.items():
        values, note = _plain(field, columns[path]) if path in columns else (None, "object")
        _put(line["dtypes"], path, note)
        if path in columns:
            _put(line["steps"], path, values)
    return line


def with_crc(line: dict[str, Any]) -> dict[str, Any]:
    """Append the checksum of a line to it, as its last entry."""
    return {**line, "crc32": _crc(line)}


def checked_line(text: bytes) -> Any:
    """Parse a line; one that has a checksum must hold what was written.

    The order of its keys and its spaces may differ: tools that filter lines write them anew.

    Raises:
        ValueError: if it is no JSON, or has changed.
    """
    line = json.loads(text)
    if isinstance(line, dict) and "crc32" in line and line.pop("crc32") != _crc(line):
        raise ValueError(
            "it is not as it was written. If it was changed on purpose, remove its 'crc32'"
        )
    # Without Python objects, parsing once is enough.
    return from_json_text(json.dumps(line)) if b"__type__" in text else line


def _crc(line: dict[str, Any]) -> str:
    return f"{crc32(json.dumps(line, sort_keys=True).encode()):08x}"


def columns_of(line: Mapping[str, Any]) -> Iterator[tuple[Path, Column]]:
    """Iterate over the entries of an episode; undoes :func:`describe`.

    Args:
        line: as :func:`~torchrl_mt.datasets._encoding.values.from_json_text` reads it.

    Raises:
        ValueError: if it contradicts itself; damage may raise other errors, too.
    """
    steps = dict(_leaves(line["steps"]))
    counts = line.get("messages_per_turn", [])
    for path, note in _leaves(line["dtypes"]):
        if path == _TEXT and counts:
            messages = iter(line["messages"])
            turns = [list(islice(messages, count)) for count in counts]
            rest = len(list(messages))
            if rest or [*map(len, turns)] != counts or len(counts) != line["length"]:
                raise ValueError("'messages_per_turn' does not count its messages.")
            yield path, Objects(turns)
        elif path not in steps:
            raise ValueError(f"{name_of(path)} is in 'dtypes' and not in 'steps'.")
        else:
            yield path, _column(steps[path], note, line["length"])


def fields_of(line: Mapping[str, Any]) -> dict[Path, Field]:
    """Return the entries of an episode.

    Raises:
        ValueError: if a note is no dtype.
        TypeError: likewise.
    """
    return {path: _parse_dtype(note)[0] for path, note in _leaves(line["dtypes"])}


def _plain(field: Field, stored: StoredRows) -> tuple[list[Any], str]:
    """Return one value per step, and the note on its dtype."""
    if isinstance(stored, TextRows):
        return [json.loads(text) for text in stored.texts], "object"
    assert field.dtype is not None
    note = dtype_name(field.dtype)
    if field.shape:
        note += f"[{', '.join('?' if size < 0 else str(size) for size in field.shape)}]"
    if field.stacked:
        note += " stacked"
    numbers = _numbers(as_tensor(field, stored.values))
    if isinstance(stored, RaggedRows):
        ends = stored.shapes.prod(1).cumsum()
        parts = zip(np.split(numbers, ends[:-1]), stored.shapes.tolist(), strict=True)
        values = [part.reshape((*shape, *numbers.shape[1:])).tolist() for part, shape in parts]
        if len(field.shape) > 1 and not stored.shapes.all():
            note += f" shapes={json.dumps(stored.shapes.tolist(), separators=(',', ':'))}"
    else:
        values = numbers.tolist()
    if not np.isfinite(numbers).all():
        values = _without_odd(values)
        note += f" bytes={base64.b64encode(stored.values.tobytes()).decode()}"
    return values, note


def _column(values: Any, note: str, length: int) -> Column:
    """Undo :func:`_plain`."""
    field, shapes, data = _parse_dtype(note)
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"expected a list of {length} values, one per step.")
    if field.dtype is None:
        return Objects(values)
    ragged = field.kind == "ragged"
    if data is not None:
        array = np.frombuffer(base64.b64decode(data), array_dtype(field)).copy()
        flat = as_tensor(field, array)
    else:
        flat = _tensor(field.dtype, _flat(values, len(field.shape)) if ragged else values)
    if not ragged:
        return flat.reshape(length, *field.shape)
    if shapes is None:
        shapes = [_shape(value, len(field.shape)) for value in values]
    parts = flat.split([math.prod(shape) for shape in shapes])
    return Rows([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])


def _parse_dtype(note: str) -> tuple[Field, list[list[int]] | None, str | None]:
    """Return the field that a note describes, shapes of the steps and base64 of the values."""
    found = _DTYPE.fullmatch(note)
    if found is None:
        raise ValueError(f"{note!r} is no dtype.")
    if found["dtype"] == "object":
        return Field("object"), None, None
    sizes = [size.strip() for size in (found["shape"] or "").split(",") if size.strip()]
    shape = tuple(-1 if size == "?" else int(size) for size in sizes)
    stacked = found["stacked"] is not None
    kind: Any = "ragged" if stacked or -1 in shape else "dense"
    shapes = None if found["shapes"] is None else json.loads(found["shapes"])
    return Field(kind, shape, dtype_of(found["dtype"]), stacked), shapes, found["bytes"]


def _numbers(tensor: Tensor) -> np.ndarray:
    """Convert a tensor to integers, bools or float64, without rounding; complex numbers to pairs."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    array: np.ndarray = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    return array


def _tensor(dtype: torch.dtype, numbers: list[Any]) -> Tensor:
    """Undo :func:`_numbers`."""
    if dtype.is_complex:
        pairs = torch.from_numpy(np.array(numbers, dtype=np.float64).reshape(-1, 2))
        return torch.view_as_complex(pairs.to(dtype.to_real()))
    if dtype.is_floating_point:
        return torch.from_numpy(np.array(numbers, dtype=np.float64)).to(dtype)
    return torch.from_numpy(np.array(numbers, dtype=array_dtype(Field("dense", (), dtype))))


def _without_odd(values: Any) -> Any:
    """Replace NaN and infinities by None."""
    if isinstance(values, list):
        return [_without_odd(value) for value in values]
    return values if math.isfinite(values) else None


def _flat(values: list[Any], depth: int) -> list[Any]:
    """Join the lists in a list, ``depth`` times."""
    for _ in range(depth):
        values = list(chain.from_iterable(values))
    return values


def _shape(value: Any, ndim: int) -> list[int]:
    """Return the shape of nested lists without a 0, or of one list."""
    shape = []
    for _ in range(ndim):
        shape.append(len(value))
        value = value[0] if value else []
    return shape


def _reward(field: Field | None, stored: StoredRows | None) -> dict[str, Any]:
    """Return the sum of the rewards, if there are any."""
    if (
        field is None
        or field.dtype is None
        or field.dtype.is_complex
        or not isinstance(stored, DenseRows)
    ):
        return {}
    if math.prod(field.shape) != 1:
        return {}
    total = float(_numbers(as_tensor(field, stored.values)).sum(dtype=np.float64))
    return {"reward": total if math.isfinite(total) else None}


def _is_messages(turn: Any) -> bool:
    return isinstance(turn, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and "__type__" not in message
        for message in turn
    )


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Put a value into nested dicts."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _leaves(tree: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Iterate over the values of nested dicts."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
