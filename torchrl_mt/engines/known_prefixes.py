"""Which beginnings of prompts have gone through the model already, as far back as there is room.

What the cache saved is measured against this: a token is new if no earlier request computed the prompt
up to it. Forgetting makes tokens new, never known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)

__all__ = ["KnownPrefixes"]


class KnownPrefixes:
    """A set of pages' names, the longest unused of which are forgotten.

    A page's name stands for all tokens up to its end, so a name that is known is a prefix that is known.

    Args:
        page_size: tokens of a page.
        room: how many names are remembered.

    Examples:
        >>> known = KnownPrefixes(page_size=2, room=8)
        >>> page = compute_block_hash(None, [5, 6])
        >>> known.add(page)
        >>> tail = known.add_tail(page, [7])
        >>> known.length([5, 6, 7, 8, 9], [page, compute_block_hash(page, [7, 8])])
        3
    """

    def __init__(self, page_size: int, room: int) -> None:
        self._size, self._room = page_size, room
        self._names: dict[int, None] = {}
        # Behind each page, how many tokens incomplete ones hold: only those need be looked up.
        self._tails: dict[int | None, set[int]] = {}

    def add(self, name: int) -> None:
        """Remember a page, complete or not."""
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > self._room:
            del self._names[next(iter(self._names))]

    def add_tail(self, parent: int | None, tokens: Sequence[int]) -> int:
        """Remember an incomplete page.

        Args:
            parent: the name of the page before, if there is one.
            tokens: that the page holds.

        Returns:
            Its name.
        """
        name = compute_block_hash(parent, list(tokens))
        self.add(name)
        lengths = self._tails.pop(parent, set())
        lengths.add(len(tokens))
        self._tails[parent] = lengths
        if len(self._tails) > self._room:
            del self._tails[next(iter(self._tails))]
        return name

    def tails(
        self, parent: int | None, tokens: Sequence[int], begin: int
    ) -> Iterator[tuple[int, int]]:
        """What the incomplete page behind a prefix may be called, the longest first.

        Args:
            parent: the name of the prefix's last page, if there is one.
            tokens: of a prompt; its last is always computed, so no page ends with it.
            begin: where the page begins.

        Yields:
            How many tokens the page would hold, and its name.
        """
        for length in sorted(self._tails.get(parent, ()), reverse=True):
            if begin + length < len(tokens):
                yield length, compute_block_hash(parent, list(tokens[begin : begin + length]))

    def length(self, tokens: Sequence[int], names: Sequence[int]) -> int:
        """How many of a prompt's first tokens are known; the last never is.

        Args:
            tokens: of the prompt.
            names: of its complete pages, in order, but for one that ends with the prompt.
        """
        parent, found = None, 0
        for name in names:
            if name not in self._names:
                break
            self.add(name)
            parent, found = name, found + self._size
        for length, name in self.tails(parent, tokens, found):
            if name in self._names:
                return found + length
        return found
