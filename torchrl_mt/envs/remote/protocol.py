"""Messages of OpenEnv's protocol. Both ends read and write them here.

A message is a JSON object of limited size. A WebSocket is a session with an environment of its own. The
client sends ``{"type": "reset", "data": {...}}`` and ``{"type": "step", "data": {...}}``, and the server
answers each with ``{"type": "observation", "data": {"observation", "reward", "done"}}`` or with
``{"type": "error", "data": {"message", "code"}}``.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = [
    "CAPACITY_CLOSE_CODE",
    "FORM_HEADER",
    "IDLE_CLOSE_CODE",
    "MAX_ANSWER_BYTES",
    "MAX_REQUEST_BYTES",
    "TEXT_ENV_KEY",
    "ErrorCode",
    "error_message",
    "finite_number",
    "item_of",
    "quiet_logger",
    "reset_data",
    "write",
]

MAX_REQUEST_BYTES = 16 * 2**20
"""Largest message that a server reads."""
MAX_ANSWER_BYTES = 100 * 2**20
"""Largest message that a client reads: replies may hold screenshots."""
FORM_HEADER = "X-TorchRL-MT"
"""Header of the handshake by which our server tells that steps may carry a ``step_id``. Other servers
refuse keys that they do not know."""
TEXT_ENV_KEY = "text_env"
"""Key of the first observation under which our server tells what its ``TextEnv`` differs in."""
CAPACITY_CLOSE_CODE = 1013
"""WebSocket's "try again later"."""
IDLE_CLOSE_CODE = 4408
"""Of our own (from 4000 on they are free), after HTTP's 408."""


quiet_logger = logging.getLogger("torchrl_mt.websockets")
"""What websockets logs to: whoever scans a port would fill the log with failed handshakes."""
quiet_logger.setLevel(logging.CRITICAL)


class ErrorCode(str, Enum):
    """Codes of error messages, as in OpenEnv."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


def write(message: Mapping[str, Any]) -> str:
    """A message as JSON; arrays become lists.

    Raises:
        ValueError: if the message has a number that is not finite, a circle, or too deep a nesting.
        TypeError: if it has a value that JSON cannot hold.

    Examples:
        >>> write({"type": "state"})
        '{"type":"state"}'
    """
    try:
        return json.dumps(message, allow_nan=False, separators=(",", ":"), default=_as_list)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def error_message(code: ErrorCode, message: str, **more: Any) -> dict[str, Any]:
    """An error of the server.

    Examples:
        >>> error_message(ErrorCode.UNKNOWN_TYPE, "no such type")["data"]
        {'message': 'no such type', 'code': 'UNKNOWN_TYPE'}
    """
    return {"type": "error", "data": {"message": message, "code": code.value, **more}}


def reset_data(item: Any) -> dict[str, Any]:
    """An item of a data set as the data of a reset: a mapping as it is, other values under ``"data"``.

    Raises:
        TypeError: if the item is a mapping with a key that is no string, which JSON would change.

    Examples:
        >>> reset_data({"seed": 1}), reset_data("a word"), reset_data(None)
        ({'seed': 1}, {'data': 'a word'}, {})
    """
    if item is None:
        return {}
    if not isinstance(item, Mapping) or not item or set(item) == {"data"}:
        return {"data": item}
    for key in item:
        if not isinstance(key, str):
            raise TypeError(f"the keys of an item must be strings, got {key!r}.")
    return dict(item)


def item_of(data: Mapping[str, Any]) -> Any:
    """The item of :func:`reset_data`.

    Examples:
        >>> all(item_of(reset_data(item)) == item for item in (None, {}, 3, {"a": 1}, {"data": 1}))
        True
    """
    if not data:
        return None
    return data["data"] if set(data) == {"data"} else data


def finite_number(value: Any) -> float | None:
    """A reward as a float; ``None`` for text, for what is no number and for one that is not finite.

    Examples:
        >>> [finite_number(value) for value in (2, True, "2", float("nan"), 10**400)]
        [2.0, 1.0, None, None, None]
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def _as_list(value: Any) -> Any:
    """An array, a tensor or a mapping of another class in a form that JSON holds."""
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
