"""Messages of OpenAI clients: what makes two the same, and their form for chat templates."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

__all__ = ["for_template", "identities", "text_of"]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content: a string, ``None``, or a list of text parts.

    Raises:
        ValueError: if the content is anything else.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = list(content) if isinstance(content, Sequence) else None
    if parts is None:
        raise ValueError(f"content must be text or a list of text parts, got {content!r}.")
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise ValueError(f"content must be text, got the part {part!r}.")
    return "".join(part["text"] for part in parts)


def identities(messages: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    """One hashable value per message; equal ones are the same message.

    Role, text, and the names and arguments of tool calls count; arguments are compared as JSON values.
    Reasoning does not count, since most clients leave it out, nor do the ids of calls: a tool's result
    refers to its call by the call's place in the dialogue.

    Examples:
        >>> call = {"id": "a", "function": {"name": "f", "arguments": '{"x": 1, "y": [2]}'}}
        >>> echo = {"id": "b", "function": {"name": "f", "arguments": '{"y":[2.0],"x":1}'}}
        >>> said, back = ({"role": "assistant", "tool_calls": [c]} for c in (call, echo))
        >>> identities([said]) == identities([back])
        True
    """
    places: dict[Any, tuple[int, int]] = {}
    found: list[Hashable] = []
    for k, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        called = tuple(
            (call["function"].get("name"), canonical(_arguments(call["function"])))
            for call in calls
        )
        id = message.get("tool_call_id")
        result_of = None if id is None else places.get(str(id), str(id))
        found.append((_role(message), text_of(message), called, result_of))
        for c, call in enumerate(calls):
            places[str(call.get("id"))] = (k, c)
    return found


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form that chat templates take: text as content, arguments as mappings."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = text_of(message)
    plain["role"] = _role(message)
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in message["tool_calls"]
        ]
    return plain


def canonical(value: Any) -> Hashable:
    """A JSON value as text that does not depend on the order of keys; 1 equals 1.0.

    Examples:
        >>> canonical({"a": 1, "b": [True]}) == canonical({"b": [True], "a": 1.0})
        True
        >>> canonical(1) == canonical(True)
        False
    """
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> int | float:
    """A number, whose value and not its notation counts."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _role(message: Mapping[str, Any]) -> str:
    role = message["role"]
    return "system" if role == "developer" else str(role)


def _arguments(function: Mapping[str, Any]) -> Any:
    """Arguments of a call, decoded; as they are if they are no JSON."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
