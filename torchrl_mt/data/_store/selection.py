"""Selections: steps that a sampler chose and the buffer is about to read.

A selection spares the search for the steps, and keeps them readable if they are evicted meanwhile. It
is found by the values of the index: what is read is the same without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt._hosts.torch import times_changed
from torchrl_mt.data._store.clip_marks import ClipMarks, edges, told
from torchrl_mt.data._store.columns.columns import ReadPlan
from torchrl_mt.data._store.columns.rows import RowPlan
from torchrl_mt.data._store.handles import BURN_IN, END, HANDLES, PADDING, START, of_kind
from torchrl_mt.data._store.ring import within
from torchrl_mt.data._store.steps import Column, Path
from torchrl_mt.data._store.strides import StridePlan
from torchrl_mt.devices import sent

__all__ = ["Clips", "Selection", "plan_clips", "plan_rows"]


@dataclass(frozen=True)
class Clips:
    """Runs of consecutive steps, each within one episode."""

    episodes: np.ndarray
    """int64 ``[n]``, positions of the episodes (0 is the oldest)."""
    offsets: np.ndarray | int
    """int64 ``[n]``, first step of each run within its episode; or one number for all."""
    spans: int | np.ndarray
    """Steps per run: one number for all, or int64 ``[n]``."""
    width: int | None = None
    """Length to which shorter runs are padded, by repeating their last step; None pads nothing."""
    burn_in: int = 0
    """Steps at the start of a run that only warm up, unless it begins with its episode."""

    @property
    def widths(self) -> int | np.ndarray:
        """Steps per run with its padding."""
        return self.spans if self.width is None else self.width


@dataclass(eq=False)
class Selection:
    """Stored steps that a sampler chose and the buffer is about to read."""

    index: Tensor
    """The handles of the steps, in the shape in which they are read."""
    plan: ReadPlan
    """The ring rows to read."""
    marks: ClipMarks | None
    """How the steps are marked."""
    span: int = 0
    """Steps of each run, if all have as many; else 0."""
    given: tuple[Tensor, int] | None = None
    """The index that was given out on another device, and how often it had been changed in place."""
    read: dict[Path, Column] = field(default_factory=dict)
    """Columns that were read before a write changed their rows."""

    def has(self, index: Any) -> bool:
        """Whether an index is known to have these values, without waiting for another device."""
        if not isinstance(index, Tensor) or index.dtype != torch.int64:
            return False
        if index.is_cpu:
            return self.index.equal(index)
        given, changed = self.given or (None, 0)
        return given is index and times_changed(index) == changed

    def give(self, device: torch.device) -> Tensor:
        """Return a copy of the index to give out on a device."""
        if device.type == "cpu":
            return self.index.clone()
        with torch.inference_mode(False):  # where torch does not count changes
            given = sent(self.index, device)
        self.given = given, times_changed(given)
        return given

    def told(self, bit: int, device: torch.device) -> Tensor:
        """Return which handles have this bit: bool ``[N]``, not to be changed."""
        if self.span and bit in (START, END):
            return edges(self.index.numel() // self.span, self.span, bit, device)
        return told(self.index.reshape(-1).numpy(), bit, device)


def plan_clips(
    clips: Clips, steps: np.ndarray, rows: np.ndarray, *, stride: int = 1, kind: int = 0
) -> tuple[np.ndarray, ReadPlan]:
    """Plan the read of runs of consecutive steps.

    Args:
        clips: the runs.
        steps: int64 ``[n]``, number of the first step of each run.
        rows: int64 ``[n]``, ring row of the first step of each run.
        stride: how many stored steps are read as one.
        kind: of the marks; 0 marks nothing.

    Returns:
        int64 ``[N]``: the handles of the steps (the first of each ``stride``), one run after the other,
        and the plan that reads them.
    """
    number, spans, widths = len(steps), clips.spans, clips.widths
    if isinstance(spans, int):
        offsets, bits = _uniform(number, spans, stride, kind)
        handles = (steps + HANDLES).repeat(spans) + bits
    else:
        width = clips.width
        inside = within(spans) if width is None else np.tile(np.arange(width), number)
        last = (spans - 1).repeat(widths) if kind or width is not None else inside
        offsets = inside if last is inside else np.minimum(inside, last)
        offsets = offsets * stride if stride > 1 else offsets
        handles = (steps + HANDLES).repeat(widths) + offsets
        if kind:
            handles += of_kind(kind) + START * (inside == 0) + END * (inside == last)
            handles += PADDING * (inside > last)
    if clips.burn_in:
        most = np.where(np.asarray(clips.offsets) > 0, clips.burn_in, 0).repeat(widths)
        every = np.broadcast_to(widths, number)
        handles += BURN_IN * (within(every) < most)
    if isinstance(spans, int) and stride == 1:
        return handles, RowPlan(torch.from_numpy(rows), spans)
    return handles, plan_rows(torch.from_numpy(rows.repeat(widths) + offsets), stride)


def plan_rows(rows: Tensor, stride: int) -> ReadPlan:
    """Plan the read of steps by the ring row of the first of each ``stride``: int64 ``[N]``."""
    return RowPlan(rows) if stride == 1 else StridePlan(rows, stride)


@lru_cache(4)
def _uniform(runs: int, span: int, stride: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each step's offset in its run, and what is added to the handle of the run: ``[N]``."""
    offsets = np.arange(0, span * stride, stride)
    handles = offsets + of_kind(kind)
    if kind:
        handles[0] += START
        handles[-1] += END
    return np.tile(offsets, runs), np.tile(handles, runs)
