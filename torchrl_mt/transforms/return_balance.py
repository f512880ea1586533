"""Number of stored steps with low returns, and the running mean of episodes' outcomes.

The counts always match the stored steps. An update takes time in proportion to the steps written since
the last one, not to the steps stored.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_mt.data._store.table import EpisodeTable
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["ReturnBalance"]


class ReturnBalance:
    """Counts stored steps with a return below a threshold, and averages the episodes' outcomes.

    Call :meth:`update` after writing. The counts are then exact, whatever was written, evicted, emptied
    or loaded since the last call. The outcome averages every episode once, in the order of storing; an
    episode that was written and evicted between two calls is missed.

    Args:
        threshold: returns below it count as low.
        in_key: key of the return, one number per step, as
            :class:`~torchrl_mt.transforms.DiscountedReturn` writes it.
        reward_key: key of the reward; an episode's outcome is the reward of its last step.
        decay: weight of the past in the running mean of outcomes, in ``[0, 1)``.

    Raises:
        ValueError: if ``threshold`` is NaN or ``decay`` is out of range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_mt.data import EpisodeStorage, EpisodeWriter
        >>> from torchrl_mt.transforms import DiscountedReturn, ReturnBalance
        >>> writer = EpisodeWriter(transform=DiscountedReturn(gamma=0.5))
        >>> rb = ReplayBuffer(storage=EpisodeStorage(100), writer=writer)
        >>> done = torch.tensor([[False], [False], [True]])
        >>> reward = torch.tensor([[0.0], [0.0], [1.0]])
        >>> _ = rb.extend(TensorDict({"next": {"reward": reward, "done": done}}, [3]))
        >>> balance = ReturnBalance(threshold=0.5)
        >>> balance.update(rb.storage)
        >>> balance.below, balance.at_or_above, balance.outcome
        (1, 2, 1.0)
    """

    def __init__(
        self,
        threshold: float,
        *,
        in_key: NestedKey = ("next", "return"),
        reward_key: NestedKey = ("next", "reward"),
        decay: float = 0.99,
    ) -> None:
        if math.isnan(threshold):
            raise ValueError(f"threshold must be a number, got {threshold}.")
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay}.")
        self.threshold = threshold
        self.in_key = in_key
        self.reward_key = reward_key
        self.decay = decay
        self.below = 0
        """Number of stored steps whose return is below the threshold."""
        self.at_or_above = 0
        """Number of stored steps whose return is at or above the threshold (NaN is neither)."""
        self.outcome: float | None = None
        """Exponential mean of the episodes' last rewards, starting with the first; None before."""
        self._averaged = 0
        """Ordinal of the first episode that is not yet in the outcome."""
        self._table: EpisodeTable | None = None
        """The storage's table at the last update."""
        self._oldest = 0
        """Ordinal of the oldest counted episode."""
        self._counts: deque[tuple[int, int]] = deque()
        """Steps below, and at or above, of each counted episode, oldest first."""

    def update(self, storage: EpisodeStorage) -> None:
        """Count what was written to the storage and evicted from it since the last call.

        Args:
            storage: the same :class:`~torchrl_mt.data.EpisodeStorage` each time.

        Raises:
            TypeError: if it is another kind of storage.
            KeyError: if the return or the reward is not stored.
            ValueError: if one of them is not one number per step.
        """
        if not isinstance(storage, EpisodeStorage):
            raise TypeError(
                f"storage must be an EpisodeStorage, got {type(storage).__name__}: pass rb.storage."
            )
        with storage.lock:
            table, counted = storage.table, len(self._counts)
            if table is self._table:
                evicted = min(table.oldest - self._oldest, counted)
                first = max(table.oldest, self._oldest + counted)
            else:  # The storage loaded a state, which may reuse ordinals.
                evicted, first = counted, table.oldest
            new, rewards = self._read(storage, first)
        for _ in range(evicted):
            below, above = self._counts.popleft()
            self.below -= below
            self.at_or_above -= above
        for below, above in new:
            self._counts.append((below, above))
            self.below += below
            self.at_or_above += above
        for reward in rewards[max(self._averaged - first, 0) :]:
            past = reward if self.outcome is None else self.outcome
            self.outcome = self.decay * past + (1 - self.decay) * reward
        self._averaged = first + len(new)
        self._oldest, self._table = self._averaged - len(self._counts), table

    def _read(
        self, storage: EpisodeStorage, first: int
    ) -> tuple[list[tuple[int, int]], list[float]]:
        """Counts and last reward of each stored episode from ordinal ``first`` on."""
        table = storage.table
        new = torch.arange(first - table.oldest, table.num_episodes, device="cpu")
        if not len(new):
            return [], []
        lengths = table.lengths[new]
        returns, rewards = (
            self._numbers(storage, key, int(lengths.sum()))
            for key in (self.in_key, self.reward_key)
        )
        episode = torch.arange(len(new), device="cpu").repeat_interleave(lengths)
        low, high = (
            torch.zeros_like(lengths).index_add_(0, episode, mask.long()).tolist()
            for mask in (returns < self.threshold, returns >= self.threshold)
        )
        return list(zip(low, high, strict=True)), rewards[lengths.cumsum(0) - 1].tolist()

    def _numbers(self, storage: EpisodeStorage, key: NestedKey, steps: int) -> Tensor:
        """One number for each of the newest ``steps``, ``[steps]`` on the CPU."""
        if storage.entry(key) is None:
            raise KeyError(
                f"{key!r} is not stored: give in_key and reward_key, and have returns computed with "
                f"EpisodeWriter(transform=DiscountedReturn(gamma))."
            )
        column = storage.values(key, slice(-steps, None))
        if not isinstance(column, Tensor) or column.numel() != steps:
            got = tuple(column.shape[1:]) if isinstance(column, Tensor) else "no dense tensor"
            raise ValueError(f"{key!r} must hold one number per step, got {got}.")
        return column.reshape(-1).cpu()

    def state_dict(self) -> dict[str, Any]:
        """The running outcome; steps are counted again after loading."""
        return {"outcome": self.outcome, "averaged": self._averaged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the outcome; load the storage's state of the same time, too."""
        self.outcome = state_dict["outcome"]
        self._averaged = state_dict["averaged"]
        self._table = None

    def __repr__(self) -> str:
        return (
            f"ReturnBalance(threshold={self.threshold}, below={self.below}, "
            f"at_or_above={self.at_or_above}, outcome={self.outcome})"
        )
