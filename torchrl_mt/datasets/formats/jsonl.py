"""JSON Lines: one file, one line per episode, for conversations.

Every line describes itself, so lines may be joined, filtered and shuffled by any tool. It has

- ``length``: number of steps;
- ``messages``: the whole dialogue, if the entry ``"text"`` holds the new messages of each turn, and
  ``messages_per_turn``: how many each turn has (the entry itself is not written then);
- ``tools``: of the metadata, if they have some;
- ``reward``: sum of the steps' rewards, if there are any, for other tools;
- ``metadata``;
- ``steps``: the entries, nested like their keys, each a list with one value per step;
- ``dtypes``: nested likewise, such as ``"float32[3]"``; ``"int64[?]"`` if the length varies. What
  numbers of JSON cannot tell (NaN, infinities, sizes beside a 0) follows it, and is null in ``steps``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.steps import Column, Objects, Path, Rows, Steps, name_of
from torchrl_mt.datasets.readers import DatasetError, WholeReader
from torchrl_mt.datasets.registry import Format, Mode
from torchrl_mt.datasets.schema import EpisodeSchema, Field
from torchrl_mt.datasets.stored_columns import (
    DenseRows,
    RaggedRows,
    StoredRows,
    TextRows,
    array_dtype,
    as_tensor,
)
from torchrl_mt.datasets.values import dtype_name, dtype_of, from_json_text
from torchrl_mt.datasets.write_lock import replace, unfinished_path
from torchrl_mt.datasets.writers import FormatWriter
from torchrl_mt.json_lines import append_lines, line_of

__all__ = ["FORMAT"]

_LENGTH = re.compile(rb'\s*\{\s*"length"\s*:\s*(\d+)\s*[,}]')
"""The beginning of a line."""
_DTYPE = re.compile(
    r"(?P<dtype>\w+)(?:\[(?P<shape>[\d?, ]*)\])?(?P<stacked> stacked)?"
    r"(?: shapes=(?P<shapes>\S+))?(?: bytes=(?P<bytes>\S*))?"
)
_MOST_STEPS = 1 << 40
_TEXT: Path = ("text",)
_REWARD: Path = ("next", "reward")


class _Reader(WholeReader):
    def __init__(self, path: FilePath) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=1 << 20)  # noqa: SIM115 - it stays open
        try:
            self._starts, self._sizes, lengths = _find_lines(self._file)
            super().__init__(self._first_schema(), lengths)
        except BaseException:
            self._file.close()
            raise

    def whole(self, episode: int) -> Steps:
        """Read an episode."""
        line = self._line(episode)
        try:
            return Steps(line["length"], dict(_columns(line)))
        except Exception as error:
            raise self._damaged(episode, error) from error

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        line = self._line(i)
        tools = {"tools": line["tools"]} if "tools" in line else {}
        return {**line.get("metadata", {}), **tools}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, i: int) -> dict[str, Any]:
        """Read and parse a line."""
        try:
            text = os.pread(self._file.fileno(), int(self._sizes[i]), int(self._starts[i]))
            line = from_json_text(text)
            if not _is_episode(line):
                raise ValueError("it has no 'length', 'steps' and 'dtypes'")
        except ValueError as error:
            raise self._damaged(i, error) from error
        return dict(line)

    def _damaged(self, i: int, error: Exception) -> DatasetError:
        return DatasetError(
            f"{self.path}: the line of episode {i}, at byte {self._starts[i]}, is damaged: {error}"
        )

    def _first_schema(self) -> EpisodeSchema:
        """Return the schema of the first episode that can be read."""
        for i in range(len(self._starts)):
            with contextlib.suppress(DatasetError, ValueError, TypeError):
                fields = {
                    path: _parse_dtype(note)[0] for path, note in _leaves(self._line(i)["dtypes"])
                }
                return EpisodeSchema(fields)
        if not len(self._starts):
            return EpisodeSchema({})
        error = DatasetError(f"{self.path}: no line of it is an episode of torchrl_mt.")
        with contextlib.suppress(ValueError):
            first = json.loads(
                os.pread(self._file.fileno(), int(self._sizes[0]), int(self._starts[0]))
            )
            if isinstance(first, dict) and "messages" in first:
                error = DatasetError(
                    f"{self.path} has conversations without episodes' steps: read it with "
                    f"torchrl_mt.datasets.ConversationDataset(path, tokenizer)."
                )
        raise error


class _Writer(FormatWriter):
    share_next = False

    def __init__(self, path: FilePath, mode: Mode) -> None:
        super().__init__(path, mode)
        adds = mode != "overwrite" and path.is_file()
        self._new = None if adds else unfinished_path(path)
        """What becomes ``path``: with the first episode, or at the end of an overwrite."""
        self._written = False
        if mode == "overwrite" and _detect(path):
            _Reader(path).close()  # Lines of others are not replaced.
        if adds:
            _mend_end(path)
            reader = _Reader(path)
            self.schema = reader.schema if len(reader.lengths) else None
            reader.close()

    def write(
        self,
        schema: EpisodeSchema,
        length: int,
        own_next: int,
        columns: Mapping[Path, StoredRows],
        metadata: str,
    ) -> None:
        """Append a line."""
        line = line_of(_describe(schema, length, columns, metadata))
        append_lines(self._new or self.path, [line])
        self._written = True
        if self._new is not None and self.mode != "overwrite":
            self._publish(self._new)

    def close(self) -> None:
        """Put what was written in the place of what was there."""
        if self._new is not None and self._written:
            self._publish(self._new)
        self.abort()

    def abort(self) -> None:
        """Delete what was written and is not part of the data set."""
        if self._new is not None:
            self._new.unlink(missing_ok=True)

    def _publish(self, new: FilePath) -> None:
        replace(new, self.path)
        self._new = None


def _find_lines(file: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the lines of the episodes start, their bytes, and the steps of the episodes."""
    starts, sizes, lengths = array("q"), array("q"), array("q")
    at = 0
    for line in file:
        match = _LENGTH.match(line)
        # A killed writer may have left part of the last line.
        if line.endswith(b"\n") or _parsed(line) is not None:
            if match is not None:
                length = _length({"length": int(match[1])})
            elif line.isspace():
                length = -1
            else:
                length = _length(_parsed(line))
            if length >= 0:
                starts.append(at)
                sizes.append(len(line))
                lengths.append(length)
        at += len(line)
    return np.array(starts), np.array(sizes), np.array(lengths, dtype=np.int64)


def _parsed(line: bytes) -> Any:
    """Parse a line; None if it is damaged."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _length(line: Any) -> int:
    """Return the steps of an episode; 0 for a line that is none, so that it has no clips."""
    length = line.get("length") if isinstance(line, dict) else None
    return length if isinstance(length, int) and 0 < length < _MOST_STEPS else 0


def _is_episode(line: Any) -> bool:
    return (
        isinstance(line, dict)
        and isinstance(line.get("length"), int)
        and isinstance(line.get("steps"), dict)
        and isinstance(line.get("dtypes"), dict)
        and isinstance(line.get("metadata", {}), dict)
    )


def _mend_end(path: FilePath) -> None:
    """End the last line: a whole one gets its line end, what a killed writer left of one is removed."""
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start, tail = end, b""
        while start and b"\n" not in tail:
            size = min(start, 1 << 20)
            start -= size
            file.seek(start)
            tail = file.read(size) + tail
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if _parsed(last) is None:
            file.truncate(end - len(last))
        else:
            file.seek(end)
            file.write(b"\n")


# ---- an episode as JSON data ------------------------------------------------------------------------


def _describe(
    schema: EpisodeSchema, length: int, columns: Mapping[Path, StoredRows], metadata: str
) -> dict[str, Any]:
    """Return the line of an episode."""
    line: dict[str, Any] = {"length": length}
    texts = columns.get(_TEXT)
    turns = [json.loads(text) for text in texts.texts] if isinstance(texts, TextRows) else None
    if turns is not None:
        spoken = all(map(_is_messages, turns))
        line["messages"] = [message for turn in turns for message in turn] if spoken else []
        line["messages_per_turn"] = list(map(len, turns)) if spoken else []
        if spoken:
            columns = {path: rows for path, rows in columns.items() if path != _TEXT}
    plain = json.loads(metadata)
    if isinstance(plain.get("tools"), list) and "__type__" not in plain:
        line["tools"] = plain.pop("tools")
    line |= _reward(schema.fields.get(_REWARD), columns.get(_REWARD))
    line |= {"metadata": plain, "steps": {}, "dtypes": {}}
    for path, field in schema.fields.items():
        values, note = _plain(field, columns[path]) if path in columns else (None, "object")
        _put(line["dtypes"], path, note)
        if path in columns:
            _put(line["steps"], path, values)
    return line


def _columns(line: Mapping[str, Any]) -> Iterator[tuple[Path, Column]]:
    """Iterate over the entries of an episode; undoes :func:`_describe`."""
    steps = dict(_leaves(line["steps"]))
    counts = line.get("messages_per_turn", [])
    for path, note in _leaves(line["dtypes"]):
        if path == _TEXT and counts:
            messages = iter(line["messages"])
            turns = [list(islice(messages, count)) for count in counts]
            if [*map(len, turns), len(list(messages))] != [*counts, 0] or len(counts) != line[
                "length"
            ]:
                raise ValueError("'messages_per_turn' does not count its messages.")
            yield path, Objects(turns)
        elif path not in steps:
            raise ValueError(f"{name_of(path)} is in 'dtypes' and not in 'steps'.")
        else:
            yield path, _column(steps[path], note, line["length"])


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


def _detect(path: FilePath) -> bool:
    try:
        with open(path, "rb") as file:
            return _LENGTH.match(file.read(1000)) is not None or path.suffix == ".jsonl"
    except OSError:
        return False


FORMAT = Format("jsonl", _Reader, _Writer, _detect)
