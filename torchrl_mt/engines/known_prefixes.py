"""Which beginnings of prompts have gone through the model already, as far back as there is room.

What the cache saved is measured against this: a token is new if no earlier request computed the prompt
up to it. Forgetting makes tokens new, never known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)

__all__ = ["KnownPrefixes", "tail_names"]


def tail_names(
    parent: int | None, tokens: Sequence[int], begin: int, size: int
) -> Iterator[tuple[int, int]]:
    """What an incomplete page behind a prefix would be called, the longest first.

    Args:
        parent: the name of the page before, if there is one.
        tokens: of a prompt; its last is always computed, so no page ends with it.
        begin: where the page begins.
        size: tokens of a page.

    Yields:
        How many tokens the page would hold, and its name.
    """
    for length in range(min(size, len(tokens) - begin) - 1, 0, -1):
        yield length, compute_block_hash(parent, list(tokens[begin : begin + length]))


class KnownPrefixes:
    """A set of pages' names, the longest unused of which are forgotten.

    A page's name stands for all tokens up to its end, so a name that is known is a prefix that is known.

    Args:
        room: how many names are remembered.

    Examples:
        >>> known = KnownPrefixes(room=8)
        >>> first = compute_block_hash(None, [5, 6])
        >>> known.add(first)
        >>> known.length([5, 6, 7, 8], [first, compute_block_hash(first, [7, 8])], size=2)
        2
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._names: dict[int, None] = {}

    def add(self, name: int) -> None:
        """Remember a page, complete or not."""
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > self._room:
            del self._names[next(iter(self._names))]

    def length(self, tokens: Sequence[int], names: Sequence[int], size: int) -> int:
        """How many of a prompt's first tokens are known; the last never is.

        Args:
            tokens: of the prompt.
            names: of its complete pages, in order.
            size: tokens of a page.
        """
        parent, found = None, 0
        for name in names:
            if name not in self._names:
                break
            self.add(name)
            parent, found = name, found + size
        for length, name in tail_names(parent, tokens, found, size):
            if name in self._names:
                return found + length
        return min(found, len(tokens) - 1)
