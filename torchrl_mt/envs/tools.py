"""Tools that a model may call: functions with a JSON schema, and calls whose errors the model can read.

A call either returns text or raises :class:`ToolError`, whatever the tool does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import NoneType
from typing import Any, Protocol

from transformers.utils import get_json_schema

from torchrl_mt.checks import check_positive_finite, shown
from torchrl_mt.strict_json import read_json
from torchrl_mt.threads import call_in_thread, call_user
from torchrl_mt.vision.images import is_image
from torchrl_mt.vision.messages import image_source, is_image_part, with_stored_images

__all__ = ["CallableTool", "Tool", "ToolError", "call_tool"]

_LONGEST_ERROR = 500
"""Characters of an error that the model is shown."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": (list, tuple),
    "object": Mapping,
    "null": NoneType,
}
"""Python's types of the types of JSON schemas."""


class ToolError(Exception):
    """A call has no result; the message is for the model."""


class CallableTool(Protocol):
    """What an environment calls: a function, or a tool of a server."""

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema in the form of chat templates: ``{"type": "function", "function": {...}}``."""
        ...

    @property
    def timeout(self) -> float | None:
        """Seconds of a call; ``None`` for the environment's."""
        ...

    async def run(self, arguments: dict[str, Any]) -> Any:
        """Call the tool with these arguments.

        Raises:
            ToolError: if the tool does not take the arguments or reports an error.
        """
        ...


class Tool:
    """A function that the model may call, with a schema or a time limit of its own.

    :class:`~torchrl_mt.envs.ToolEnv` takes plain functions, too: this class is for more.

    Args:
        function: plain or ``async``. It is called with named arguments.
        schema: JSON schema of the call, ``{"name": ..., "description": ..., "parameters": {...}}``, or
            the same as ``{"type": "function", "function": {...}}``. If ``None``, it is made from the
            function's type hints and its docstring by ``transformers.utils.get_json_schema``.
        timeout: maximum seconds of a call; ``tool_timeout`` of the environment if ``None``.

    Raises:
        TypeError: if ``function`` is not callable, or ``schema`` not a mapping with a name.
        ValueError: if no schema can be made from the function, the function does not take the arguments
            that the schema has, or ``timeout`` is not positive.

    Examples:
        >>> def power(x: float, n: int = 2) -> float:
        ...     '''Raise a number to a power.
        ...
        ...     Args:
        ...         x: the number.
        ...         n: the exponent.
        ...     '''
        ...     return x**n
        >>> tool = Tool(power, timeout=5.0)
        >>> tool.name, list(tool.schema["function"]["parameters"]["properties"])
        ('power', ['x', 'n'])
        >>> schema = {"name": "now", "description": "The time.", "parameters": {"type": "object"}}
        >>> Tool(lambda: "noon", schema).name
        'now'
    """

    def __init__(
        self,
        function: Callable[..., Any],
        schema: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(
                "tools must be functions, torchrl_mt.envs.Tool, connections to an MCP server or "
                f"torchrl_mt.envs.MCPTools, got {shown(function)}."
            )
        if timeout is not None:
            check_positive_finite("timeout", timeout)
        self.function = function
        self.schema = _schema_of(function) if schema is None else _in_chat_form(schema)
        self.timeout = timeout
        try:
            self._bind(dict.fromkeys(self._parameters.get("properties") or {}))
        except TypeError as error:
            raise ValueError(
                f"the tool {self.name!r} must be a function that takes the arguments of its schema by "
                f"name, got {_shown(self)}: {error}."
            ) from None

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return self.schema["function"]["name"]

    async def run(self, arguments: dict[str, Any]) -> Any:
        """Call the function, in a thread unless it is ``async``.

        Raises:
            ToolError: if the arguments do not fit.
        """
        self._check(arguments)
        return await call_user(partial(self.function, **arguments))

    @property
    def _parameters(self) -> Mapping[str, Any]:
        return self.schema["function"].get("parameters") or {}

    def _check(self, arguments: dict[str, Any]) -> None:
        """Raise if an argument is missing, unknown or of another type."""
        missing = [name for name in self._parameters.get("required", ()) if name not in arguments]
        if missing:
            raise ToolError(f"{_shown(self)} needs {', '.join(missing)}")
        try:
            self._bind(arguments)
        except TypeError as error:
            raise ToolError(f"{_shown(self)}: {error}") from None
        properties = self._parameters.get("properties") or {}
        for name, value in arguments.items():
            if expected := _misfit(properties.get(name) or {}, value):
                raise ToolError(
                    f"{_shown(self)}: {name} must be {expected}, got {str(value)[:80]!r}"
                )

    def _bind(self, arguments: dict[str, Any]) -> None:
        """Raise a ``TypeError`` if the function does not take these arguments."""
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # Such as some functions that are written in C.
            return
        signature.bind(**arguments)


async def call_tool(
    tool: CallableTool, arguments: Any, timeout: float | None = None
) -> str | list[dict[str, Any]]:
    """Call a tool and return its result as the content of a message.

    Args:
        tool: the tool.
        arguments: the arguments as a mapping or its JSON text.
        timeout: seconds, if the tool has no time limit of its own. A function in a thread goes on
            after that, and its result is dropped.

    Returns:
        The result: text as it is, anything else as JSON. Parts, if the result is an image or has some:
        a PIL image, a :class:`~torchrl_mt.vision.StoredImage`, ``{"type": "image", "image": ...}``, or
        a list of these and of texts.

    Raises:
        ToolError: if the call has no result. ``SystemExit`` and ``KeyboardInterrupt`` get through.

    Examples:
        >>> def half(x: float) -> float:
        ...     '''Halve a number.
        ...
        ...     Args:
        ...         x: the number.
        ...     '''
        ...     return x / 2
        >>> asyncio.run(call_tool(Tool(half), {"x": 3}))
        '1.5'
        >>> asyncio.run(call_tool(Tool(half), {"x": "3"}))
        Traceback (most recent call last):
            ...
        torchrl_mt.envs.tools.ToolError: half(x): x must be of type number, got '3'
    """
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            raise ToolError(f"{_shown(tool)}: the arguments are not valid JSON") from None
    if not isinstance(arguments, Mapping):
        raise ToolError(f"{_shown(tool)}: the arguments must be a JSON object")
    seconds = timeout if tool.timeout is None else tool.timeout
    try:
        result = await _within(tool.run(dict(arguments)), seconds, tool.name)
    except ToolError:
        raise
    except Exception as error:
        raise ToolError(f"{tool.name} raised {_described(error)}") from error
    parts = _image_parts(result)
    if parts is not None:
        try:  # In a thread, since images may be large.
            (message,) = await call_in_thread(with_stored_images, [{"content": parts}])
        except Exception as error:
            raise ToolError(f"{tool.name} returned no image: {_described(error)}") from error
        return list(message["content"])
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except Exception as error:
        raise ToolError(f"{tool.name} returned no JSON: {_described(error)}") from error
    return _encodable(text)


def _image_parts(result: Any) -> list[dict[str, Any]] | None:
    """The parts of a result that is an image, or a list of images and texts; ``None`` for others."""

    def as_part(value: Any) -> dict[str, Any] | None:
        if is_image(value):
            return {"type": "image", "image": value}
        if is_image_part(value) and value.keys() in ({"type", "image"}, {"type", "image_url"}):
            return {"type": "image", "image": image_source(value)}
        if isinstance(value, str):
            return {"type": "text", "text": _encodable(value)}
        if isinstance(value, Mapping) and value.keys() == {"type", "text"}:
            # Others are data, of which the model is shown the JSON.
            return dict(value) if value["type"] == "text" else None
        return None

    values = result if isinstance(result, (list, tuple)) else [result]
    parts = [part for part in map(as_part, values) if part is not None]
    has_image = any(part["type"] == "image" for part in parts)
    return parts if has_image and len(parts) == len(values) else None


def _encodable(text: str) -> str:
    """Text without lone surrogates, as file names have them, which cannot be encoded."""
    return text.encode(errors="replace").decode()


async def _within(work: Coroutine[Any, Any, Any], seconds: float | None, name: str) -> Any:
    """Await a call, in a task of its own, so that its timeouts are not taken for ours."""
    task = asyncio.ensure_future(work)
    # Retrieve errors that come too late, or asyncio logs them.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()
    if not done:
        raise ToolError(f"{name} did not answer within {seconds:g} seconds")
    if task.cancelled():
        raise ToolError(f"{name} was cancelled")
    return task.result()


def _described(error: BaseException) -> str:
    """Type and beginning of an error."""
    try:
        said = str(error)
    except Exception:
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


def _shown(tool: CallableTool) -> str:
    """Name and arguments of a tool."""
    parameters = tool.schema["function"].get("parameters") or {}
    return f"{tool.name}({', '.join(parameters.get('properties') or ())})"


def _misfit(schema: Mapping[str, Any], value: Any) -> str:
    """What a schema expects of a value that does not fit; empty if it fits.

    This looks at the type and at listed values, not into lists and mappings.
    """
    if value is None and schema.get("nullable"):
        return ""
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds and not any(_is_of(kind, value) for kind in kinds):
        return f"of type {' or '.join(kinds)}"
    listed = schema.get("enum")
    if listed is not None and value not in listed:
        return f"one of {', '.join(map(str, listed))}"
    return ""


def _is_of(kind: str, value: Any) -> bool:
    if isinstance(value, bool):  # Python's are integers, too.
        return kind == "boolean" or kind not in _TYPES
    return isinstance(value, _TYPES.get(kind, object))


def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function, by its signature and docstring."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        if not hasattr(function, "__name__"):
            raise TypeError("it is no function")
        return get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"the tool {name!r} must be a function with type hints and a docstring that describes it "
            f"and, in Google's style, every argument, got {type(error).__name__}: {error}. Add them, or "
            "give a schema: torchrl_mt.envs.Tool(function, schema)."
        ) from error


def _in_chat_form(schema: Any) -> dict[str, Any]:
    """A schema as ``{"type": "function", "function": {...}}``."""
    inner = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise TypeError(
            "schema must be a mapping such as {'name': ..., 'description': ..., 'parameters': {...}}, "
            f"got {str(schema)[:80]}."
        )
    return {"type": "function", "function": dict(inner)}
