"""What a model said, taken apart: content, reasoning and tool calls.

Nothing of a reply is lost: one of which a part cannot be read is plain content, from its first
character to its last.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from transformers.utils import get_json_schema

__all__ = [
    "MalformedError",
    "ParsedReply",
    "ToolTypes",
    "as_calls",
    "decode_json",
    "make_call",
    "python_calls",
]

Properties: TypeAlias = Mapping[str, Any]
"""JSON schemas of a tool's parameters, by name."""


class MalformedError(ValueError):
    """A part of a reply cannot be read."""


@dataclass(frozen=True)
class ParsedReply:
    """A reply of the model, as a chat message has it.

    Examples:
        >>> ParsedReply("4", reasoning="2 + 2").message()
        {'role': 'assistant', 'content': '4', 'reasoning_content': '2 + 2'}
    """

    content: str
    """What it says; the whole text where the reply has no other parts."""
    reasoning: str | None = None
    """What it thought before; ``None`` if there are no thoughts, ``""`` if they are empty."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls as chat templates take them: ``{"type": "function", "id": ..., "function": {"name": ...,
    "arguments": {...}}}``; ``"id"`` only where the model wrote one."""

    def message(self) -> dict[str, Any]:
        """The chat message, with ``reasoning_content`` and ``tool_calls`` only where there are such."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def is_kept_by(self, written: ParsedReply, *, reasoning: bool = True) -> bool:
        """Whether another reply has all parts of this one and no others.

        Outer white space and the ids of calls do not count, nor that it marks that there were no
        thoughts.

        Args:
            written: the reply to compare with.
            reasoning: whether the thoughts must agree too.
        """
        thoughts = _stripped(self.reasoning), _stripped(written.reasoning)
        if reasoning and thoughts[0] != thoughts[1] and thoughts != (None, ""):
            return False
        calls, others = ([c["function"] for c in r.tool_calls] for r in (self, written))
        return self.content.strip() == written.content.strip() and calls == others


def _stripped(text: str | None) -> str | None:
    return None if text is None else text.strip()


def make_call(name: Any, arguments: Any, id: Any = None) -> dict[str, Any]:
    """A tool call.

    Args:
        name: the tool's name.
        arguments: a mapping, its JSON text, or ``None`` for none.
        id: the call's id, if it has one.

    Raises:
        MalformedError: if the name is no text, or the arguments no mapping.
    """
    if isinstance(arguments, str):
        arguments = decode_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, Mapping):
        raise MalformedError(f"no tool call: name {name!r}, arguments {arguments!r}")
    identity = {} if id is None else {"id": str(id)}
    function = {"name": name.strip(), "arguments": dict(arguments)}
    return {"type": "function", **identity, "function": function}


def as_calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls from decoded JSON: one object, or a list of them.

    Raises:
        MalformedError: if one of them is no call.
    """
    entries = value if isinstance(value, list) else [value]
    calls = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise MalformedError(f"no tool call: {entry!r}")
        inner = entry.get("function")
        call = inner if isinstance(inner, Mapping) else entry
        names = [key for key in ("name", "tool_name") if key in call]
        arguments = [call[key] for key in ("arguments", "parameters") if key in call]
        if not names or len(arguments) > 1:
            raise MalformedError(f"no tool call: {entry!r}")
        identity = next((entry[key] for key in ("id", "tool_call_id") if key in entry), None)
        calls.append(make_call(call[names[0]], arguments[0] if arguments else None, identity))
    return calls


def decode_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        MalformedError: if it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"no JSON: {text[:80]!r}") from error


class ToolTypes:
    """Types of arguments that a notation writes without quotes.

    Args:
        tools: functions or JSON schemas, as chat templates take them.

    Examples:
        >>> types = ToolTypes([{"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}])
        >>> types.value("f", "s", "7"), types.value("f", "n", "7"), types.value("f", "n", "seven")
        ('7', 7, 'seven')
    """

    def __init__(self, tools: Iterable[Any] | None = None) -> None:
        self._properties: dict[str, Properties] = {}
        for tool in tools or ():
            schema = get_json_schema(tool) if callable(tool) else tool
            function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
            parameters = function.get("parameters")
            if isinstance(parameters, Mapping):
                self._properties[str(function.get("name"))] = parameters.get("properties") or {}

    def value(self, tool: str, key: str, text: str) -> Any:
        """An argument's value: text if the tool's schema says so, else JSON if it is such."""
        schema = self._properties.get(tool, {}).get(key)
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return _LITERALS.get(text, text)


_LITERALS = {"True": True, "False": False, "None": None}
"""As templates write them that do not convert to JSON."""


def python_calls(text: str) -> list[dict[str, Any]]:
    """Calls in Python's notation: ``[f(a=1), g()]``, or one in a line.

    Raises:
        MalformedError: if it is anything else; nothing is run.
    """
    try:
        body = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError(f"no calls: {text[:80]!r}") from error
    nodes: list[ast.expr] = []
    for line in body:
        if not isinstance(line, ast.Expr):
            raise MalformedError(f"no call: {text[:80]!r}")
        nodes += line.value.elts if isinstance(line.value, ast.List) else [line.value]
    return [_python_call(node) for node in nodes]


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise MalformedError("no call with named arguments")
    name = ast.unparse(node.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise MalformedError(f"no name of a tool: {name!r}")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise MalformedError("no call with named arguments")
        arguments[keyword.arg] = _python_value(keyword.value)
    return make_call(name, arguments)


def _python_value(node: ast.expr) -> Any:
    """A literal, with JSON's names for constants too."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_python_value(key) for key in node.keys if key is not None]
        if not all(isinstance(key, str) for key in keys):
            raise MalformedError("keys must be text")
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError) as error:
        raise MalformedError("no literal") from error


_CONSTANTS = {"true": True, "false": False, "null": None}
