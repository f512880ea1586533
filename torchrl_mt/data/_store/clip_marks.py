"""Marks in sampled clips: start, end, padding and burn-in steps.

Flags keep their stored true values; marks have the shape and dtype of the stored entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_mt.data._store.handles import BURN_IN, END, PADDING, START
from torchrl_mt.data._store.steps import Path, Steps, path_of
from torchrl_mt.devices import sent

__all__ = ["ClipMarks", "clip_marks", "edges", "told"]

_MASK_KEY = ("collector", "mask")
_BURN_IN_KEY = ("burn_in",)


@dataclass(frozen=True)
class ClipMarks:
    """How the clips of a sample are read and marked.

    ``truncated`` is true at the ends of clips only. ``done`` and ``is_init`` are the stored flags, also
    true at the ends and starts of clips. ``terminated`` is as stored. A missing flag gets the shape and
    dtype of the first of truncated, terminated and done that is stored.
    """

    truncated_key: NestedKey | None = ("next", "truncated")
    """Flag that marks the end of a clip; None marks nothing."""
    init_key: NestedKey | None = "is_init"
    """Flag that marks the start of a clip, also under ``"next"``, if stored; None marks nothing."""
    stride: int = 1
    """Stored steps per sampled step."""
    padded: bool = False
    """Whether a mask tells the padding."""
    burn_in: bool = False
    """Whether a flag tells the burn-in steps."""

    def mark(
        self, told: Callable[[int, torch.device], Tensor], device: torch.device, steps: Steps
    ) -> None:
        """Add the marks to steps on ``device``, in place.

        Args:
            told: returns which handles have a bit, bool ``[N]`` on a device; they are not changed.
            device: device of the steps.
            steps: the ``N`` steps.
        """
        columns = steps.columns
        if self.truncated_key is not None:
            truncated, terminated, done = self._flags
            ends = told(END, device)
            stored = [columns.get(path) for path in self._flags]
            tensors = (flag for flag in stored if isinstance(flag, Tensor))
            like = next(tensors, ends.unsqueeze(1))
            columns[truncated] = flags = _raise(torch.zeros_like(like), ends)
            if stored[1] is None:
                columns[terminated] = torch.zeros_like(like)
            if isinstance(stored[2], Tensor):
                _raise(stored[2], ends)
            else:
                columns[done] = flags.clone()
        for path in self._inits:
            flag = columns.get(path)
            if isinstance(flag, Tensor):
                _raise(flag, told(START, device))
        if self.padded:
            columns[_MASK_KEY] = ~told(PADDING, device)
        if self.burn_in:
            columns[_BURN_IN_KEY] = told(BURN_IN, device)

    @cached_property
    def _flags(self) -> tuple[Path, Path, Path]:
        """Paths of truncated, terminated and done."""
        truncated = path_of(self.truncated_key)
        return truncated, (*truncated[:-1], "terminated"), (*truncated[:-1], "done")

    @cached_property
    def _inits(self) -> list[Path]:
        """Paths of the flags that mark the start of a clip."""
        if self.init_key is None:
            return []
        path = path_of(self.init_key)
        return [path, ("next", *path)]


@lru_cache(64)
def clip_marks(*args: Any) -> ClipMarks:
    """Return ``ClipMarks(*args)``, the same object for the same arguments."""
    return ClipMarks(*args)


@lru_cache(8)
def edges(runs: int, span: int, bit: int, device: torch.device) -> Tensor:
    """Do as :func:`told` for ``START`` or ``END`` of runs of one length; not to be changed."""
    flags = torch.zeros(runs, span, dtype=torch.bool, device=device)
    flags[:, 0 if bit == START else -1] = True
    return flags.view(-1)


def told(handles: np.ndarray, bit: int, device: torch.device) -> Tensor:
    """Return which handles have this bit: bool ``[N]``."""
    return sent(torch.from_numpy((handles & bit) != 0), device)


def _raise(flags: Tensor, where: Tensor) -> Tensor:
    """Raise flags ``[N, *shape]`` of the steps ``where``, bool ``[N]``, in place."""
    return flags.logical_or_(where.view(-1, *(1,) * (flags.ndim - 1)))
