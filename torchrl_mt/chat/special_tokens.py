"""Names of special tokens, and how they stay ordinary text within messages.

Text of users, tools and servers must not become a special token, which could end a turn. So
:data:`BREAK` is inserted into every such name, and the text between breaks is encoded separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence
from numbers import Number
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["BREAK", "SpecialTokenNames", "special_tokens"]

BREAK = "\ufdd0"
"""Splits the name of a special token; a noncharacter of Unicode."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names of a tokenizer's special tokens, including those that only its vocabulary marks as such."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}


class SpecialTokenNames:
    """Finds the names of a tokenizer's special tokens in text, and splits them.

    Args:
        tokenizer: the tokenizer.
        chosen: the names; all of them if ``None``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chosen: Iterable[str] | None = None
    ) -> None:
        found = special_tokens(tokenizer) if chosen is None else set(chosen)
        # A name of one character cannot be split.
        names = [re.escape(name) for name in found if len(name) > 1]
        self.pattern = re.compile("|".join(sorted(names)) or "(?!)")
        """Matches any of the names."""
        # A lookahead, since names may overlap.
        self._beginning = re.compile(f"(?={self.pattern.pattern})(.)", re.DOTALL)

    def split(self, value: Any, place: str) -> Any:
        """Copy plain data with a break in every name of a special token.

        Args:
            value: text, numbers, ``None``, and mappings and sequences of them.
            place: name of the value in errors.

        Raises:
            TypeError: if it holds anything else, whose text could contain a name.
        """
        if isinstance(value, str):
            text = value.replace(BREAK, "")
            # Most texts have no names, which is faster to find out without the lookahead.
            return self._beginning.sub(rf"\1{BREAK}", text) if self.pattern.search(text) else text
        if value is None or isinstance(value, Number):
            return value
        if isinstance(value, Mapping):
            return {
                self.split(key, f"a key of {place}"): self.split(entry, f"{place}[{key!r}]")
                for key, entry in value.items()
            }
        # Copy iterators, which one rendering uses up; refuse sets, whose order changes by process.
        ordered = isinstance(value, (Sequence, MappingView, Iterator))
        if ordered and not isinstance(value, (bytes, bytearray, memoryview)):
            parts = (self.split(entry, f"{place}[{k}]") for k, entry in enumerate(value))
            return tuple(parts) if isinstance(value, tuple) else list(parts)
        raise TypeError(
            f"{place} must be plain data (text, numbers, booleans, None, and mappings and lists of "
            f"them), got {type(value).__name__}: convert it to what the template is to show."
        )
