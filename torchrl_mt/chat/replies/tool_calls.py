"""Tool calls in the form of chat templates, from JSON, Python's notation or plain text."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from transformers.utils import get_json_schema

from torchrl_mt.chat.replies.reply import MalformedError

__all__ = [
    "CONSTANTS",
    "Calls",
    "ToolTypes",
    "as_calls",
    "decode_json",
    "make_call",
    "python_calls",
    "tool_schemas",
]

Calls: TypeAlias = list[dict[str, Any]]

CONSTANTS = {"True": True, "False": False, "None": None}
"""Python's names of constants, which some templates write instead of JSON's."""


def make_call(name: Any, arguments: Any, id: Any = None) -> dict[str, Any]:
    """Make a tool call; arguments are a mapping, its JSON text, or ``None`` for none.

    Raises:
        MalformedError: if the name is not text, or the arguments are not a mapping.
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


def as_calls(value: Any) -> Calls:
    """Make tool calls from decoded JSON: an object or a list of objects.

    Raises:
        MalformedError: if one of them is not a call.
    """
    calls = []
    for entry in value if isinstance(value, list) else [value]:
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
    """Decode JSON.

    Raises:
        MalformedError: if the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"no JSON: {text[:80]!r}") from error


def tool_schemas(tools: Iterable[Any] | None) -> list[Any] | None:
    """Convert tools to JSON schemas; functions by their signatures and docstrings."""
    if tools is None:
        return None
    return [get_json_schema(tool) if callable(tool) else tool for tool in tools]


class ToolTypes:
    """Decodes arguments that a notation writes without quotes, by the types that tools declare.

    Args:
        tools: functions or JSON schemas.

    Examples:
        >>> types = ToolTypes([{"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}])
        >>> types.value("f", "s", "7"), types.value("f", "n", "7"), types.value("f", "n", "seven")
        ('7', 7, 'seven')
    """

    def __init__(self, tools: Iterable[Any] | None = None) -> None:
        self._properties: dict[str, Mapping[str, Any]] = {}
        for schema in tool_schemas(tools) or ():
            function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
            parameters = function.get("parameters")
            if isinstance(parameters, Mapping):
                self._properties[str(function.get("name"))] = parameters.get("properties") or {}

    def value(self, tool: str, key: str, text: str) -> Any:
        """Decode an argument: text if the schema says so, else JSON if it is valid, else text."""
        schema = self._properties.get(tool, {}).get(key)
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return CONSTANTS.get(text, text)


def python_calls(text: str) -> Calls:
    """Parse calls in Python's notation, ``[f(a=1), g()]`` or one per line, without running them.

    Raises:
        MalformedError: if the text is anything else.
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
        value = _JSONConstants().visit(keyword.value)
        try:
            arguments[keyword.arg] = json.loads(json.dumps(ast.literal_eval(value)))
        except (ValueError, TypeError) as error:
            raise MalformedError("no literal") from error
    return make_call(name, arguments)


class _JSONConstants(ast.NodeTransformer):
    """Replaces JSON's names of constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node
