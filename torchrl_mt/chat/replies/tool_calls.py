"""Tool calls in the form of chat templates, from JSON, Python's notation or plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from transformers.utils import get_json_schema

from torchrl_mt.chat.replies.reply import MalformedError
from torchrl_mt.strict_json import read_json

__all__ = [
    "CONSTANTS",
    "Calls",
    "ToolTypes",
    "as_calls",
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
        arguments = read_json(arguments)
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
            return read_json(text)
        except ValueError:
            return CONSTANTS.get(text, text)


_PYTHON = re.compile(
    r"""(?<![\w.])(?P<name>[^\W\d][\w.]*)\s*(?P<after>[(=]?)|(?P<closed>\))|,\s*(?=[)\]}])
    |(?P<quote>"{3}|'{3}|"|')(?P<text>(?:[^\\"']+|\\(?:.|\Z)|(?!(?P=quote))["'])*)(?P<ended>(?P=quote))?""",
    re.DOTALL | re.VERBOSE,
)
"""What JSON lacks of Python's notation. Where a text begins it always matches, so none is read twice."""
_ESCAPE = re.compile(r"\\(?:(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = dict(zip("abfnrtv0\\'\"\n", [*"\a\b\f\n\r\t\v\0\\'\"", ""], strict=True))


def python_calls(text: str) -> Calls:
    """Parse calls in Python's notation, ``[f(a=1), g()]`` or one per line, without running them.

    They become JSON, ``[{"f": ["a", 1]}, {"g": []}]``, which is read.

    Raises:
        ValueError: if the text is anything else.
    """
    called: list[tuple[str, list[str]]] = []
    is_open, is_list = False, text.lstrip().startswith("[")

    def to_json(token: re.Match[str]) -> str:
        nonlocal is_open
        name, after, written = token["name"], token["after"], token["text"]
        if written is not None:
            is_line = len(token["quote"]) == 1
            if not token["ended"] or (is_line and "\n" in written.replace("\\\n", "")):
                raise MalformedError("a text without its end")
            return json.dumps(_ESCAPE.sub(_unescaped, written))
        if name is None:
            is_open = is_open and not token["closed"]
            return "]}" if token["closed"] else ""
        if after == "(" and not is_open and all(map(str.isidentifier, name.split("."))):
            is_open = True
            called.append((name, []))
            return f"{'' if is_list or len(called) == 1 else ','}{{{json.dumps(name)}:["
        if after == "=" and is_open and name.isidentifier():
            called[-1][1].append(name)
            return json.dumps(name) + ","
        if after or name not in (*CONSTANTS, "true", "false", "null"):
            raise MalformedError(f"no value: {name[:80]!r}")
        return json.dumps(CONSTANTS[name]) if name in CONSTANTS else name

    found = _PYTHON.sub(to_json, text)
    calls = []
    elements = read_json(found if is_list else f"[{found}]")
    for (name, keys), element in zip(called, elements, strict=True):
        given: Any = element.get(name) if isinstance(element, dict) else None
        is_call = isinstance(given, list) and len(element) == 1 and given[::2] == keys
        if not is_call or len(given) != 2 * len(set(keys)):
            raise MalformedError("no call with named arguments")
        calls.append(make_call(name, dict(zip(keys, given[1::2], strict=True))))
    return calls


def _unescaped(escape: re.Match[str]) -> str:
    """The character of an escape; the escape as it is if it is none."""
    code, letter = escape.groups()
    return chr(int(code[1:], 16)) if code else _ESCAPED.get(letter, escape.group())
