"""Segment trees: sums and minima of numbers that change.

A change or a search costs the logarithm of their number. Every node is computed from its current
children, so rounding errors do not add up. TorchRL's trees need its compiled extension, which loads
with one release of torch only.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["MinTree", "SumTree"]

_CHILDREN, _AT_ROOT = 16, 4096
"""Most children of a node and of the root, which a search scans once for all numbers."""


class _Tree:
    """A tree that reduces all leaves to one number.

    Args:
        leaves: ``[n]`` floating point, at least one; they are copied.
    """

    _empty: ClassVar[float]
    """Neutral element of the reduction."""

    def __init__(self, leaves: Tensor) -> None:
        # Arrays, not tensors: changes are small, and each torch call has more overhead.
        self._levels: list[np.ndarray] = []
        """Nodes of each level, from the leaves to the root's children."""
        values = leaves.numpy()
        while len(values) > _AT_ROOT:
            level = np.full((-(-len(values) // _CHILDREN), _CHILDREN), self._empty, values.dtype)
            level.reshape(-1)[: len(values)] = values
            self._levels.append(level)
            values = self._reduce(level)
        self._levels.append(values.copy())

    @staticmethod
    def _reduce(children: np.ndarray) -> np.ndarray:
        """Reduce the children of each node."""
        raise NotImplementedError

    @property
    def root(self) -> float:
        """The reduction of all leaves."""
        return float(self._reduce(self._levels[-1]))

    def __getitem__(self, index: Tensor) -> Tensor:
        """Read the leaves at int64 ``[n]``."""
        return torch.from_numpy(self._levels[0].reshape(-1).take(index.numpy()))

    def __setitem__(self, index: Tensor, values: Tensor | np.ndarray | float) -> None:
        """Set the leaves at int64 ``[n]``, all different."""
        at = index.numpy()
        self._levels[0].reshape(-1)[at] = values.numpy() if isinstance(values, Tensor) else values
        for children, parents in zip(self._levels, self._levels[1:], strict=False):
            at = at // _CHILDREN
            parents.reshape(-1)[at] = self._reduce(children.take(at, 0))


class MinTree(_Tree):
    """The minimum of all leaves.

    Examples:
        >>> tree = MinTree(torch.tensor([3.0, 2.0, 5.0]))
        >>> tree[torch.tensor([1])] = 4.0
        >>> tree.root
        3.0
    """

    _empty = float("inf")

    @staticmethod
    def _reduce(children: np.ndarray) -> np.ndarray:
        # NumPy takes minima of long rows much faster than of short ones.
        return np.ascontiguousarray(children.T).min(0)


class SumTree(_Tree):
    """The sum of all leaves, of which none is negative.

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
        """Find the first leaf at which the cumulative sum reaches each number.

        As sums are rounded, the result may be a neighbour: a leaf of zero, or one past the last.

        Args:
            mass: ``[n]``, positive and at most the sum of all leaves.

        Returns:
            int64 ``[n]``, positions of the leaves.
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
