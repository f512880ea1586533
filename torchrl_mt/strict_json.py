"""JSON from models and strangers, read so that whatever is read can be written again and walked.

Numbers that are not finite, half a surrogate pair and deep nesting are refused: other programs cannot
read them, and recursive code cannot follow them.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MAX_DEPTH", "check_json", "read_json"]

MAX_DEPTH = 64
"""Most containers within each other."""
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def read_json(text: str | bytes) -> Any:
    r"""Read strict JSON, in time linear in the text.

    Raises:
        ValueError: if it is no JSON, or JSON that :func:`check_json` refuses.

    Examples:
        >>> read_json('{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
        >>> for text in ("[NaN]", "1e999", r'"\ud83d"', "[" * 99 + "]" * 99):
        ...     try:
        ...         read_json(text)
        ...     except ValueError as error:
        ...         print(str(error)[:43])
        Out of range float values are not JSON comp
        Out of range float values are not JSON comp
        'utf-8' codec can't encode character '\ud83
        it is nested too deeply
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_json(value)
    return value


def check_json(value: Any) -> None:
    """Check that a value can be written as JSON in UTF-8.

    Raises:
        ValueError: if it has a number that is not finite, half a surrogate pair, a value that JSON
            lacks, or containers more than :data:`MAX_DEPTH` deep.
    """
    try:
        text = _encode(value)
        text.encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for each in level for inner in _inside(each)]
    if level:
        raise ValueError("it is nested too deeply")


def _inside(value: Any) -> Any:
    """What is directly in a container."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()
