"""Priorities of numbered steps, and draws in proportion to their weights.

Steps are numbered in the order in which they came, and leave in that order. Only steps that were
opened are drawn, with probability ``weight / sum of the open weights``; a write, a draw and an
update cost the logarithm of the capacity each.
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
    """Priority and weight of every step of a window of numbers; a number's slot never changes.

    Args:
        capacity: most steps that the window holds.
        dtype: of priorities and weights, ``torch.float32`` or ``torch.float64``.
        knows_largest: whether :attr:`largest` is asked for.
        origin: the number that is kept in slot 0; draws depend on which slot a number has.

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
        """By slot: priorities as given."""
        self.weight = torch.zeros(capacity, dtype=dtype, device="cpu")
        """By slot: weights, of open steps and others."""
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
        """Where the steps of these numbers are kept: int64 ``[n]``."""
        return torch.from_numpy((numbers.numpy() - self._origin) % self.capacity)

    def stored(self) -> tuple[int, Tensor, Tensor]:
        """The first number, and copies of priorities and weights from there on."""
        slots = self.slots(torch.arange(self.first, self.end, device="cpu"))
        return self.first, self.priority[slots], self.weight[slots]

    def load(self, first: int, priority: Tensor, weight: Tensor) -> None:
        """Hold the steps from number ``first`` on, none of them open."""
        self.first, self.end = first, first + priority.shape[0]
        slots = self.slots(torch.arange(self.first, self.end, device="cpu"))
        self.priority[slots] = priority
        self.weight[slots] = weight
        self._build(slots[:0])

    def release(self, first: int) -> None:
        """Forget the steps whose number is below ``first``."""
        if min(first, self.end) > self.first:
            left = torch.arange(self.first, min(first, self.end), device="cpu")
            self._enter(self.slots(left), 0.0, math.inf, math.inf)
        self.first, self.end = max(self.first, first), max(self.end, first)

    def admit(self, end: int, priority: float, weight: float) -> None:
        """Take in the steps up to number ``end``, of one priority, none of them open."""
        slots = self.slots(torch.arange(self.end, end, device="cpu"))
        self.priority[slots] = priority
        self.weight[slots] = weight
        self.end = max(self.end, end)

    def open(self, numbers: Tensor) -> None:
        """Let these steps be drawn."""
        slots = self.slots(numbers)
        self._enter(slots, *self._leaves(self.weight[slots], self.priority[slots]))

    def open_only(self, numbers: Tensor) -> None:
        """Let these steps be drawn, and no others."""
        self._build(self.slots(numbers))

    def set(
        self, numbers: Tensor, priority: Tensor, weight: Tensor, is_open: Tensor | None = None
    ) -> None:
        """Give steps of the window new priorities.

        Args:
            numbers: int64 ``[n]``, all different.
            priority: ``[n]``.
            weight: ``[n]``.
            is_open: bool ``[n]``, which of them are open; None for all.
        """
        slots = self.slots(numbers)
        self.priority.numpy()[slots.numpy()] = priority.numpy()
        self.weight.numpy()[slots.numpy()] = weight.numpy()
        if is_open is None:
            self._enter(slots, *self._leaves(weight, priority))
        else:
            self.open(numbers[is_open])

    def reweigh(self, weigh: Callable[[Tensor], Tensor]) -> None:
        """Compute every weight anew from its priority; ``open_only`` then makes it count."""
        self.weight.copy_(weigh(self.priority))

    def draw(self, num: int, generator: torch.Generator | None) -> Tensor:
        """Numbers of open steps, each in proportion to its weight.

        Args:
            num: how many.
            generator: where randomness comes from; None is torch's own.

        Returns:
            int64 ``[num]``.
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
        # A sum of rounded numbers can end next to a leaf: on one that cannot be drawn.
        while (missed := self._sum[slots].numpy() <= 0).any():
            slots[torch.from_numpy(missed)] = self._scan(int(missed.sum()), total, generator)
        since = (slots.numpy() + (self._origin - self.first)) % self.capacity
        return torch.from_numpy(self.first + since)

    def _scan(self, num: int, total: float, generator: torch.Generator | None) -> Tensor:
        """Slots at random places of the cumulative weights."""
        mass = (1.0 - draw_uniform(num, generator).numpy()) * total
        return self._sum.find(torch.from_numpy(mass).to(self.dtype))

    def _leaves(self, weight: Tensor, priority: Tensor) -> list[np.ndarray]:
        """What the trees hold for open steps of such weights and priorities."""
        values = weight.numpy()
        leaves = [values, np.where(values > 0, values, math.inf)]
        return [*leaves, -priority.numpy()] if self._knows_largest else leaves

    def _enter(self, slots: Tensor, *leaves: Any) -> None:
        """Set leaves of the trees."""
        for tree, values in zip(self._trees, leaves, strict=False):
            tree[slots] = values

    @torch.inference_mode(False)
    def _build(self, slots: Tensor) -> None:
        """Make trees in which these slots are open."""

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
