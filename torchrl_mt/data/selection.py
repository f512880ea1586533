"""What a sampler chose and the buffer is about to read.

Reading it costs no search, and gives the steps that were chosen also when they leave before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_mt.data.columns import ReadPlan
from torchrl_mt.data.ring import runs
from torchrl_mt.data.rows import RowPlan
from torchrl_mt.data.steps import Column, Path, path_of
from torchrl_mt.data.strides import StridePlan

__all__ = ["Selection", "plan_runs", "state_of"]


@dataclass
class Selection:
    """Stored steps that a sampler chose and the buffer is about to read."""

    plan: ReadPlan
    """Where the steps are read: ring rows."""
    given: np.ndarray | int
    """The index as it was given out: one changed since is read anew. On a device, where comparing
    would mean to wait, how often torch had seen it change in place."""
    read: dict[Path, Column] = field(default_factory=dict)
    """Columns read so far, and those that are given out in place of what is stored."""

    def mark(self, columns: Mapping[NestedKey, Column]) -> None:
        """Give these columns out in place of what is stored."""
        self.read.update({path_of(key): column for key, column in columns.items()})

    def is_of(self, index: Tensor) -> bool:
        """Whether the index is still as it was given out."""
        state = state_of(index)
        return state == self.given if isinstance(state, int) else np.array_equal(state, self.given)


def plan_runs(
    steps: Tensor, rows: Tensor, spans: int | Tensor, *, stride: int, rectangular: bool
) -> tuple[Tensor, ReadPlan]:
    """How runs of consecutive steps are read.

    Args:
        steps: int64 ``[n]``, handle of the first step of each run.
        rows: int64 ``[n]``, its ring row.
        spans: steps per run, each of ``stride`` stored steps: one for all, or int64 ``[n]``.
        stride: how many stored steps are read as one.
        rectangular: whether to give ``[n, spans]`` handles, a run per row, instead of ``[N]``.

    Returns:
        the handles of the steps (the first of each ``stride``), and what reads them.
    """
    if not isinstance(spans, int):
        if stride == 1:
            return runs(steps, spans), RowPlan(runs(rows, spans))
        within = runs(torch.zeros_like(spans), spans) * stride
        index = torch.repeat_interleave(steps, spans) + within
        return index, StridePlan(torch.repeat_interleave(rows, spans) + within, stride)
    within = torch.arange(0, spans * stride, stride, device="cpu")
    index = steps[:, None] + within
    if not rectangular:
        index = index.flatten()
    if stride == 1:
        return index, RowPlan(rows, spans)
    return index, StridePlan((rows[:, None] + within).flatten(), stride)


def state_of(index: Tensor) -> np.ndarray | int:
    """What tells whether an index tensor is changed later on."""
    if index.device.type == "cpu":
        return index.numpy()
    return 0 if index.is_inference() else index._version
