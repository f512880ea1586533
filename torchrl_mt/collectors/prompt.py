"""Prompts as views of a growing list of tokens.

The memory of a conversation is then linear in its length, not quadratic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

from torchrl_mt.vision import StoredImage

__all__ = ["Prompt"]


class Prompt(Sequence[int]):
    """The first ``length`` tokens of a list that may only grow.

    Args:
        line: tokens of the conversation; may be extended later.
        length: number of the prompt's tokens.
        images: its images, in the order of their placeholders.

    Examples:
        >>> line = [1, 2]
        >>> prompt = Prompt(line, 2)
        >>> line += [3, 4]
        >>> list(prompt), Prompt(line, 4).starts_with(prompt)
        ([1, 2], True)
    """

    __slots__ = ("_length", "images", "line")

    def __init__(self, line: list[int], length: int, images: tuple[StoredImage, ...] = ()) -> None:
        self.line = line
        """Tokens of the conversation, shared by its prompts."""
        self.images = images
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
            return self.line[start : stop if stop >= 0 else None : step]
        if not -self._length <= index < self._length:
            raise IndexError(f"token {index} of a prompt of {self._length}.")
        return self.line[index % self._length]

    def __iter__(self) -> Iterator[int]:
        return islice(self.line, self._length)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and self.starts_with(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Prompt({list(self)})"

    def starts_with(self, tokens: Sequence[int]) -> bool:
        """Whether the prompt begins with these tokens; in O(1) for a prompt of the same list."""
        size = len(tokens)
        if size > self._length:
            return False
        same_line = isinstance(tokens, Prompt) and tokens.line is self.line
        return same_line or self.line[:size] == list(tokens)
