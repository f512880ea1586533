"""Priorities of numbered steps, and draws in proportion to their weights.

Steps are numbered in the order in which they were written, and are evicted in that order. Only *open*
steps are drawn, with probability ``weight / sum of the open weights``. A write, a draw and an update
each cost the logarithm of the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data.samplers.draws import draw_uniform
from torchrl_mt.data.samplers.priorities.segment_trees import MinTree, SumTree

__all__ = ["PriorityRing"]


class PriorityRing:
    """Priorities and weights of the steps in a sliding window of numbers.

    Args:
        capacity: most steps in the window.
        dtype: dtype of priorities and weights, ``torch.float32`` or ``torch.float64``.
        knows_largest: whether :attr:`largest` is available.
        origin: number with slot 0. Draws depend on the slots, and a number keeps its slot.

    Examples:
        >>> ring = PriorityRing(4, torch.float32)
        >>> ring.admit(3, priority=1.0, weight=1.0)
        >>> ring.open(torch.tensor([0, 1]))
        >>> ring.set(torch.tensor([0]), torch.tensor([5.0]), torch.tensor([0.0]), torch.tensor([True]))
        >>> ring.draw(3, None)
        tensor([1, 1, 1])
    """

    @torch.inference_mode(False)
    def __init__(
        self, capacity: int, dtype: torch.dtype, *, knows_largest: bool = True, origin: int = 0
    ) -> None:
        self._knows_largest = knows_largest
        self._origin = origin
        self.capacity = capacity
        self.dtype = dtype
        self.first = 0
        """Number of the oldest step."""
        self.end = 0
        """One past the number of the newest step."""
        self.priority = torch.zeros(capacity, dtype=dtype, device="cpu")
        """``[capacity]``: priorities by slot."""
        self.weight = torch.zeros(capacity, dtype=dtype, device="cpu")
        """``[capacity]``: weights by slot, also of steps that are not open."""
        self._build(torch.zeros(0, dtype=torch.int64, device="cpu"))

    @property
    def least(self) -> float:
        """The least positive weight of an open step."""
        return self._least.root

    @property
    def largest(self) -> float | None:
        """The largest priority of an open step; None if none is open."""
        negated = self._negated.root
        return None if negated == math.inf else -negated

    def slots(self, numbers: Tensor) -> Tensor:
        """Return the slots of these numbers: int64 ``[n]``."""
        return torch.from_numpy((numbers.numpy() - self._origin) % self.capacity)

    def stored(self) -> tuple[int, Tensor, Tensor]:
        """Return the first number, and copies of all priorities and weights from it on."""
        slots = self.slots(torch.arange(self.first, self.end, device="cpu"))
        return self.first, self.priority[slots], self.weight[slots]

    def load(self, first: int, priority: Tensor, weight: Tensor) -> None:
        """Replace the window by the steps from number ``first`` on, none of them open."""
        self.first, self.end = first, first + priority.shape[0]
        slots = self.slots(torch.arange(self.first, self.end, device="cpu"))
        self.priority[slots] = priority
        self.weight[slots] = weight
        self._build(slots[:0])

    def release(self, first: int) -> None:
        """Remove the steps with numbers below ``first``."""
        if min(first, self.end) > self.first:
            left = torch.arange(self.first, min(first, self.end), device="cpu")
            self._enter(self.slots(left), 0.0, math.inf, math.inf)
        self.first, self.end = max(self.first, first), max(self.end, first)

    def admit(self, end: int, priority: float, weight: float) -> None:
        """Add the steps up to number ``end`` with one priority, none of them open."""
        slots = self.slots(torch.arange(self.end, end, device="cpu"))
        self.priority[slots] = priority
        self.weight[slots] = weight
        self.end = max(self.end, end)

    def open(self, numbers: Tensor) -> None:
        """Open these steps, so that they are drawn."""
        slots = self.slots(numbers)
        self._enter(slots, *self._leaves(self.weight[slots], self.priority[slots]))

    def open_only(self, numbers: Tensor) -> None:
        """Open these steps and close all others."""
        self._build(self.slots(numbers))

    def set(self, numbers: Tensor, priority: Tensor, weight: Tensor, is_open: Tensor) -> None:
        """Set priorities and weights of steps.

        Args:
            numbers: int64 ``[n]``, all different.
            priority: ``[n]``.
            weight: ``[n]``.
            is_open: bool ``[n]``, which of the steps are open.
        """
        slots = self.slots(numbers)
        self.priority.numpy()[slots.numpy()] = priority.numpy()
        self.weight.numpy()[slots.numpy()] = weight.numpy()
        self.open(numbers[is_open])

    def reweigh(self, weigh: Callable[[Tensor], Tensor]) -> None:
        """Recompute every weight from its priority; call :meth:`open_only` afterwards."""
        self.weight.copy_(weigh(self.priority))

    def draw(self, num: int, generator: torch.Generator | None) -> Tensor:
        """Draw ``num`` open steps in proportion to their weights, with replacement.

        Args:
            num: number of draws.
            generator: the random generator; None is torch's own.

        Returns:
            int64 ``[num]``, numbers of the steps.

        Raises:
            RuntimeError: if all weights are zero, or their sum is infinite.
        """
        total = self._sum.root
        if total <= 0:
            raise RuntimeError(
                "no clip can be drawn: all priorities are zero; use eps > 0, or update some."
            )
        if not math.isfinite(total):
            raise RuntimeError(
                f"(priority + eps) ** alpha adds up to more than {self.dtype} holds: scale the "
                f"priorities down, or use dtype=torch.float64."
            )
        slots = self._scan(num, total, generator)
        # Rounded sums can lead to a neighbouring leaf that cannot be drawn.
        while (missed := self._sum[slots].numpy() <= 0).any():
            slots[torch.from_numpy(missed)] = self._scan(int(missed.sum()), total, generator)
        since = (slots.numpy() + (self._origin - self.first)) % self.capacity
        return torch.from_numpy(self.first + since)

    def _scan(self, num: int, total: float, generator: torch.Generator | None) -> Tensor:
        """Draw slots at uniform positions of the cumulative weights."""
        mass = (1.0 - draw_uniform(num, generator).numpy()) * total
        return self._sum.find(torch.from_numpy(mass).to(self.dtype))

    def _leaves(self, weight: Tensor, priority: Tensor) -> list[np.ndarray]:
        """Return the leaves of each tree for open steps of these weights and priorities."""
        values = weight.numpy()
        leaves = [values, np.where(values > 0, values, math.inf)]
        return [*leaves, -priority.numpy()] if self._knows_largest else leaves

    def _enter(self, slots: Tensor, *leaves: Any) -> None:
        """Set the leaves of each tree."""
        for tree, values in zip(self._trees, leaves, strict=False):
            tree[slots] = values

    @torch.inference_mode(False)
    def _build(self, slots: Tensor) -> None:
        """Build the trees with these slots open."""

        def full(empty: float, values: np.ndarray) -> Tensor:
            leaves = torch.full((self.capacity,), empty, dtype=self.dtype, device="cpu")
            leaves[slots] = torch.from_numpy(values)
            return leaves

        weight, least, *negated = self._leaves(self.weight[slots], self.priority[slots])
        self._sum, self._least = SumTree(full(0.0, weight)), MinTree(full(math.inf, least))
        self._trees = [self._sum, self._least]
        if negated:
            self._negated = MinTree(full(math.inf, *negated))
            self._trees.append(self._negated)
