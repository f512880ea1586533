"""The arguments of calls in text: strings in quotes, words and flat lists of these, some with keywords.

Reading takes time linear in the text, and ends in the arguments or in an error that shows the place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = [
    "ActionError",
    "Value",
    "Word",
    "after",
    "as_written",
    "in_quotes",
    "read_arguments",
    "shown",
]

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "'": "'"}
_ESCAPED = {ord(c): "\\" + name for name, c in _ESCAPES.items() if c != "'"}
_STRING_STOPS = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}
_SPACES = re.compile(r"\s*")
_KEYWORD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*")
_WORD = re.compile(r"""[^\s,()\[\]"'=<>]+""")


class ActionError(ValueError):
    """A response, or a part of it, is not an action. The message says what is wrong."""


@dataclass(frozen=True)
class Word:
    """A value that was written without quotes."""

    text: str


Value: TypeAlias = "str | Word | list[str | Word]"
"""A string in quotes, a word or number, or a list of these."""


def read_arguments(text: str, position: int) -> tuple[list[tuple[str | None, Value]], int]:
    """The arguments after an opening parenthesis, with their keywords, and the position after them."""
    given: list[tuple[str | None, Value]] = []
    position = after(_SPACES, text, position)
    if text.startswith(")", position):
        return given, position + 1
    while True:
        keyword = _KEYWORD.match(text, position)
        value: Value
        if text.startswith(("[", "("), keyword.end() if keyword else position):
            value, position = _read_list(text, keyword.end() if keyword else position)
        else:
            value, position = _read_scalar(text, keyword.end() if keyword else position)
        given.append((keyword[1] if keyword else None, value))
        if text.startswith(")", position):
            return given, position + 1
        position = _after_comma(text, position, ")")


def _read_list(text: str, position: int) -> tuple[list[str | Word], int]:
    """A list of strings and words in brackets or parentheses, and the position after it."""
    closing = "]" if text[position] == "[" else ")"
    values: list[str | Word] = []
    position = after(_SPACES, text, position + 1)
    while True:
        value, position = _read_scalar(text, position)
        values.append(value)
        if text.startswith(closing, position):
            return values, after(_SPACES, text, position + 1)
        position = _after_comma(text, position, closing)


def _read_scalar(text: str, position: int) -> tuple[str | Word, int]:
    """A string or a word, and the position after it and the spaces that follow."""
    if text.startswith(('"', "'"), position):
        string, position = _read_string(text, position)
        return string, after(_SPACES, text, position)
    word = _WORD.match(text, position)
    if word is None:
        raise ActionError(f"expected an argument, got {shown(text, position)}.")
    return Word(word[0]), after(_SPACES, text, word.end())


def _read_string(text: str, position: int) -> tuple[str, int]:
    """A string in quotes, and the position after it."""
    quote, begin = text[position], position
    parts = []
    position += 1
    while stop := _STRING_STOPS[quote].search(text, position):
        parts.append(text[position : stop.start()])
        position = stop.end()
        if stop[0] == quote:
            return "".join(parts), position
        escaped = text[position : position + 1]
        if escaped not in _ESCAPES:
            raise ActionError(
                rf"a string has \n, \r, \t, \\, \" and \' as escapes, got {shown(text, position - 1)}; "
                r"write \\ for a backslash."
            )
        parts.append(_ESCAPES[escaped])
        position += 1
    raise ActionError(f"the string never ends: {shown(text, begin)}.")


def after(pattern: re.Pattern[str], text: str, position: int) -> int:
    """The position after a pattern that may be empty."""
    match = pattern.match(text, position)
    assert match is not None
    return match.end()


def _after_comma(text: str, position: int, closing: str) -> int:
    """The position after a comma and spaces."""
    if not text.startswith(",", position):
        raise ActionError(f"expected ',' or '{closing}', got {shown(text, position)}.")
    return after(_SPACES, text, position + 1)


def shown(text: str, position: int) -> str:
    """The beginning of a text from a position, for errors."""
    if position >= len(text):
        return "the end of the response"
    return repr(text[position : position + 40])


def in_quotes(text: str) -> str:
    """A string in quotes, as it is parsed."""
    return f'"{text.translate(_ESCAPED)}"'


def as_written(value: Any) -> str:
    """A value as it was written, cut to a short length, for errors."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_written, value[:4]))}]"
    return value.text[:40] if isinstance(value, Word) else in_quotes(value[:40])
