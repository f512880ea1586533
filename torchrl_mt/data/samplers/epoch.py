"""Epochs: every stored episode is given out at most once, in random order.

Episodes that are written during an epoch belong to it; evicted ones do not. The cost per draw does
not grow with the number of episodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchrl_mt.data.samplers.draws import draw_uniform

__all__ = ["Epoch"]


class Epoch:
    """The stored episodes, by ordinal, that an epoch has not given out yet.

    Args:
        max_sample_count: number of epochs in which an episode is given out; None for all.

    Examples:
        >>> epoch = Epoch()
        >>> epoch.follow(oldest=3, following=5)
        >>> sorted(epoch.draw(9, None).tolist()), len(epoch)
        ([3, 4], 0)
        >>> epoch.follow(oldest=4, following=6)
        >>> epoch.draw(9, None)
        tensor([5])
    """

    def __init__(self, max_sample_count: int | None = None) -> None:
        self.max_sample_count = max_sample_count
        self.given: set[int] = set()
        """Stored episodes that were given out in this epoch or may not be any more."""
        self._counts: dict[int, int] = {}
        """Earlier epochs in which each stored episode was given out, if ``max_sample_count``."""
        self._pool: list[int] = []
        """Every episode that is left, and some that were given out or evicted."""
        self._oldest = 0
        self._following = 0

    def __len__(self) -> int:
        """Number of episodes that are left."""
        return self._following - self._oldest - len(self.given)

    def follow(self, oldest: int, following: int) -> None:
        """Update to what is stored: the ordinals from ``oldest`` to before ``following``."""
        if oldest < self._oldest or following < self._following:
            # The storage was restored to an older state and reuses later ordinals.
            self.given = {episode for episode in self.given if oldest <= episode < following}
            self._counts = {e: n for e, n in self._counts.items() if oldest <= e < following}
            self._pool = list(range(oldest, following))
        else:
            if self.given:
                self.given.difference_update(range(self._oldest, oldest))
            if self._counts:
                for episode in range(self._oldest, oldest):
                    self._counts.pop(episode, None)
            self._pool.extend(range(max(self._following, oldest), following))
        self._oldest, self._following = oldest, following
        if len(self._pool) > 2 * len(self) + 64:
            self._pool = [episode for episode in self._pool if self._is_left(episode)]

    def restart(self) -> None:
        """Begin another epoch with all stored episodes except spent ones."""
        spent = self.spent
        if self.max_sample_count is not None:
            for episode in self.given:
                count = self._counts.get(episode, 0) + 1
                self._counts[episode] = min(count, self.max_sample_count)
        self.given = spent
        self._pool = list(range(self._oldest, self._following))

    @property
    def spent(self) -> set[int]:
        """Stored episodes that no later epoch gives out."""
        if self.max_sample_count is None:
            return set()
        last = self.max_sample_count - 1
        return {episode for episode in self.given if self._counts.get(episode, 0) >= last}

    def draw(self, number: int, generator: torch.Generator | None) -> Tensor:
        """Give out ``number`` random episodes, or all that are left: int64 ``[n]``."""
        number = min(number, len(self))
        drawn: list[int] = []
        while len(drawn) < number:
            for place in draw_uniform(number - len(drawn), generator).tolist():
                at = min(int(place * len(self._pool)), len(self._pool) - 1)
                episode, self._pool[at] = self._pool[at], self._pool[-1]
                self._pool.pop()
                if self._is_left(episode):
                    self.given.add(episode)
                    drawn.append(episode)
        return torch.tensor(drawn, dtype=torch.int64, device="cpu")

    def give(self, episodes: Iterable[int]) -> None:
        """Mark episodes as given out."""
        self.given.update(episodes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch."""
        return {
            "pool": list(self._pool),
            "given": set(self.given),
            "counts": dict(self._counts),
            "stored": (self._oldest, self._following),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._pool, self.given = list(state_dict["pool"]), set(state_dict["given"])
        self._counts = dict(state_dict["counts"])
        self._oldest, self._following = state_dict["stored"]

    def _is_left(self, episode: int) -> bool:
        return episode >= self._oldest and episode not in self.given
