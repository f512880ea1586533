"""The episode table: length, first row and metadata of each stored episode.

Appending and evicting cost amortized O(1), finding the episode of a step or clip O(log E). No cost
grows with the number of stored steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.ring import Moves

__all__ = ["Choice", "EpisodeTable", "Unit", "search"]

Unit = Literal["clips", "clips_or_whole", "episodes"]
"""Unit that is counted; see :class:`Choice`."""

_MAX_CHOICES = 8
"""Choices whose counts are cached."""


class Choice(NamedTuple):
    """What a draw chooses from: the number of units that an episode of each length offers."""

    span: int
    """Steps per clip."""
    unit: Unit = "clips"
    """``"clips"`` counts clips of ``span`` steps; ``"clips_or_whole"`` also counts a shorter episode
    as one clip; ``"episodes"`` counts episodes that hold a clip.
    """
    least: int = 1
    """With ``"clips_or_whole"``, shorter episodes count 0."""
    beyond: tuple[int, int] = (0, 0)
    """Steps of a clip that may lie before and after its episode; at least one lies inside."""

    def units(self, lengths: np.ndarray) -> np.ndarray:
        """Count the units of episodes with these lengths: int64 ``[E]``.

        Examples:
            >>> Choice(3).units(np.array([2, 3, 5]))
            array([0, 1, 3])
        """
        clips, more = lengths - (self.span - 1), np.int64(0)
        if any(self.beyond):
            outside = np.minimum(lengths, self.span) - 1
            more = np.minimum(outside, self.beyond[0]) + np.minimum(outside, self.beyond[1])
        if self.unit == "clips":
            return np.where(clips > 0, clips + more, 0)
        if self.unit == "clips_or_whole":
            return np.where(lengths >= self.least, np.maximum(clips, 1) + more, 0)
        return (clips > 0).astype(np.int64)


def search(before: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the episode of each unit.

    Args:
        before: what :meth:`EpisodeTable.before` returns.
        units: int64 ``[n]``, units by age: 0 is the first of the oldest episode.

    Returns:
        int64 ``[n]``, positions of the episodes (0 is the oldest), and int64 ``[n]``, positions of the
        units within their episodes.

    Examples:
        >>> search(np.array([7, 9, 9, 12]), np.array([0, 1, 2]))
        (array([0, 0, 2]), array([0, 1, 0]))
    """
    units = units + before[0]
    episodes = before.searchsorted(units, "right") - 1
    return episodes, units - before[episodes]


class EpisodeTable:
    """Length, first row and metadata of every stored episode, oldest first.

    Episodes have *ordinals* and steps have *numbers*: 0 for the first ever stored, and never reused.
    Only differences of the other cumulative counts matter, so evicting changes none of them. Indices
    are arrays, not tensors: they are few, and each torch call has more overhead.
    """

    def __init__(self) -> None:
        self.oldest = 0
        """Ordinal of the oldest stored episode."""
        self.renumbered = 0
        """Shift of the step numbers against those in the loaded state."""
        self._head = 0
        self._tail = 0
        self._length = np.zeros(64, dtype=np.int64)
        self._start = np.zeros(64, dtype=np.int64)
        self._steps = np.zeros(65, dtype=np.int64)
        """Number of the first step of each episode, then of the step after the last."""
        self._tokens = np.zeros(65, dtype=np.int64)
        """Cumulative tokens before each episode and after the last, up to a constant."""
        self._counts: OrderedDict[Choice, np.ndarray] = OrderedDict()
        """Cumulative units likewise, for recent choices."""
        self._metadata: dict[int, dict[Any, Any]] = {}
        """Metadata by ordinal, of the episodes that have some."""

    @property
    def num_episodes(self) -> int:
        """Number of stored episodes."""
        return self._tail - self._head

    @property
    def num_steps(self) -> int:
        """Number of stored steps."""
        return int(self._steps[self._tail] - self._steps[self._head])

    @property
    def first(self) -> int:
        """Number of the oldest stored step; if there is none, of the next step."""
        return int(self._steps[self._head])

    @property
    def end(self) -> int:
        """Number that the next step will have."""
        return int(self._steps[self._tail])

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens."""
        return int(self._tokens[self._tail] - self._tokens[self._head])

    @property
    def next(self) -> int:
        """Ordinal that the next episode will have."""
        return self.oldest + self.num_episodes

    @property
    def lengths(self) -> Tensor:
        """int64 ``[E]``: steps of each episode, oldest first (a view)."""
        return torch.from_numpy(self._length[self._head : self._tail])

    @property
    def starts(self) -> Tensor:
        """int64 ``[E]``: first ring row of each episode, oldest first (a view)."""
        return torch.from_numpy(self._start[self._head : self._tail])

    @property
    def tokens(self) -> Tensor:
        """int64 ``[E]``: tokens of each episode, oldest first."""
        return torch.from_numpy(np.diff(self._tokens[self._head : self._tail + 1]))

    @property
    def metadata(self) -> dict[int, dict[Any, Any]]:
        """Copies of the metadata by ordinal, of the episodes that have some."""
        return deepcopy(self._metadata)

    def metadata_of(self, episode: int) -> dict[Any, Any]:
        """Return a copy of the metadata of the episode at a position (0 is the oldest)."""
        return deepcopy(self._metadata.get(self.oldest + episode, {}))

    def places(
        self, episodes: np.ndarray, offsets: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers and ring rows of steps.

        Args:
            episodes: int64 ``[n]``, positions of their episodes (0 is the oldest).
            offsets: int64 ``[n]``, offsets in their episodes; or one number for all.

        Returns:
            Two int64 ``[n]``.
        """
        of = episodes + self._head
        return self._steps[of] + offsets, self._start[of] + offsets

    def extend(
        self,
        lengths: Tensor,
        starts: Sequence[int],
        tokens: Tensor,
        metadata: Sequence[Mapping[Any, Any]] = (),
    ) -> None:
        """Add the newest episodes.

        Args:
            lengths: int64 ``[n]``, steps of each.
            starts: ``n``, first ring row of each.
            tokens: int64 ``[n]``, tokens of each.
            metadata: ``n``, metadata of each, of which copies are kept; or nothing.
        """
        steps = lengths.numpy()
        tail = self._tail + len(steps)
        if tail > len(self._length):
            self._compact(len(steps))
            tail = self._tail + len(steps)
        new = slice(self._tail, tail)
        self._length[new] = steps
        self._start[new] = starts
        self._accumulate(self._steps, new, steps)
        self._accumulate(self._tokens, new, tokens.numpy())
        for choice, counts in self._counts.items():
            self._accumulate(counts, new, choice.units(steps))
        for ordinal, given in enumerate(metadata, self.next):
            if given:
                self._metadata[ordinal] = deepcopy(dict(given))
        self._tail = tail

    def recount(self, tokens: Tensor) -> None:
        """Replace the tokens of each stored episode: int64 ``[E]``."""
        self._accumulate(self._tokens, slice(self._head, self._tail), tokens.numpy())

    def pass_over(self, episodes: int, steps: int) -> None:
        """Skip the ordinals of episodes that were evicted at once, and the numbers of their steps.

        Call it while nothing is stored.
        """
        self.oldest += episodes
        self._steps[self._head] += steps

    def restore_metadata(self, metadata: Mapping[int, Mapping[Any, Any]]) -> None:
        """Give the stored episodes copies of their metadata by ordinal; that of others is left out."""
        stored = range(self.oldest, self.next)
        self._metadata = {i: deepcopy(dict(given)) for i, given in metadata.items() if i in stored}

    def renumber(self, oldest: int, first: int, renumbered: int) -> None:
        """Number the stored episodes from ``oldest`` on and their steps from ``first`` on."""
        self.oldest, self.renumbered = oldest, renumbered
        self._steps[self._head : self._tail + 1] += first - self._steps[self._head]

    def number_from(self, least: int) -> None:
        """Raise the numbers of the stored steps so that they begin at ``least`` or above."""
        more = least - self.first
        if more > 0:
            self.renumber(self.oldest, least, self.renumbered + more)

    def evict(self, episodes: int) -> None:
        """Remove the oldest ``episodes``."""
        if self._metadata:
            for ordinal in range(self.oldest, self.oldest + episodes):
                self._metadata.pop(ordinal, None)
        self._head += episodes
        self.oldest += episodes
        if self._head == self._tail:
            self._steps[0] = self._steps[self._tail]
            self._head = self._tail = 0

    def episodes_holding(self, steps: int, tokens: int = 0) -> int:
        """Return how many of the oldest episodes hold at least so many steps and tokens."""
        return max(self._holding(self._steps, steps), self._holding(self._tokens, tokens))

    def find(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the episode of each step.

        Args:
            steps: int64 ``[n]``, positions by age: 0 is the oldest stored step.

        Returns:
            int64 ``[n]``, positions of the episodes (0 is the oldest), and int64 ``[n]``, offsets in
            the episodes.
        """
        return search(self._steps[self._head : self._tail + 1], steps)

    def before(self, choice: Choice) -> np.ndarray:
        """Return cumulative units, up to a constant: int64 ``[E + 1]`` (a view).

        They count the units before each episode and after the last.
        """
        counts = self._counts.get(choice)
        if counts is None:
            counts = np.zeros_like(self._steps)
            stored = slice(self._head, self._tail)
            self._accumulate(counts, stored, choice.units(self._length[stored]))
            self._counts[choice] = counts
            if len(self._counts) > _MAX_CHOICES:
                self._counts.popitem(last=False)
        self._counts.move_to_end(choice)
        return counts[self._head : self._tail + 1]

    def total(self, choice: Choice) -> int:
        """Count the units of all stored episodes."""
        before = self.before(choice)
        return int(before[-1] - before[0])

    def move(self, moves: Moves) -> None:
        """Move the first rows as the ring moved them."""
        self.starts.copy_(moves.positions(self.starts))

    def _holding(self, counts: np.ndarray, wanted: int) -> int:
        """Return how many of the oldest episodes hold at least ``wanted`` by cumulative ``counts``."""
        if wanted <= 0:
            return 0
        before = counts[self._head : self._tail + 1]
        return int(before.searchsorted(before[0] + wanted))

    @staticmethod
    def _accumulate(counts: np.ndarray, new: slice, units: np.ndarray) -> None:
        """Continue cumulative counts for the episodes at ``new``."""
        counts[new.start + 1 : new.stop + 1] = counts[new.start] + units.cumsum()

    def _compact(self, more: int) -> None:
        """Make room for ``more`` episodes, and move the live part to the front."""
        live, head = self.num_episodes, self._head
        size = self._length.shape[0]
        while size < 2 * live + more:
            size *= 2

        def moved(old: np.ndarray, extra: int) -> np.ndarray:
            new = np.zeros(size + extra, dtype=np.int64)
            new[: live + extra] = old[head : head + live + extra]
            return new

        self._length, self._start = moved(self._length, 0), moved(self._start, 0)
        self._steps, self._tokens = moved(self._steps, 1), moved(self._tokens, 1)
        for choice, counts in self._counts.items():
            self._counts[choice] = moved(counts, 1)
        self._head, self._tail = 0, live
