"""What a sampler chose and the buffer is about to read.

Reading it costs no search, and gives the steps that were chosen also when they leave before that.
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
    """Where the steps are read: ring rows."""
    given: int
    """How often torch had seen the index change in place: one changed since is read anew."""
    mark: Callable[[Steps], None] | None = None
    """Puts marks in what was read."""
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
    """How runs of consecutive steps are read.

    Args:
        steps: int64 ``[n]``, number of the first step of each run.
        rows: int64 ``[n]``, its ring row.
        spans: steps per run, each of ``stride`` stored steps: one for all, or int64 ``[n]``.
        stride: how many stored steps are read as one.
        rectangular: whether to give ``[n, spans]`` handles, a run per row, instead of ``[N]``.
        padded_to: steps that shorter runs are padded to, by their last one again; None pads nothing.

    Returns:
        the handles of the steps (the first of each ``stride``), and what reads them.
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
    """Stored steps from the beginning of its run to each step of as many runs: ``[runs * span]``."""
    return np.tile(np.arange(0, span * stride, stride), runs)
