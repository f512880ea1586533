"""Selections: steps that a sampler chose and the buffer is about to read.

Reading one needs no search, and works even if its steps are evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.columns import ReadPlan
from torchrl_mt.data._store.columns.rows import RowPlan
from torchrl_mt.data._store.handles import HANDLES
from torchrl_mt.data._store.ring import within
from torchrl_mt.data._store.steps import Column, Path, Steps
from torchrl_mt.data.samplers.strides import StridePlan

__all__ = ["Selection", "plan_runs"]


@dataclass
class Selection:
    """Stored steps that a sampler chose and the buffer is about to read."""

    plan: ReadPlan
    """The ring rows to read."""
    given: int
    """In-place changes of the index so far; an index that changes later is looked up anew."""
    mark: Callable[[Steps], None] | None = None
    """Adds marks to the steps that were read."""
    read: dict[Path, Column] = field(default_factory=dict)
    """Columns read so far."""


def plan_runs(
    steps: np.ndarray,
    rows: np.ndarray,
    spans: int | np.ndarray,
    *,
    stride: int,
    rectangular: bool,
    padded_to: int | None = None,
) -> tuple[Tensor, ReadPlan]:
    """Plan the read of runs of consecutive steps.

    Args:
        steps: int64 ``[n]``, number of the first step of each run.
        rows: int64 ``[n]``, ring row of the first step of each run.
        spans: steps per run, each of ``stride`` stored steps: one for all, or int64 ``[n]``.
        stride: how many stored steps are read as one.
        rectangular: whether the handles are ``[n, spans]``, a run per row, instead of ``[N]``.
        padded_to: length to which shorter runs are padded with their last step; None pads nothing.

    Returns:
        The handles of the steps (the first of each ``stride``), and the plan that reads them.
    """
    widths = spans if padded_to is None else padded_to
    if isinstance(spans, int):
        offsets = _offsets(len(steps), spans, stride)
    elif padded_to is not None:
        offsets = (np.minimum(np.arange(padded_to), spans[:, None] - 1) * stride).reshape(-1)
    else:
        offsets = within(spans) * stride
    index = torch.from_numpy((steps + HANDLES).repeat(widths) + offsets)
    if rectangular:
        index = index.view(len(steps), -1)
    if isinstance(spans, int) and stride == 1:
        return index, RowPlan(torch.from_numpy(rows), spans)
    places = torch.from_numpy(rows.repeat(widths) + offsets)
    return index, RowPlan(places) if stride == 1 else StridePlan(places, stride)


@lru_cache(4)
def _offsets(runs: int, span: int, stride: int) -> np.ndarray:
    """Return the offset of each step from the start of its run: ``[runs * span]``."""
    return np.tile(np.arange(0, span * stride, stride), runs)
