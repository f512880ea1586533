"""Where the prefix of a prompt was seen: the longest remembered one is found, in bounded memory."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

__all__ = ["PrefixPlaces"]

_P = TypeVar("_P")


class PrefixPlaces(Generic[_P]):
    """Remembers a place for each of the last sequences of tokens.

    Args:
        capacity: number of sequences; the one that was used longest ago is forgotten.

    Examples:
        >>> places = PrefixPlaces()
        >>> places.add([1, 2, 3], "a", is_turn=True)
        >>> places.find([1, 2, 3, 4])
        ('a', True)
        >>> places.find([1, 2, 4]) is None
        True
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._places: OrderedDict[bytes, tuple[int, _P, bool]] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self._lengths: list[int] = []
        """Lengths of the sequences, ascending."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, tokens: Sequence[int], place: _P, *, is_turn: bool) -> None:
        """Remember the place of a sequence, instead of an earlier one.

        Args:
            tokens: the sequence.
            place: what to find again.
            is_turn: whether it ends with a response; one that did is not made one that did not.
        """
        size = len(tokens)
        (key,) = _hashes(tokens, [size])
        known = self._places.pop(key, None)
        self._places[key] = (size, place, is_turn or (known is not None and known[2]))
        if known is not None:
            return
        self._counts[size] += 1
        if self._counts[size] == 1:
            insort(self._lengths, size)
        if len(self._places) > self._capacity:
            _, (oldest, _, _) = self._places.popitem(last=False)
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                self._lengths.remove(oldest)

    def find(self, prompt: Sequence[int]) -> tuple[_P, bool] | None:
        """Find the place of the longest sequence that the prompt begins with.

        Returns:
            The place, and whether the sequence ends with a response; ``None`` if there is none.
        """
        lengths = [length for length in self._lengths if length <= len(prompt)]
        for key in reversed(list(_hashes(prompt, lengths))):
            if key in self._places:
                self._places.move_to_end(key)
                return self._places[key][1:]
        return None


def _hashes(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[bytes]:
    """Hash the beginnings of the given ascending lengths."""
    values = array("q", tokens)
    running, done = blake2b(digest_size=16), 0
    data = memoryview(values).cast("B")
    for length in lengths:
        running.update(data[done * values.itemsize : length * values.itemsize])
        done = length
        yield running.digest()
