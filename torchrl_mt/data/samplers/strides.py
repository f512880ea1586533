"""Strides: ``K`` consecutive stored steps are read as one step.

The result is a step of an environment with ``K``-fold frame skip: it starts at the first of the ``K``
steps and ends at the last, with the reward and done flags of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.data._store.columns.columns import StoredColumn
from torchrl_mt.data._store.columns.rows import RowPlan
from torchrl_mt.data._store.schema import Schema
from torchrl_mt.data._store.steps import Column, Path, name_of

__all__ = ["StridePlan", "check_strides", "is_strided"]

_FLAGS = ("done", "terminated", "truncated")


def check_strides(schema: Schema) -> None:
    """Refuse an action, reward or done flag that is no tensor of one shape (``ValueError``)."""
    for path, entry in schema.entries.items():
        if _is_joined(path) and entry.kind != "dense":
            raise ValueError(
                f"stride joins {name_of(path)} over several steps and needs a tensor of one shape "
                f"per step, got a {entry.kind} entry: use stride=1, or store it otherwise."
            )


def is_strided(path: Path) -> bool:
    """Whether the entry of ``K`` steps is another than that of the first of them."""
    return path[0] == "next" or _is_joined(path)


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
        if not _is_joined(path):
            return column.read(self._last if path[0] == "next" else self._first)
        values = column.read(self._all)
        assert isinstance(values, Tensor)
        shape = values.shape[1:]
        if path[-1] == "action":
            return values.reshape(len(self), self.stride * (shape[0] if shape else 1), *shape[1:])
        values = values.view(len(self), self.stride, *shape)
        if path[-1] == "reward":
            return torch.sum(values, 1)
        return torch.any(values, 1).to(values.dtype)


def _is_joined(path: Path) -> bool:
    """Whether the entry combines all ``K`` steps."""
    if path[0] == "next":
        return path[-1] == "reward" or path[-1] in _FLAGS
    return path[-1] == "action"
