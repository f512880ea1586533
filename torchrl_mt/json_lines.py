"""JSON lines that several threads and processes append to one file, each line whole or not at all.

Every line of a file is valid JSON at any moment, even after a writer was killed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    import fcntl
except ImportError:  # Not POSIX: only one process may write.
    fcntl = None  # type: ignore[assignment]

__all__ = ["append_lines", "line_of", "to_json", "to_line"]

_LONGEST_REPR = 1000
_DEEPEST = 100
"""Maximum depth of nested containers."""
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters that JSON does not escape and some readers take for the end of a line."""


def to_line(value: Any) -> bytes:
    r"""Encode a value as one line of JSON in UTF-8, with its line end. Non-ASCII characters are kept.

    Args:
        value: anything; see :func:`to_json`.

    Examples:
        >>> to_line({"reward": float("nan"), "text": "one\ntwo"})
        b'{"reward": "NaN", "text": "one\\ntwo"}\n'
    """
    return line_of(to_json(value))


def line_of(plain: Any) -> bytes:
    """Encode JSON data as one line.

    Raises:
        ValueError: if it has a number that JSON lacks.
    """
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # Half of a surrogate pair.
        return json.dumps(plain, allow_nan=False).encode() + b"\n"


def to_json(value: Any) -> Any:
    """Convert a value to dicts, lists, strings, numbers, booleans and ``None``.

    Numbers that JSON lacks become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float`` reads.
    Tensors and arrays of one number become the number, keys become strings, and anything else becomes
    ``{"__repr__": ...}``.

    Examples:
        >>> to_json({1: (2, torch.tensor(3)), "at": 1j})
        {'1': [2, 3], 'at': {'__repr__': '1j'}}
    """
    return _plain(value, ())


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines to a file, all or none and without other writers' lines between them.

    An incomplete line of a killed writer is removed first. On a file system without locks, a full disk
    or a kill may leave incomplete lines.

    Args:
        path: the file; made with its folder if missing.
        lines: lines with their ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    file = os.open(path, flags, 0o666)
    # With a descriptor per call, locks exclude threads as well as processes.
    locked = _lock(file)
    try:
        end = _cut_torn_line(file) if locked else 0
        try:
            for line in lines:
                left = memoryview(line)
                while left:  # A write may be partial.
                    left = left[os.write(file, left) :]
        except BaseException:
            if locked:
                os.ftruncate(file, end)
            raise
    finally:
        if locked:
            # If a forked process has the file open too, closing it here does not unlock it.
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _lock(file: int) -> bool:
    """Lock the file for writing; false if there are no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _cut_torn_line(file: int) -> int:
    """Remove an incomplete last line; return the size of the file."""
    size = os.fstat(file).st_size
    if not size or os.pread(file, 1, size - 1) == b"\n":
        return size
    with open(file, "rb", closefd=False) as lines:
        end = lines.read().rfind(b"\n") + 1
    os.ftruncate(file, end)
    return end


def _plain(value: Any, around: tuple[int, ...]) -> Any:
    """:func:`to_json` within the containers with these ids."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(float(value))
    if id(value) not in around and len(around) < _DEEPEST:
        inside = (*around, id(value))
        if isinstance(value, Mapping):
            return {_key(key): _plain(each, inside) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(each, inside) for each in value]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and _is_number(value):
        return _plain(value.item(), around)
    return {"__repr__": _repr(value)}


def _is_number(value: Any) -> bool:
    """Whether a tensor or an array is one bool, int or float."""
    size = value.numel() if isinstance(value, torch.Tensor) else value.size
    try:
        return size == 1 and type(value.item()) in (bool, int, float)
    except (RuntimeError, NotImplementedError):  # Such as a meta tensor.
        return False


def _number(value: float) -> float | str:
    """A float; as text if it is not finite."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _key(key: Any) -> str:
    return str.__str__(key) if isinstance(key, str) else _repr(key)


def _repr(value: Any) -> str:
    """The beginning of a value's ``repr``, also if that raises."""
    try:
        return repr(value)[:_LONGEST_REPR]
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
