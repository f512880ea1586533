"""Marks in sampled clips: start, end, padding and burn-in steps.

Flags keep their stored true values; marks have the shape and dtype of the stored entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_mt.data._store.columns.memory import to_device
from torchrl_mt.data._store.ring import within
from torchrl_mt.data._store.steps import Path, Steps, path_of

__all__ = ["ClipMarks", "Cut"]

MASK = ("collector", "mask")
BURN_IN = ("burn_in",)
_FLAG = torch.zeros(0, 1, dtype=torch.bool, device="cpu")
"""Shape and dtype of flags if none is stored."""


@dataclass(frozen=True)
class Cut:
    """How the steps of a sample are cut into clips."""

    offsets: np.ndarray
    """int64 ``[n]``: first step of each clip within its episode."""
    spans: int | np.ndarray
    """Steps of each clip: one number for all, or int64 ``[n]``."""
    width: int | None = None
    """Steps of each clip in the sample, with its padding; None if nothing is padded."""

    def edges(self, device: torch.device) -> tuple[Any, Any]:
        """Return the positions of the first and of the last steps of the clips."""
        if isinstance(self.spans, int):
            return slice(0, None, self.spans), slice(self.spans - 1, None, self.spans)
        if self.width is None:
            begins = self.spans.cumsum() - self.spans
        else:
            begins = np.arange(len(self.spans)) * self.width
        first, last = torch.from_numpy(begins), torch.from_numpy(begins + self.spans - 1)
        return to_device(first, device), to_device(last, device)

    def mask(self) -> Tensor:
        """Return which steps are no padding: bool ``[N]``; ``width`` must be set."""
        assert self.width is not None
        steps = np.broadcast_to(self.spans, len(self.offsets))
        return torch.from_numpy((np.arange(self.width) < steps[:, None]).reshape(-1))

    def first(self, steps: int) -> Tensor:
        """Return the first ``steps`` of each clip that begins inside its episode: bool ``[N]``."""
        widths = np.broadcast_to(self.width or self.spans, len(self.offsets))
        most = np.where(self.offsets > 0, steps, 0)
        return torch.from_numpy(within(widths) < most.repeat(widths))


class ClipMarks:
    """Marks the clips of a sample.

    ``truncated`` is true at the ends of clips only. ``done`` and ``is_init`` are the stored flags, also
    true at the ends and starts of clips. ``terminated`` is as stored. A missing flag gets the shape and
    dtype of the first of truncated, terminated and done that is stored.

    Args:
        truncated_key: flag that marks the end of a clip; None marks nothing.
        init_keys: flags that mark the start of a clip, if stored.
        burn_in: number of steps at the start of a clip that are marked as burn-in.
    """

    def __init__(
        self, truncated_key: NestedKey | None, init_keys: list[NestedKey], burn_in: int
    ) -> None:
        self._flags: list[Path] = []
        """Paths of truncated, terminated and done."""
        if truncated_key is not None:
            truncated = path_of(truncated_key)
            self._flags = [truncated, *((*truncated[:-1], name) for name in ("terminated", "done"))]
        self._inits = [path_of(key) for key in init_keys]
        self._burn_in = burn_in
        self._known_ends: tuple[Any, Any] = (None, None)
        """Cache of :meth:`_ends_of`: arguments and result."""

    @property
    def paths(self) -> list[Path]:
        """Entries that marks change if they are stored."""
        return [*self._flags, *self._inits]

    def mark(self, cut: Cut, device: torch.device, steps: Steps) -> None:
        """Add the marks to steps on ``device``, in place."""
        columns = steps.columns
        if self._flags:
            truncated, terminated, done = self._flags
            ends = self._ends_of(cut, device, steps)
            columns[truncated] = ends.clone()
            if terminated not in columns:
                columns[terminated] = torch.zeros_like(ends)
            flag = columns.get(done)
            if not isinstance(flag, Tensor):
                columns[done] = ends.clone()
            elif flag.dtype == ends.dtype == torch.bool and flag.shape == ends.shape:
                columns[done] = flag | ends
            else:
                flag[cut.edges(device)[1]] = True
        for path in self._inits:
            begins = columns.get(path)
            if isinstance(begins, Tensor):
                begins[cut.edges(device)[0]] = True
        if cut.width is not None:
            columns[MASK] = to_device(cut.mask(), device)
        if self._burn_in:
            columns[BURN_IN] = to_device(cut.first(self._burn_in), device)

    def _ends_of(self, cut: Cut, device: torch.device, steps: Steps) -> Tensor:
        """Return flags ``[N, *shape]`` that are true at the ends of clips; cached for one length."""
        stored = (steps.columns.get(path) for path in self._flags)
        like = next((column for column in stored if isinstance(column, Tensor)), _FLAG)
        shape, one_length = (steps.length, *like.shape[1:]), isinstance(cut.spans, int)
        wanted = (shape, like.dtype, device, cut.spans)
        known, ends = self._known_ends
        if one_length and known == wanted:
            return ends
        ends = torch.zeros(shape, dtype=like.dtype, device=device)
        ends[cut.edges(device)[1]] = True
        if one_length:
            self._known_ends = wanted, ends
        return ends
