"""A radix tree of token prefixes with their cached keys and values.

Two promises: every text finds its longest prefix in the tree; and eviction removes the least recently
used tokens first, the end of a text before its beginning.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import torch

__all__ = ["PrefixTree"]


class _Node:
    """A run of tokens, and their cached keys and values in pieces ``[n, F]``."""

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
        """Number of tokens in the tree."""
        return self._size

    def find(
        self, tokens: Sequence[int], *, copied: bool = False
    ) -> tuple[int, list[torch.Tensor]]:
        """Find the longest known prefix of a text.

        Args:
            tokens: the text.
            copied: whether a request holds a copy of the prefix and will add it again. Such a prefix is
                evicted first.

        Returns:
            Length of the prefix in tokens, and its keys and values in consecutive pieces ``[n, F]``.
        """
        length, path = self._walk(tokens)
        self._mark_used(path, copied)
        return length, [piece for node in path for piece in node.pieces]

    def add(
        self, tokens: list[int], piece: torch.Tensor | None = None, *, copied: bool = False
    ) -> None:
        """Add a text.

        Args:
            tokens: the text.
            piece: keys and values ``[n, F]`` of its last ``n`` tokens, if any are to be stored. The
                tokens before must be in the tree, or nothing is added.
            copied: as in :meth:`find`.
        """
        known, path = self._walk(tokens)
        now = self._mark_used(path, copied)
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
        """Remove up to ``count`` tokens; returns how many were removed."""
        if count <= 0:
            return 0
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children]
        heapq.heapify(leaves)
        left = removed = min(count, self._size)
        self._size -= removed
        while left:
            _, _, node = heapq.heappop(leaves)
            size = len(node.tokens) - left
            if size > 0:
                node.tokens, node.pieces = node.tokens[:size], _cut(node.pieces, size)[0]
                break
            left -= len(node.tokens)
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens[0]]
            if parent.parent is not None and not parent.children:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        return removed

    def _mark_used(self, path: list[_Node], copied: bool) -> int:
        """Set the time of last use of nodes and return it; 0 if copied, so that they go first."""
        now = 0 if copied else next(self._clock)
        for node in path:
            node.used = now
        return now

    def _walk(self, tokens: Sequence[int]) -> tuple[int, list[_Node]]:
        """Length and nodes of the longest known prefix; splits a node that matches in part."""
        node, path, at = self._root, [], 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            length = _common(child.tokens, tokens[at : at + len(child.tokens)])
            node = child if length == len(child.tokens) else self._split(child, length)
            path.append(node)
            at += length
        return at, path

    def _split(self, node: _Node, length: int) -> _Node:
        """Split a node after ``length`` tokens; returns the upper part."""
        parent = node.parent
        assert parent is not None
        above, below = _cut(node.pieces, length)
        upper = _Node(node.tokens[:length], above, parent, node.used)
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.pieces, node.parent = node.tokens[length:], below, upper
        upper.children[node.tokens[0]] = node
        return upper

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node


def _cut(pieces: list[torch.Tensor], length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Split pieces after ``length`` tokens; the parts share no memory."""
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
    """Length of the common prefix of two texts, the second no longer than the first."""
    if a[: len(b)] == b:
        return len(b)
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
