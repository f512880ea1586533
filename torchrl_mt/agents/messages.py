"""Messages of OpenAI clients: what makes two the same, and their form for chat templates.

Images are read from the request itself, and from nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torchrl_mt.strict_json import read_json
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.messages import is_image_part, refuse_links, with_stored_images

__all__ = ["content_of", "for_template", "has_images", "identities", "stored_images"]


def has_images(message: Mapping[str, Any]) -> bool:
    """Whether a message's content has parts that are images."""
    content = message.get("content")
    return isinstance(content, (list, tuple)) and any(map(is_image_part, content))


def stored_images(
    messages: Sequence[Mapping[str, Any]], vision: VisionProcessor | None = None
) -> list[Mapping[str, Any]]:
    """Replace images by :class:`~torchrl_mt.vision.StoredImage`.

    Only ``data:`` URIs are read: a client must not have the server open files or addresses. ``vision``
    looks at images of a new size.

    Raises:
        ValueError: if an image is given in another way, cannot be read, or is in an assistant's message.
    """
    for k, message in enumerate(messages):
        if not has_images(message):
            continue
        if message["role"] == "assistant":
            raise ValueError(f"messages[{k}].content must be text, since the assistant said it.")
        refuse_links(message, k)
    return with_stored_images(messages, vision)


def content_of(message: Mapping[str, Any]) -> str | tuple[str | StoredImage, ...]:
    """A message's text; if it has images, its texts and images in order.

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
        raise ValueError(f"content must be text or a list of parts, got {content!r}.")
    found: list[Any] = []
    for part in parts:
        if is_image_part(part):
            found.append(part.get("image"))
        elif not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise ValueError(f"content must be text and images, got the part {part!r}.")
        elif found and isinstance(found[-1], str):
            found[-1] += part["text"]
        else:
            found.append(part["text"])
    has_text_alone = all(isinstance(each, str) for each in found)
    return "".join(found) if has_text_alone else tuple(found)


def identities(messages: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    """One hashable value per message; equal ones are the same message.

    Role, text, images (by content), and the names and arguments of tool calls count; arguments are
    compared as JSON values. Reasoning does not count, since most clients leave it out, nor do the ids of
    calls: a tool's result refers to its call by the call's place in the dialogue.

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
        found.append((_role(message), content_of(message), called, result_of))
        for c, call in enumerate(calls):
            places[str(call.get("id"))] = (k, c)
    return found


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form that chat templates take: text as content, arguments as mappings.

    Content with images is a list of parts, with images as :func:`stored_images` left them.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    content = content_of(message)
    if not isinstance(content, str):
        plain["content"] = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": part}
            for part in content
        ]
    else:
        plain["content"] = content
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
        return read_json(arguments)
    except ValueError:
        return arguments
