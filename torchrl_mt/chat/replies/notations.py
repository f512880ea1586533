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
from torchrl_mt.chat.replies.scanner import Scanner
from torchrl_mt.chat.replies.tool_calls import (
    CONSTANTS,
    Calls,
    ToolTypes,
    as_calls,
    make_call,
    python_calls,
)
from torchrl_mt.strict_json import read_json

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
        scan, outside, calls = Scanner(text), [], []
        while (said := scan.before(opening)) is not None:
            outside.append(said)
            calls += as_calls(scan.json())
            # A complete call may end the reply: its mark may be a stop string.
            if closing is not None and not scan.is_done():
                scan.expect(closing)
        return _content(text, [*outside, scan.rest()], calls, closing), calls

    return read


def elements(
    opening: str,
    closing: str,
    call: tuple[str, str, str] | None,
    argument: tuple[str, ...],
    *,
    lines: bool = False,
) -> Read:
    """Reader of XML-like elements between two marks: one per call, with one per argument inside.

    Args:
        opening: mark before the calls.
        closing: mark after them.
        call: marks before a call's name, after it, and after the arguments; ``None`` if the text before
            the first argument is the name.
        argument: marks before an argument's name, after it, and after the value. Before the last there
            may be one more, with white space before it, or with ``true`` or ``false`` if the notation
            says whether the value is text.
        lines: whether a line break on either side of a value is none of it.
    """
    begin, *middle, end = argument

    def read_arguments(scan: Scanner, name: str, types: ToolTypes) -> dict[str, Any]:
        arguments = {}
        while scan.takes(begin):
            key, *between = (scan.until(mark) for mark in middle)
            value, is_text = scan.until(end), "".join(between).strip()
            if lines:
                value = value.removeprefix("\n").removesuffix("\n")
            if is_text == "":
                value = types.value(name, key.strip(), value)
            elif is_text == "false":
                value = read_json(value)
            elif is_text != "true":
                raise MalformedError(f"not understood: {is_text[:80]!r}")
            arguments[key.strip()] = value
        return arguments

    def read_calls(body: str, types: ToolTypes) -> Calls:
        calls = []
        if call is None:
            head, *rest = body.partition(begin)
            scan = Scanner("".join(rest))
            calls.append(make_call(head, read_arguments(scan, head.strip(), types)))
        else:
            scan = Scanner(body)
            while scan.takes(call[0]):
                name = scan.until(call[1]).strip()
                calls.append(make_call(name, read_arguments(scan, name, types)))
                scan.expect(call[2])
        if not scan.is_done():
            raise MalformedError(f"not understood: {scan.rest()[:80]!r}")
        return calls

    return _blocks(opening, closing, read_calls)


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
        name, _, number = id.removeprefix("functions.").rpartition(":")
        if not number.isdecimal():
            raise MalformedError(f"no functions.name:number: {id[:80]!r}")
        return make_call(name, arguments, id)

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    return _section(text, *section, "<|tool_call_begin|>", "<|tool_call_end|>", read_call)


def mistral(text: str, types: ToolTypes) -> tuple[str, Calls]:
    """Read Mistral's: ``[TOOL_CALLS]`` before a JSON list or each ``name[CALL_ID]id[ARGS]{...}``."""
    content, *pieces = text.split("[TOOL_CALLS]")
    calls: Calls = []
    for piece in map(str.strip, pieces):
        if piece.startswith(("[{", "{", "[ {")):
            calls += as_calls(read_json(piece))
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
    scan, calls = Scanner(rest), []
    while not scan.is_done():
        calls += as_calls(scan.json())
        if not scan.is_done():
            scan.expect(";")
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
        scan, outside, calls = Scanner(text), [], []
        while (said := scan.before(opening)) is not None:
            outside.append(said)
            found = read(scan.until(closing), types)
            if not found:
                raise MalformedError(f"no call in {opening}")
            calls += found
        return _content(text, [*outside, scan.rest()], calls, closing), calls

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
