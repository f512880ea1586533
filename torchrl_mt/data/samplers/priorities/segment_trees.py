"""Sums and minima of many numbers, whichever of them change.

A change or a draw costs the logarithm of how many there are. Every node is computed from its children
as they are, so nothing drifts. TorchRL's trees are in a compiled extension that loads with one release
of torch alone; these are arrays.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["MinTree", "SumTree"]

_CHILDREN, _AT_ROOT = 16, 4096
"""Most of a node, and of the root, which is gone over once for all draws."""


class _Tree:
    """One number made of all leaves.

    Args:
        leaves: ``[n]`` floating point, at least one; they are copied.
    """

    _empty: ClassVar[float]
    """What leaves nothing else as it is."""

    def __init__(self, leaves: Tensor) -> None:
        # Arrays, not tensors: what changes at a time is small, and torch takes longer to begin.
        self._levels: list[np.ndarray] = []
        """Leaves, and what is made of each run of them; the last level is the root's children."""
        values = leaves.numpy()
        while len(values) > _AT_ROOT:
            level = np.full((-(-len(values) // _CHILDREN), _CHILDREN), self._empty, values.dtype)
            level.reshape(-1)[: len(values)] = values
            self._levels.append(level)
            values = self._reduce(level)
        self._levels.append(values.copy())

    @staticmethod
    def _reduce(children: np.ndarray) -> np.ndarray:
        """One number of the children of each node."""
        raise NotImplementedError

    @property
    def root(self) -> float:
        """The number made of all leaves."""
        return float(self._reduce(self._levels[-1]))

    def __getitem__(self, index: Tensor) -> Tensor:
        """Leaves at int64 ``[n]``."""
        return torch.from_numpy(self._levels[0].reshape(-1).take(index.numpy()))

    def __setitem__(self, index: Tensor, values: Tensor | np.ndarray | float) -> None:
        """Set leaves at int64 ``[n]``, all different."""
        at = index.numpy()
        self._levels[0].reshape(-1)[at] = values.numpy() if isinstance(values, Tensor) else values
        for children, parents in zip(self._levels, self._levels[1:], strict=False):
            at = at // _CHILDREN
            parents.reshape(-1)[at] = self._reduce(children.take(at, 0))


class MinTree(_Tree):
    """The least of all leaves.

    Examples:
        >>> tree = MinTree(torch.tensor([3.0, 2.0, 5.0]))
        >>> tree[torch.tensor([1])] = 4.0
        >>> tree.root
        3.0
    """

    _empty = float("inf")

    @staticmethod
    def _reduce(children: np.ndarray) -> np.ndarray:
        # NumPy takes minima of long rows much faster than of many short ones.
        return np.ascontiguousarray(children.T).min(0)


class SumTree(_Tree):
    """The sum of all leaves, none of them negative, and where it passes a number.

    Examples:
        >>> tree = SumTree(torch.tensor([1.0, 0.0, 2.0]))
        >>> tree.root
        3.0
        >>> tree.find(torch.tensor([0.5, 1.0, 1.5, 3.0]))
        tensor([0, 0, 2, 2])
    """

    _empty = 0.0

    @staticmethod
    def _reduce(children: np.ndarray) -> np.ndarray:
        return children.sum(-1)

    def find(self, mass: Tensor) -> Tensor:
        """The first leaf with which the sum from the beginning reaches a number.

        Args:
            mass: ``[n]``, positive and at most the sum of all. As sums are rounded, what is found may
                be a leaf of zero, or one behind the last, beside where the sum does.

        Returns:
            int64 ``[n]``.
        """
        rest = mass.numpy()
        sums = self._levels[-1].cumsum()
        found = np.minimum(sums.searchsorted(rest), len(sums) - 1)
        rest = rest - np.where(found > 0, sums[found - 1], 0)
        for level in reversed(self._levels[:-1]):
            nodes = np.minimum(found, len(level) - 1)
            sums = np.ascontiguousarray(level.take(nodes, 0).T).cumsum(0)
            child = np.minimum((sums < rest).sum(0), _CHILDREN - 1)
            before = sums[np.maximum(child - 1, 0), np.arange(len(rest))]
            rest = rest - np.where(child > 0, before, 0)
            found = nodes * _CHILDREN + child
        return torch.from_numpy(found)
