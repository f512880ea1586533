"""The episode table: which episodes are stored, how long they are and where they begin.

First in, first out. Appending and evicting cost amortised O(1), finding the episode of a step or
of a clip O(log E): no cost grows with the number of stored steps.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor

from torchrl_mt.data.ring import Moves

__all__ = ["EpisodeTable", "Weight", "weigh"]

Weight = Literal["clips", "clips_or_whole", "episodes"]
"""What is counted per episode; see :func:`weigh`."""

_MAX_TALLIES = 8


def weigh(lengths: Tensor, span: int, weight: Weight) -> Tensor:
    """How many units of choice an episode of each length offers.

    Args:
        lengths: int64 ``[E]``, in steps.
        span: steps per clip.
        weight: ``"clips"`` counts the clips of ``span`` steps, ``"clips_or_whole"`` counts an
            episode shorter than ``span`` as one clip, ``"episodes"`` counts 1 for each episode
            that holds a clip.

    Returns:
        int64 ``[E]``.

    Examples:
        >>> weigh(torch.tensor([2, 3, 5]), 3, "clips")
        tensor([0, 1, 3])
    """
    clips = lengths - span + 1
    if weight == "clips":
        return clips.clamp_min(0)
    if weight == "clips_or_whole":
        return clips.clamp_min(1)
    return (clips > 0).long()


class EpisodeTable:
    """Length and first row of every stored episode, oldest first.

    Episodes have *ordinals*: 0 for the first ever stored, and never used again. Cumulative counts
    are kept since the first episode and never reset, so that evicting changes none of them.
    """

    def __init__(self) -> None:
        self.oldest = 0
        """Ordinal of the oldest stored episode."""
        self._head = 0
        self._tail = 0
        self._length = torch.zeros(64, dtype=torch.int64)
        self._start = torch.zeros(64, dtype=torch.int64)
        self._steps = torch.zeros(64, dtype=torch.int64)
        self._tallies: OrderedDict[tuple[Weight, int], Tensor] = OrderedDict()

    @property
    def num_episodes(self) -> int:
        """Number of stored episodes."""
        return self._tail - self._head

    @property
    def num_steps(self) -> int:
        """Number of stored steps."""
        if not self.num_episodes:
            return 0
        return int(self._steps[self._tail - 1]) - self.steps_left

    @property
    def next(self) -> int:
        """Ordinal that the next episode will have."""
        return self.oldest + self.num_episodes

    @property
    def steps_left(self) -> int:
        """Number of steps that were stored once and left."""
        if not self.num_episodes:
            return 0
        return int(self._steps[self._head] - self._length[self._head])

    @property
    def lengths(self) -> Tensor:
        """int64 ``[E]``: steps of each episode, oldest first (a view)."""
        return self._length[self._head : self._tail]

    @property
    def starts(self) -> Tensor:
        """int64 ``[E]``: first ring row of each episode, oldest first (a view)."""
        return self._start[self._head : self._tail]

    def first_steps(self) -> Tensor:
        """int64 ``[E]``: storage index of each episode's first step."""
        ends = self._steps[self._head : self._tail]
        return ends - self.lengths - self.steps_left

    def append(self, length: int, start: int) -> None:
        """Add the newest episode: ``length`` steps, first row ``start``."""
        if self._tail == len(self._length):
            self._compact()
        tail = self._tail
        before = int(self._steps[tail - 1]) if self.num_episodes else 0
        self._length[tail] = length
        self._start[tail] = start
        self._steps[tail] = before + length
        for (weight, span), tally in self._tallies.items():
            so_far = int(tally[tail - 1]) if self.num_episodes else 0
            tally[tail] = so_far + weigh(self._length[tail : tail + 1], span, weight)[0]
        self._tail += 1

    def evict(self, episodes: int) -> None:
        """Remove the oldest ``episodes``."""
        self._head += episodes
        self.oldest += episodes
        if self._head == self._tail:
            self._head = self._tail = 0

    def clear(self) -> None:
        """Remove every episode; ordinals go on."""
        self.evict(self.num_episodes)

    def episodes_holding(self, steps: int) -> int:
        """The least number of oldest episodes that together hold at least ``steps`` steps."""
        if steps <= 0:
            return 0
        ends = self._steps[self._head : self._tail]
        return int(torch.searchsorted(ends, self.steps_left + steps)) + 1

    def find(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """The episode of each stored step.

        Args:
            steps: int64 ``[N]`` storage indices: 0 is the oldest stored step.

        Returns:
            int64 ``[N]`` positions of the episodes (0 is the oldest) and int64 ``[N]`` offsets in
            the episodes.
        """
        ends = self._steps[self._head : self._tail]
        steps = steps + self.steps_left
        episodes = torch.searchsorted(ends, steps, right=True)
        return episodes, steps - ends[episodes] + self.lengths[episodes]

    def total(self, weight: Weight, span: int) -> int:
        """Units of choice that the stored episodes offer together (see :func:`weigh`)."""
        if not self.num_episodes:
            return 0
        tally = self._tally(weight, span)
        return int(tally[self._tail - 1]) - self._tally_left(tally, weight, span)

    def locate(self, units: Tensor, weight: Weight, span: int) -> tuple[Tensor, Tensor]:
        """The episode of each unit of choice.

        Args:
            units: int64 ``[N]`` in ``[0, total(weight, span))``.
            weight: what a unit is (see :func:`weigh`).
            span: steps per clip.

        Returns:
            int64 ``[N]`` positions of the episodes and int64 ``[N]`` units within the episodes.
        """
        tally = self._tally(weight, span)
        ends = tally[self._head : self._tail]
        units = units + self._tally_left(tally, weight, span)
        episodes = torch.searchsorted(ends, units, right=True)
        return episodes, units - ends[episodes] + weigh(self.lengths[episodes], span, weight)

    def move(self, moves: Moves) -> None:
        """Follow the rows to where the ring has moved them."""
        self.starts.copy_(moves.positions(self.starts))

    def state_dict(self) -> dict[str, object]:
        """The lengths, oldest first, and the oldest ordinal."""
        return {"lengths": self.lengths.clone(), "oldest": self.oldest}

    def _tally(self, weight: Weight, span: int) -> Tensor:
        """Cumulative units per episode, kept for the spans last asked for."""
        key = (weight, span)
        tally = self._tallies.get(key)
        if tally is None:
            tally = torch.zeros_like(self._length)
            tally[self._head : self._tail] = weigh(self.lengths, span, weight).cumsum(0)
            self._tallies[key] = tally
            if len(self._tallies) > _MAX_TALLIES:
                self._tallies.popitem(last=False)
        self._tallies.move_to_end(key)
        return tally

    def _tally_left(self, tally: Tensor, weight: Weight, span: int) -> int:
        """Units of the episodes that left."""
        first = weigh(self._length[self._head : self._head + 1], span, weight)
        return int(tally[self._head] - first[0])

    def _compact(self) -> None:
        """Make room at the end: move the live part to the front, in twice the room if needed."""
        live = self.num_episodes
        size = len(self._length) * (2 if 2 * live > len(self._length) else 1)

        def moved(old: Tensor) -> Tensor:
            new = torch.zeros(size, dtype=torch.int64)
            new[:live] = old[self._head : self._tail]
            return new

        self._length, self._start, self._steps = map(
            moved, (self._length, self._start, self._steps)
        )
        for key, tally in self._tallies.items():
            self._tallies[key] = moved(tally)
        self._head, self._tail = 0, live
