"""Prompts that grow: views of one list of tokens, so that a conversation costs what it is long.

A prompt that was recorded never changes, whatever is added behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

__all__ = ["Line", "Prompt"]


class Prompt(Sequence[int]):
    """The first ``length`` tokens of a list that only grows.

    Examples:
        >>> line = Line([1, 2])
        >>> first = line.prompt()
        >>> line.add([3])
        >>> list(first), list(line.prompt())
        ([1, 2], [1, 2, 3])
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int], length: int) -> None:
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._tokens[start : stop if stop >= 0 else None : step]
        if not -self._length <= index < self._length:
            raise IndexError(f"token {index} of a prompt of {self._length}")
        return self._tokens[index % self._length]

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._length)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Prompt) and other._tokens is self._tokens:
            return self._length == other._length
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Prompt({list(self)})"

    @property
    def line(self) -> list[int]:
        """The list that prompts which go on from each other share: not to be changed."""
        return self._tokens


class Line:
    """A conversation as the model sees it: tokens are only ever added.

    Args:
        tokens: what it begins with.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = list(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self._tokens.extend(tokens)

    def prompt(self) -> Prompt:
        """What the line holds now."""
        return Prompt(self._tokens, len(self._tokens))

    def holds(self, prompt: Sequence[int]) -> bool:
        """Whether ``prompt`` begins with all that the line holds."""
        size = len(self._tokens)
        if isinstance(prompt, Prompt) and prompt._tokens is self._tokens:
            return True
        if len(prompt) < size:
            return False
        beginning = prompt[:size]
        return (beginning if isinstance(beginning, list) else list(beginning)) == self._tokens
