"""Rows of conversation data sets as messages: the forms that the field uses.

A row has ``messages`` (OpenAI, TRL), ``conversations`` (ShareGPT), or ``prompt`` and ``completion``
(TRL).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from torchrl_mt.chat.replies.reply import THOUGHT_FIELDS
from torchrl_mt.datasets._encoding.values import from_json_text

__all__ = ["Completion", "Conversation", "read_conversation"]

_AUTHORS = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai"), "assistant"),
}
"""Names of the usual roles, in any case."""
_CALLS = ("function_call", "tool_call")
_RESULTS = ("observation", "function_response", "tool_response", "ipython")
_SHARE_GPT = {**_AUTHORS, **dict.fromkeys(_CALLS, "assistant"), **dict.fromkeys(_RESULTS, "tool")}
"""In ShareGPT's form also these. Elsewhere templates may have roles of these names."""
_WEIGHTS = ("weight", "train")
_MOST = torch.finfo(torch.float32).max
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
    weight: float = 1.0
    """Of the completion."""


def read_conversation(
    row: Any, *, filled: Mapping[str, bool] | None = None
) -> Conversation | Completion:
    """Read a row of a data set.

    Structs of an Arrow table have the same keys in all rows, so it fills in ``None``: such entries of
    tools and tool calls are left out.

    Args:
        row: a mapping in one of the forms.
        filled: whether Arrow filled in a column, by its name. Of other columns, the row tells it: all
            its messages have tool calls or ``None``, or a tool has a parameter ``None``.

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
    episode = _episode(row)
    if episode is not None:
        row, filled = episode, {"messages": False, "tools": False}
    filled = filled or {}
    of_row = _weight(row, "a row")
    prompt, completion = row.get("prompt"), row.get("completion")
    prompted = 0
    if row.get("messages") is not None:
        name, given = "messages", _listed(row["messages"], "'messages'")
    elif row.get("conversations") is not None:
        name, given = "conversations", _listed(row["conversations"], "'conversations'")
    elif isinstance(prompt, str) and isinstance(completion, str):
        _check_text([prompt, completion], "'prompt' and 'completion'")
        return Completion(prompt, completion, of_row)
    elif prompt is not None and completion is not None:
        if isinstance(prompt, str) or isinstance(completion, str):
            text, other = ("prompt", "completion")[:: 1 if isinstance(prompt, str) else -1]
            raise TypeError(
                f"{text!r} must be a list of messages as {other!r} is, got text: give both as messages "
                "or both as text."
            )
        name, given = "completion", _listed(prompt, "'prompt'")
        prompted = len(given)
        given = [*given, *_listed(completion, "'completion'")]
    else:
        raise ValueError(f"a row must have {_FORMS}, got the keys {sorted(map(str, row))}.")
    if not given:
        raise ValueError("a conversation must have at least one message, got none: drop the row.")
    looks_filled = all(isinstance(each, Mapping) and "tool_calls" in each for each in given)
    looks_filled = looks_filled and any(each["tool_calls"] is None for each in given)
    drop_none = filled.get(name, looks_filled)
    messages = [_message(message, i, drop_none) for i, message in enumerate(given)]
    weights = [
        0.0 if i < prompted else of_row * _weight(message, f"message {i}")
        for i, message in enumerate(messages)
    ]
    messages = [
        {name: value for name, value in message.items() if name not in _WEIGHTS}
        for message in messages
    ]
    for i, message in enumerate(messages):
        _check_text(message, f"message {i} ({message['role']})")
    rules = row.get("system")
    if isinstance(rules, str) and rules and messages[0]["role"] != "system":
        _check_text(rules, "'system'")
        messages.insert(0, {"role": "system", "content": rules})
        weights.insert(0, 0.0)
    tools = _tools(row.get("tools"))
    if filled.get("tools", looks_filled or _has_empty_parameter(tools)):
        tools = _without_none(tools)
    return Conversation(messages, weights, tools)


def _episode(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The exact messages and the tools of an episode that the format ``arrow`` wrote."""
    turns, metadata = row.get("text"), row.get("metadata")
    if not (row.get("messages") and isinstance(turns, Sequence) and isinstance(metadata, str)):
        return None
    if isinstance(turns, str) or not all(isinstance(turn, str) for turn in turns):
        return None
    try:
        messages = [message for turn in turns for message in from_json_text(turn)]
        tools = from_json_text(metadata).get("tools")
    except (ValueError, TypeError, AttributeError):  # Columns of someone else.
        return None
    return {"messages": messages, "tools": tools if isinstance(tools, list) else None}


def _listed(value: Any, name: str, what: str = "messages") -> list[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        hint = ": put it into a list" if isinstance(value, Mapping) else ""
        raise TypeError(f"{name} must be a list of {what}, got {type(value).__name__}{hint}.")
    return list(value)


def _check_text(value: Any, place: str) -> None:
    """Refuse lone surrogates, which tokenizers cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} must be text that UTF-8 can encode, got the lone surrogate "
            f"{error.object[error.start]!r}: replace it, such as with "
            "text.encode('utf-8', 'replace').decode()."
        ) from error


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
    message["role"] = (_SHARE_GPT if is_share_gpt else _AUTHORS).get(named.lower(), named)
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    content = message.get("content")
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
    if is_share_gpt and named.lower() in _CALLS and isinstance(content, str):
        called = _calls_in(content)
        if called:
            message |= {"content": "", "tool_calls": called}
    calls = message.get("tool_calls")
    said = any(message.get(name) is not None for name in ("content", *THOUGHT_FIELDS))
    if message["role"] == "assistant" and not calls and not said:
        raise ValueError(
            f"message {i} (assistant) must have a 'content' or 'tool_calls', got none."
        )
    if calls is not None:
        place = f"'tool_calls' of message {i}"
        calls = _listed(_from_json(calls, place) or [], place, "calls")
        message["tool_calls"] = [_called(call, i, drop_none) for call in calls]
    return {"role": message.pop("role"), **message}


def _called(given: Any, i: int, drop_none: bool) -> dict[str, Any]:
    """A call without empty entries of its own; those of its arguments may mean something."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(
            f"message {i} must have mappings with a 'function' that has a 'name' as its 'tool_calls', "
            f"got {given!r}."
        )
    function = dict(function)
    if function.get("arguments") is None and "parameters" in function:
        function["arguments"] = function.pop("parameters")
    if "arguments" not in function:
        raise TypeError(
            f"the call of {function['name']!r} in message {i} must have 'arguments', a mapping or JSON "
            f"text, got the keys {sorted(map(str, function))}: give {{}} if it has none."
        )
    arguments = {} if function["arguments"] is None else function["arguments"]
    if not isinstance(arguments, (str, Mapping)):
        raise TypeError(
            f"the call of {function['name']!r} in message {i} must have a mapping or JSON text as "
            f"'arguments', got {type(arguments).__name__}."
        )
    function["arguments"] = _without_none(arguments) if drop_none else arguments
    function = {name: value for name, value in function.items() if value is not None}
    if "function" not in given:
        return function
    call = {name: value for name, value in given.items() if value is not None}
    return {**call, "function": function}


def _calls_in(text: str) -> list[dict[str, Any]]:
    """The calls that ShareGPT's form has as JSON; none if the text is something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and "name" in call for call in found):
        return []
    known = ("name", "arguments", "parameters")
    return [
        {"type": "function", "function": {name: call[name] for name in known if name in call}}
        for call in found
    ]


def _weight(given: Mapping[str, Any], place: str) -> float:
    """The factor of a message's or a row's loss; 0 if it is not trained."""
    weight, train = given.get("weight"), given.get("train")
    weight, train = 1 if weight is None else weight, True if train is None else train
    if not (isinstance(weight, Real) and 0 <= float(weight) <= _MOST):
        raise ValueError(
            f"{place} must have a finite 'weight' of at least 0, got {weight!r}: 0 leaves it out."
        )
    if not isinstance(train, Real):
        raise TypeError(f"{place} must have true or false as 'train', got {train!r}.")
    return float(weight) * bool(train)


def _from_json(given: Any, name: str) -> Any:
    """What a JSON text stands for; ``None`` if it is empty, and what is no text as it is."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given) if given.strip() else None
    except ValueError as error:
        raise ValueError(f"{name} must be JSON if it is text, but {error}.") from error


def _tools(given: Any) -> list[Any] | None:
    """The row's tools as a list of JSON schemas; ``None`` if there are none."""
    given = _from_json(given, "'tools'")
    if not given:
        return None
    tools = _listed(given, "'tools'", "JSON schemas, one per tool")
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise TypeError(f"'tools' must be a list of mappings, got {type(tool).__name__}.")
    _check_text(tools, "'tools'")
    return tools


def _has_empty_parameter(value: Any) -> bool:
    """Whether a parameter of tools has no schema: only Arrow writes such."""
    if isinstance(value, Mapping):
        parameters = value.get("properties")
        found = isinstance(parameters, Mapping) and None in parameters.values()
        return found or any(map(_has_empty_parameter, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_empty_parameter, value))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(entry) for entry in value]
    return value
