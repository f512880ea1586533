"""Strides: ``K`` consecutive stored steps are read as one step.

The result is a step of an environment with ``K``-fold frame skip: it starts at the first of the ``K``
steps and ends at the last, with the reward and done flags of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_mt.data._store.columns.columns import StoredColumn
from torchrl_mt.data._store.columns.rows import RowPlan
from torchrl_mt.data._store.steps import Column, Path, name_of

__all__ = ["StridePlan", "check_strides", "is_joined", "join"]

_FLAGS = ("done", "terminated", "truncated")


def check_strides(entries: Mapping[Path, Any]) -> None:
    """Refuse an action, reward or done flag that is no tensor of one shape (``ValueError``)."""
    for path, entry in entries.items():
        if is_joined(path) and entry.kind != "dense":
            raise ValueError(
                f"stride joins {name_of(path)} over several steps and needs a tensor of one shape "
                f"per step, got a {entry.kind} entry: use stride=1, or store it otherwise."
            )


class StridePlan:
    """A read in which every step stands for ``stride`` stored steps.

    ``action`` is the concatenation of their actions: ``[K * A]`` for ``[A]``, ``[K]`` for a scalar.
    Under ``"next"``, ``reward`` is their sum (integers as int64), and ``done``, ``terminated`` and
    ``truncated`` are OR-ed. Other entries under ``"next"`` are those of the last step, all others
    those of the first.

    Args:
        firsts: int64 ``[N]`` on the CPU, ring row of the first of each ``stride`` steps.
        stride: stored steps per step.
    """

    def __init__(self, firsts: Tensor, stride: int) -> None:
        self.stride = stride
        self._first = RowPlan(firsts)
        self._last = RowPlan(firsts + (stride - 1))
        self._all = RowPlan(firsts, stride)

    def __len__(self) -> int:
        return len(self._first)

    def read(self, path: Path, column: StoredColumn) -> Column:
        """Read the entry ``path``, which ``column`` stores."""
        if not is_joined(path):
            return column.read(self._last if path[0] == "next" else self._first)
        values = column.read(self._all)
        assert isinstance(values, Tensor)
        return join(path, values, self.stride)


def join(path: Path, values: Tensor, stride: int) -> Tensor:
    """Combine an entry over each ``stride`` steps: ``[N * stride, *shape]`` to ``[N, ...]``."""
    number, shape = len(values) // stride, values.shape[1:]
    if path[-1] == "action":
        return values.reshape(number, stride * (shape[0] if shape else 1), *shape[1:])
    values = values.view(number, stride, *shape)
    if path[-1] == "reward":
        return torch.sum(values, 1)
    return torch.any(values, 1).to(values.dtype)


def is_joined(path: Path) -> bool:
    """Whether the entry combines all ``K`` steps."""
    if path[0] == "next":
        return path[-1] == "reward" or path[-1] in _FLAGS
    return path[-1] == "action"
