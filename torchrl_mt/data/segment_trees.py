"""Sums and minima of many numbers, whichever of them change.

A change or a draw costs the logarithm of how many there are. Every node is computed from its children
as they are, so nothing drifts. TorchRL's trees are in a compiled extension that loads with one release
of torch alone; these are tensors.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["MinTree", "SumTree"]

_CHILDREN, _AT_ROOT = 64, 2048
"""Most of a node, and of the root, which is gone over once for all draws."""


class _Tree:
    """One number made of all leaves.

    Args:
        leaves: ``[n]`` floating point, at least one; they are copied.
    """

    _empty: ClassVar[float]
    """What leaves nothing else as it is."""

    def __init__(self, leaves: Tensor) -> None:
        self._levels: list[Tensor] = []
        """Leaves, and what is made of each run of them; the last level is the root's children."""
        while leaves.shape[0] > _AT_ROOT:
            nodes = -(-leaves.shape[0] // _CHILDREN)
            level = leaves.new_full((nodes, _CHILDREN), self._empty)
            level.view(-1)[: leaves.shape[0]] = leaves
            self._levels.append(level)
            leaves = self._reduce(level)
        self._levels.append(leaves.clone())

    @staticmethod
    def _reduce(children: Tensor) -> Tensor:
        """One number of the children of each node."""
        raise NotImplementedError

    @property
    def root(self) -> float:
        """The number made of all leaves."""
        return float(self._reduce(self._levels[-1]))

    def __getitem__(self, index: Tensor) -> Tensor:
        """Leaves at int64 ``[n]``."""
        return self._levels[0].view(-1)[index]

    def __setitem__(self, index: Tensor, values: Tensor | float) -> None:
        """Set leaves at int64 ``[n]``, all different."""
        self._levels[0].view(-1)[index] = values
        for children, parents in zip(self._levels, self._levels[1:], strict=False):
            index = index // _CHILDREN
            parents.view(-1)[index] = self._reduce(children[index])


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
    def _reduce(children: Tensor) -> Tensor:
        return children.amin(-1)


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
    def _reduce(children: Tensor) -> Tensor:
        return children.sum(-1)

    def find(self, mass: Tensor) -> Tensor:
        """The first leaf with which the sum from the beginning reaches a number.

        Args:
            mass: ``[n]``, positive and at most the sum of all. As sums are rounded, what is found may
                be a leaf of zero, or one behind the last, beside where the sum does.

        Returns:
            int64 ``[n]``.
        """
        found, mass = _pass(self._levels[-1], mass)
        for level in reversed(self._levels[:-1]):
            nodes = level.index_select(0, found.clamp_(max=level.shape[0] - 1))
            child, mass = _pass(nodes, mass[:, None])
            found, mass = found * _CHILDREN + child[:, 0], mass[:, 0]
        return found


def _pass(numbers: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Where sums from the beginning reach ``mass``, and what of it was not reached before."""
    sums = torch.nn.functional.pad(numbers.cumsum(-1), (1, 0))
    found = torch.searchsorted(sums, mass).sub_(1).clamp_(0, numbers.shape[-1] - 1)
    return found, mass - sums.gather(-1, found)
