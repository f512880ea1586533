"""Which beginnings of texts are known, token for token, and the keys and values that were kept of them.

Two promises: what was added is found by every later text that begins alike, up to the first token that
differs; and what has to leave was used longest ago, the end of a text before its beginning.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import torch

__all__ = ["PrefixTree"]


class _Node:
    """Some tokens that follow each other, and what was kept of them, in pieces."""

    __slots__ = ("children", "parent", "pieces", "tokens", "used")

    def __init__(
        self, tokens: list[int], pieces: list[torch.Tensor], parent: _Node | None, used: int
    ) -> None:
        self.tokens, self.pieces, self.parent, self.used = tokens, pieces, parent, used
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """A radix tree of tokens (as in SGLang, Zheng et al., 2024).

    Examples:
        >>> tree = PrefixTree()
        >>> tree.add([5, 6, 7], torch.zeros(3, 2))
        >>> length, pieces = tree.find([5, 6, 8])
        >>> length, [len(piece) for piece in pieces]
        (2, [2])
        >>> tree.evict(1), len(tree)
        (1, 2)
    """

    def __init__(self) -> None:
        self._root = _Node([], [], None, 0)
        self._size = 0
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        """How many tokens are known."""
        return self._size

    def find(
        self, tokens: Sequence[int], *, copied: bool = False
    ) -> tuple[int, list[torch.Tensor]]:
        """The longest known beginning of a text.

        Args:
            tokens: of the text.
            copied: a request has its own copy of it, and will add it again: it may leave first.

        Returns:
            How many tokens it has, and what was kept of them: pieces ``[n, F]`` that follow each other.
        """
        length, path = self._walk(tokens)
        self._note_use(path, copied)
        return length, [piece for node in path for piece in node.pieces]

    def add(
        self, tokens: list[int], piece: torch.Tensor | None = None, *, copied: bool = False
    ) -> None:
        """Make a text known.

        Args:
            tokens: of the text.
            piece: ``[n, F]`` what is to be kept of its last ``n`` tokens, if anything is. Those before
                must be known, or nothing is added.
            copied: as in :meth:`find`.
        """
        known, path = self._walk(tokens)
        now = self._note_use(path, copied)
        if known == len(tokens):
            return
        if piece is not None:
            begin = len(piece) - (len(tokens) - known)
            if begin < 0:
                return
            piece = piece if begin == 0 else piece[begin:].clone()
        parent, rest = path[-1] if path else self._root, tokens[known:]
        pieces = [] if piece is None else [piece]
        if parent is self._root or parent.children:
            parent.children[rest[0]] = _Node(rest, pieces, parent, now)
        else:
            parent.tokens += rest
            parent.pieces += pieces
        self._size += len(rest)

    def evict(self, count: int) -> int:
        """Forget so many tokens, or all; returns how many were forgotten."""
        if count <= 0:
            return 0
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children]
        heapq.heapify(leaves)
        missing = min(count, self._size)
        self._size -= missing
        forgotten = missing
        while missing:
            _, _, node = heapq.heappop(leaves)
            size = len(node.tokens) - missing
            if size > 0:
                node.tokens, node.pieces = node.tokens[:size], _cut(node.pieces, size)[0]
                break
            missing -= len(node.tokens)
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens[0]]
            if parent.parent is not None and not parent.children:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        return forgotten

    def _note_use(self, path: list[_Node], copied: bool) -> int:
        """Note when nodes were used; returns it."""
        now = 0 if copied else next(self._clock)
        for node in path:
            node.used = now
        return now

    def _walk(self, tokens: Sequence[int]) -> tuple[int, list[_Node]]:
        """The nodes of the longest known beginning; one that goes on otherwise is cut in two."""
        node, path, at = self._root, [], 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            length = _common(child.tokens, tokens[at : at + len(child.tokens)])
            node = child if length == len(child.tokens) else self._split(child, length)
            path.append(node)
            at += length
        return at, path

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a node in two; returns the upper part."""
        parent = node.parent
        assert parent is not None
        above, below = _cut(node.pieces, length)
        upper = _Node(node.tokens[:length], above, parent, node.used)
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.pieces, node.parent = node.tokens[length:], below, upper
        upper.children[node.tokens[0]] = node
        return upper

    def _nodes(self) -> Iterator[_Node]:
        """Every node but the root."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node


def _cut(pieces: list[torch.Tensor], length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The pieces of the first tokens and those of the rest, each in memory that can be freed alone."""
    above: list[torch.Tensor] = []
    for i, piece in enumerate(pieces):
        if length == 0:
            return above, pieces[i:]
        if length < len(piece):
            return [*above, piece[:length].clone()], [piece[length:].clone(), *pieces[i + 1 :]]
        above.append(piece)
        length -= len(piece)
    return above, []


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at the beginning."""
    if a[: len(b)] == b:
        return len(b)
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
