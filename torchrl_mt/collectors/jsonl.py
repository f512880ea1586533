"""Lines of JSON that are written whole or not at all, by any number of threads and processes.

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
except ImportError:  # not POSIX: there, one process writes
    fcntl = None  # type: ignore[assignment]

__all__ = ["append_lines", "to_json", "to_line"]

_LONGEST_REPR = 1000
_DEEPEST = 100
"""Containers inside of containers; beyond, a value is taken for endless."""
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""What some readers take for the end of a line, and JSON leaves as it is."""


def to_line(value: Any) -> bytes:
    r"""One line of valid JSON in UTF-8, its end included.

    Args:
        value: anything; see :func:`to_json`.

    Returns:
        The line; characters beyond ASCII are kept as they are.

    Examples:
        >>> to_line({"reward": float("nan"), "text": "one\ntwo"})
        b'{"reward": "NaN", "text": "one\\ntwo"}\n'
    """
    plain = to_json(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(plain, allow_nan=False).encode() + b"\n"


def to_json(value: Any) -> Any:
    """What JSON can hold of a value.

    Args:
        value: numbers that JSON lacks become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which
            ``float`` reads; tensors and arrays of one number become the number; keys become strings;
            whatever else JSON lacks becomes ``{"__repr__": ...}``.

    Returns:
        Dicts, lists, strings, numbers, booleans and ``None``.

    Examples:
        >>> to_json({1: (2, torch.tensor(3)), "at": 1j})
        {'1': [2, 3], 'at': {'__repr__': '1j'}}
    """
    return _plain(value, ())


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines to a file, all or none, with no other writer's line between them.

    What a killed writer left of a line is cut off first. Where the file system knows no locks, lines
    are still appended by a single call each, but are not safe from a disk that fills up or a kill.

    Args:
        path: the file; it and its folder are made if need be.
        lines: each with its end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    file = os.open(path, flags, 0o666)
    # A descriptor of its own for every call: locks then exclude threads as well as processes.
    locked = _lock(file)
    try:
        end = _cut_torn_line(file) if locked else 0
        try:
            for line in lines:
                left = memoryview(line)
                while left:  # The system may take less than all of it.
                    left = left[os.write(file, left) :]
        except BaseException:
            if locked:
                os.ftruncate(file, end)
            raise
    finally:
        if locked:
            # A process forked meanwhile has the file open too: closing it would not unlock it.
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _lock(file: int) -> bool:
    """Wait until no one else writes to the file; false where there are no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _cut_torn_line(file: int) -> int:
    """Cut off what follows the last end of a line; where that is."""
    size = os.fstat(file).st_size
    if not size or os.pread(file, 1, size - 1) == b"\n":
        return size
    with open(file, "rb", closefd=False) as lines:
        end = lines.read().rfind(b"\n") + 1
    os.ftruncate(file, end)
    return end


def _plain(value: Any, around: tuple[int, ...]) -> Any:
    """``to_json``, inside of the containers with these ids."""
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
    """Whether a tensor or an array is one number that Python has."""
    size = value.numel() if isinstance(value, torch.Tensor) else value.size
    try:
        return size == 1 and type(value.item()) in (bool, int, float)
    except (RuntimeError, NotImplementedError):  # such as of a tensor without values
        return False


def _number(value: float) -> float | str:
    """A float, or the name of one that JSON lacks."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _key(key: Any) -> str:
    """A key as a string."""
    return str.__str__(key) if isinstance(key, str) else _repr(key)


def _repr(value: Any) -> str:
    """The beginning of a value's ``repr``, which may itself fail."""
    try:
        return repr(value)[:_LONGEST_REPR]
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
