"""Notations of tool calls: one small reader per model family.

A reader takes the text after the thoughts and returns the content and the calls. It raises
``MalformedError`` if a call is malformed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from torchrl_mt.chat.replies.reply import MalformedError
from torchrl_mt.chat.replies.tool_calls import (
    CONSTANTS,
    Calls,
    ToolTypes,
    as_calls,
    decode_json,
    make_call,
    python_calls,
)

__all__ = [
    "Read",
    "cohere",
    "deepseek",
    "elements",
    "gemma",
    "json_calls",
    "kimi",
    "llama_json",
    "llama_python",
    "mistral",
    "no_calls",
    "python_block",
]

Read: TypeAlias = Callable[[str, ToolTypes], tuple[str, Calls]]
"""Returns the content and the calls of a text."""

_DECODER = json.JSONDecoder()


def no_calls(text: str, types: ToolTypes) -> tuple[str, Calls]:
    """Read a reply of a family without tool calls."""
    return text, []


def json_calls(opening: str, closing: str | None) -> Read:
    """Reader of JSON between two marks: an object or a list (Hermes, Qwen, Granite, Phi, Nemotron...).

    Args:
        opening: mark before each object or list.
        closing: mark after it, if there is one.
    """

    def read(text: str, types: ToolTypes) -> tuple[str, Calls]:
        outside, calls, at = [], [], 0
        while (start := text.find(opening, at)) >= 0:
            outside.append(text[at:start])
            value, at = _json_at(text, start + len(opening))
            if closing is not None:
                at = _behind(text, at, closing)
            calls += as_calls(value)
        return _content(text, [*outside, text[at:]], calls, closing), calls

    return read


def elements(opening: str, closing: str, call: str, argument: str) -> Read:
    """Reader of XML-like elements between two marks: one per call, with one per argument inside.

    Args:
        opening: mark before the calls.
        closing: mark after them.
        call: pattern of a call, with groups for its name and its arguments.
        argument: pattern of an argument, with groups for its name and its value; between them a group
            for ``"true"`` or ``"false"`` if the notation says whether the value is text.
    """
    call_pattern, argument_pattern = (re.compile(each, re.DOTALL) for each in (call, argument))

    def read_calls(body: str, types: ToolTypes) -> Calls:
        calls = []
        for name, inside in _matches(call_pattern, body):
            arguments = {}
            for key, *is_text, value in _matches(argument_pattern, inside):
                key = key.strip()
                if is_text:
                    arguments[key] = value if is_text == ["true"] else decode_json(value)
                else:
                    arguments[key] = types.value(name.strip(), key, value)
            calls.append(make_call(name, arguments))
        return calls

    return _blocks(opening, closing, read_calls)


def _matches(pattern: re.Pattern[str], text: str) -> list[Any]:
    """Groups of all matches, which only white space may separate."""
    found, at = [], 0
    for match in pattern.finditer(text):
        if text[at : match.start()].strip():
            break
        found.append(match.groups())
        at = match.end()
    if text[at:].strip():
        raise MalformedError(f"not understood: {text[at:][:80]!r}")
    return found


def deepseek(text: str, types: ToolTypes) -> tuple[str, Calls]:
    """Read DeepSeek V3's and R1's calls (type, name, fenced arguments) and V3.1's (name, JSON)."""

    def read_call(body: str) -> dict[str, Any]:
        head, found, tail = body.partition("<｜tool▁sep｜>")
        if not found:
            raise MalformedError("a call without <｜tool▁sep｜>")
        name, fence, arguments = tail.partition("\n```json\n")
        if not fence:
            return make_call(head, tail)
        arguments, closed, rest = arguments.rpartition("\n```")
        if not closed or rest.strip():
            raise MalformedError("arguments without the end of their fence")
        return make_call(name, arguments)

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return _section(text, *section, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read_call)


def kimi(text: str, types: ToolTypes) -> tuple[str, Calls]:
    """Read Kimi K2's calls, whose ids are ``functions.name:number``."""

    def read_call(body: str) -> dict[str, Any]:
        id, found, arguments = body.partition("<|tool_call_argument_begin|>")
        if not found:
            raise MalformedError("a call without <|tool_call_argument_begin|>")
        id = id.strip()
        return make_call(id.removeprefix("functions.").rpartition(":")[0] or id, arguments, id)

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    return _section(text, *section, "<|tool_call_begin|>", "<|tool_call_end|>", read_call)


def mistral(text: str, types: ToolTypes) -> tuple[str, Calls]:
    """Read Mistral's: ``[TOOL_CALLS]`` before a JSON list or each ``name[CALL_ID]id[ARGS]{...}``."""
    content, *pieces = text.split("[TOOL_CALLS]")
    calls: Calls = []
    for piece in map(str.strip, pieces):
        if piece.startswith(("[{", "{", "[ {")):
            calls += as_calls(decode_json(piece))
            continue
        head, brace, arguments = piece.partition("{")
        named = re.fullmatch(r"([\w.\-]+?)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?", head.strip())
        if named is None:
            raise MalformedError(f"no name of a tool: {head[:80]!r}")
        calls.append(make_call(named[1], brace + arguments, named[2]))
    return (content.strip() if calls else content), calls


def cohere(text: str, types: ToolTypes) -> tuple[str, Calls]:
    """Read Command's: calls as JSON, and the content between marks of its own."""
    content, calls = json_calls("<|START_ACTION|>", "<|END_ACTION|>")(text, types)
    for kind in ("RESPONSE", "TEXT"):
        content = content.replace(f"<|START_{kind}|>", "").replace(f"<|END_{kind}|>", "")
    return content, calls


def gemma(opening: str, closing: str, quote: str) -> Read:
    """Reader of Gemma's ``call:name{key:value}``, with its own quotes around text.

    Args:
        opening: mark before a call.
        closing: mark after it.
        quote: mark on both sides of a text.
    """

    def bare_to_json(part: str) -> str:
        """Convert what is outside of texts to JSON: quote names, replace constants."""
        part = re.sub(r"(?<=[{,])\s*([\w.\-]+)\s*:", r'"\1":', part)
        constant = rf"\b({'|'.join(CONSTANTS)})\b"
        return re.sub(constant, lambda name: json.dumps(CONSTANTS[name.group()]), part)

    def read_call(body: str, types: ToolTypes) -> Calls:
        name, brace, arguments = body.strip().removeprefix("call:").partition("{")
        parts = (brace + arguments).split(quote)
        if len(parts) % 2 == 0:
            raise MalformedError("a text without its end")
        for k, part in enumerate(parts):
            parts[k] = json.dumps(part) if k % 2 else bare_to_json(part)
        return [make_call(name, "".join(parts))]

    return _blocks(opening, closing, read_call)


def llama_json(text: str, types: ToolTypes) -> tuple[str, Calls]:
    """Read Llama 3's: the whole reply is ``{"name": ..., "parameters": ...}``, or several with ``;``."""
    rest = text.strip().removeprefix("<|python_tag|>").lstrip()
    if not re.match(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments)"\s*:', rest):
        return text, []
    calls, at = [], 0
    while at < len(rest):
        value, at = _json_at(rest, at)
        calls += as_calls(value)
        at = at if at == len(rest) else _behind(rest, at, ";", or_end=True)
    return "", calls


def llama_python(text: str, types: ToolTypes) -> tuple[str, Calls]:
    """Read Llama 4's: the whole reply is a list of calls in Python's notation, or Llama 3's JSON."""
    inside = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", inside):
        content, calls = llama_json(inside, types)
        return (content, calls) if calls else (text, [])
    return "", python_calls(inside)


def python_block(opening: str, closing: str) -> Read:
    """Reader of calls in Python's notation between two marks (LFM2, OLMo 3)."""
    return _blocks(opening, closing, lambda body, types: python_calls(body))


def _blocks(opening: str, closing: str, read: Callable[[str, ToolTypes], Calls]) -> Read:
    """Reader of calls between two marks; ``read`` parses each block, and the rest is content."""

    def read_all(text: str, types: ToolTypes) -> tuple[str, Calls]:
        outside, calls, at = [], [], 0
        while (start := text.find(opening, at)) >= 0:
            end = text.find(closing, start)
            if end < 0:
                raise MalformedError(f"{opening} without {closing}")
            outside.append(text[at:start])
            found = read(text[start + len(opening) : end], types)
            if not found:
                raise MalformedError(f"no call in {opening}")
            calls += found
            at = end + len(closing)
        return _content(text, [*outside, text[at:]], calls, closing), calls

    return read_all


def _section(
    text: str,
    begin: str,
    end: str,
    opening: str,
    closing: str,
    read: Callable[[str], dict[str, Any]],
) -> tuple[str, Calls]:
    """Read a section of calls, each between marks of its own."""

    def read_section(body: str, types: ToolTypes) -> Calls:
        content, calls = _blocks(opening, closing, lambda call, types: [read(call)])(body, types)
        if content.strip():
            raise MalformedError(f"text between calls: {content[:80]!r}")
        return calls

    return _blocks(begin, end, read_section)(text, ToolTypes())


def _content(text: str, outside: list[str], calls: Calls, closing: str | None) -> str:
    """Join the text outside of calls; the text as it is if there are no calls."""
    if closing is not None and any(closing in part for part in outside):
        raise MalformedError(f"{closing} without its beginning")
    if not calls:
        return text
    return "\n".join(part.strip() for part in outside if part.strip())


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Decode the JSON value at a position; return it and its end."""
    start = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"no JSON: {text[start : start + 80]!r}") from error


def _behind(text: str, at: int, mark: str, *, or_end: bool = False) -> int:
    """The position after a mark that must come next."""
    rest = text[at:].lstrip()
    if or_end and not rest:
        return len(text)
    if not rest.startswith(mark):
        raise MalformedError(f"{mark} is missing: {rest[:80]!r}")
    return len(text) - len(rest) + len(mark)
