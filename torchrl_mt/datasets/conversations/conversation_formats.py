"""Rows of conversation data sets as messages: the forms that the field uses.

A row has ``messages`` (OpenAI, TRL), ``conversations`` (ShareGPT), or ``prompt`` and ``completion``
(TRL).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torchrl_mt.chat.assistant_messages import THOUGHT_FIELDS

__all__ = ["Completion", "Conversation", "read_conversation"]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
"""Names of roles in ShareGPT's form that differ from the usual ones."""
_CALLS = ("function_call", "tool_call")
_WEIGHTS = ("weight", "train")
_FORMS = (
    "'messages' (mappings with 'role' and 'content'), 'conversations' (mappings with 'from' and "
    "'value'), or 'prompt' and 'completion' (both messages or both text)"
)


@dataclass(frozen=True)
class Conversation:
    """A dialogue for a chat template."""

    messages: list[dict[str, Any]]
    weights: list[float]
    """Of each message; 0 if it is not trained. Only those of the assistant's messages count."""
    tools: list[Any] | None


@dataclass(frozen=True)
class Completion:
    """A text and how it goes on, without a chat template."""

    prompt: str
    completion: str


def read_conversation(row: Any, *, drop_none: bool = False) -> Conversation | Completion:
    """Read a row of a data set.

    Args:
        row: a mapping in one of the forms.
        drop_none: whether entries ``None`` of tools and tool calls are fill-in, as in Arrow tables,
            where all rows have the same keys.

    Raises:
        TypeError: if it is not a mapping, or has entries of a wrong type.
        ValueError: if it is in none of the forms, or has no messages.

    Examples:
        >>> row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
        >>> read_conversation(row).messages
        [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"a row must be a mapping with {_FORMS}, got {type(row).__name__}.")
    prompt, completion = row.get("prompt"), row.get("completion")
    prompted = 0
    if row.get("messages") is not None:
        given = _listed(row["messages"], "messages")
    elif row.get("conversations") is not None:
        given = _listed(row["conversations"], "conversations")
    elif isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    elif prompt is not None and completion is not None:
        given = _listed(prompt, "prompt")
        prompted = len(given)
        given = [*given, *_listed(completion, "completion")]
    else:
        raise ValueError(f"a row must have {_FORMS}, got the keys {sorted(map(str, row))}.")
    if not given:
        raise ValueError("a conversation must have at least one message, got none: drop the row.")
    messages = [_message(message, i, drop_none) for i, message in enumerate(given)]
    weights = [
        0.0 if i < prompted else _weight(message, f"message {i}")
        for i, message in enumerate(messages)
    ]
    messages = [
        {name: value for name, value in message.items() if name not in _WEIGHTS}
        for message in messages
    ]
    rules = row.get("system")
    if isinstance(rules, str) and rules and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": rules})
        weights.insert(0, 0.0)
    return Conversation(messages, weights, _tools(row.get("tools"), drop_none))


def _listed(value: Any, name: str) -> list[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise TypeError(f"{name!r} must be a list of messages, got {type(value).__name__}.")
    return list(value)


def _message(given: Any, i: int, drop_none: bool) -> dict[str, Any]:
    """A message with role and content, without empty entries."""
    if not isinstance(given, Mapping):
        raise TypeError(f"message {i} must be a mapping, got {type(given).__name__}.")
    message = {str(name): value for name, value in given.items() if value is not None}
    named = message.get("role", message.pop("from", None))
    if not isinstance(named, str):
        raise TypeError(
            f"message {i} must have its author as 'role' or 'from', which is text, got {named!r}."
        )
    is_share_gpt = "role" not in message
    message["role"] = _ROLES.get(named, named) if is_share_gpt else named
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise TypeError(
            f"message {i} ({message['role']}) must have text or a list of parts as its content, got "
            f"{type(content).__name__}."
        )
    for part in content if isinstance(content, (list, tuple)) else ():
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(
                f"message {i} ({message['role']}) must have text alone as its content, got a part of "
                f"type {kind!r}."
            )
    said = any(message.get(name) is not None for name in ("content", *THOUGHT_FIELDS))
    if message["role"] == "assistant" and not calls and not said:
        raise ValueError(
            f"message {i} (assistant) must have a 'content' or 'tool_calls', got none."
        )
    if calls is not None:
        calls = _listed(calls, f"tool_calls' of 'message {i}")
        message["tool_calls"] = [_called(call, i, drop_none) for call in calls]
    if is_share_gpt and named in _CALLS and isinstance(content, str):
        called = _call(content)
        if called:
            message |= {"content": "", "tool_calls": called}
    return {"role": message.pop("role"), **message}


def _called(given: Any, i: int, drop_none: bool) -> dict[str, Any]:
    """A call without empty entries of its own; those of its arguments may mean something."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(
            f"message {i} must have mappings with a 'function' that has a 'name' as its 'tool_calls', "
            f"got {given!r}."
        )
    call = _without_none(given) if drop_none else dict(given)
    call = {name: value for name, value in call.items() if value is not None}
    if "function" in call:
        found = call["function"].items()
        call["function"] = {name: value for name, value in found if value is not None}
    return call


def _call(text: str) -> list[dict[str, Any]]:
    """The calls that ShareGPT's form has as JSON; none if the text is something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and "name" in call for call in found):
        return []
    return [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments") or {}},
        }
        for call in found
    ]


def _weight(message: Mapping[str, Any], place: str) -> float:
    weight, train = message.get("weight", 1), message.get("train", True)
    good = isinstance(weight, Real) and 0 <= float(weight) < math.inf
    if not good:
        raise ValueError(
            f"{place} must have a finite 'weight' of at least 0, got {weight!r}: 0 leaves it out."
        )
    if not isinstance(train, (bool, int)):
        raise TypeError(f"{place} must have true or false as 'train', got {train!r}.")
    return float(weight) * bool(train)


def _tools(given: Any, drop_none: bool) -> list[Any] | None:
    """The row's tools as a list of JSON schemas; ``None`` if there are none."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except ValueError as error:
            raise ValueError(f"'tools' must be JSON if it is text, but {error}.") from error
    if not given:
        return None
    tools = _listed(given, "tools")
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise TypeError(f"'tools' must be a list of mappings, got {type(tool).__name__}.")
    return _without_none(tools) if drop_none else tools


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(entry) for entry in value]
    return value
