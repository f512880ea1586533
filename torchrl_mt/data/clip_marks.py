"""Marks of the clips in a sample: where each begins and ends, what is padding, what only warms up.

The stored flags stay, beside the marks; each mark has the shape and dtype that its entry is stored
with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl._utils import _replace_last

from torchrl_mt.data.memory import to_device
from torchrl_mt.data.schema import Entry, Schema
from torchrl_mt.data.selection import Selection
from torchrl_mt.data.steps import Path, path_of
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["ClipMarks", "Cut"]

MASK = ("collector", "mask")
BURN_IN = ("burn_in",)
_FLAG = Entry("dense", (1,), torch.bool)
"""What flags look like if none is stored."""


@dataclass(frozen=True)
class Cut:
    """How the steps of a sample are cut into clips."""

    offsets: np.ndarray
    """int64 ``[n]``: steps of its episode before each clip."""
    spans: int | np.ndarray
    """Steps of each clip: one number for all, or int64 ``[n]``."""
    width: int | None = None
    """Steps that each takes in the sample, with its padding; None if nothing is padded."""

    def edges(self, device: torch.device) -> tuple[Any, Any]:
        """Where the first and the last steps of the clips are."""
        if isinstance(self.spans, int):
            return slice(0, None, self.spans), slice(self.spans - 1, None, self.spans)
        if self.width is None:
            begins = self.spans.cumsum() - self.spans
        else:
            begins = np.arange(len(self.spans)) * self.width
        first, last = torch.from_numpy(begins), torch.from_numpy(begins + self.spans - 1)
        return to_device(first, device), to_device(last, device)

    def mask(self) -> Tensor:
        """Which steps are no padding: bool ``[N]``, of a sample that may be padded."""
        assert self.width is not None
        steps = np.broadcast_to(self.spans, len(self.offsets))
        return torch.from_numpy((np.arange(self.width) < steps[:, None]).reshape(-1))

    def first(self, steps: int) -> Tensor:
        """The first ``steps`` of each clip that does not begin with its episode: bool ``[N]``."""
        widths = np.broadcast_to(self.width or self.spans, len(self.offsets))
        most = np.where(self.offsets > 0, steps, 0)
        within = np.arange(widths.sum()) - (widths.cumsum() - widths).repeat(widths)
        return torch.from_numpy(within < most.repeat(widths))


class ClipMarks:
    """Marks the clips of a selection in what is about to be read.

    ``truncated`` marks the ends of clips only; ``done`` and ``is_init`` are the stored flags, set at
    the ends and starts of clips, too; ``terminated`` is as stored. A flag that is not stored is like
    the first of truncated, terminated and done that is.

    Args:
        truncated_key: where the end of a clip is marked; None marks nothing.
        init_keys: where the start of a clip is marked, if stored.
        burn_in: how many steps at the start of a clip are marked to only warm up a state.
    """

    def __init__(
        self, truncated_key: NestedKey | None, init_keys: list[NestedKey], burn_in: int
    ) -> None:
        self._flags: list[Path] = []
        """Truncated, terminated and done, beside each other."""
        if truncated_key is not None:
            others = (_replace_last(truncated_key, name) for name in ("terminated", "done"))
            self._flags = [path_of(key) for key in (truncated_key, *others)]
        self._inits = [path_of(key) for key in init_keys]
        self._burn_in = burn_in
        self._known_ends: tuple[Any, Any] = (None, None)
        """What :meth:`_ends_of` last gave, and for what."""

    def mark(self, storage: EpisodeStorage, selection: Selection, cut: Cut) -> None:
        """Put the marks in what is about to be read."""
        read, schema, device = selection.read, storage.schema, storage.device
        assert schema is not None
        if self._flags:
            truncated, terminated, done = self._flags
            ends = self._ends_of(schema, len(selection.plan), cut, device)
            read[truncated] = ends.clone()
            if terminated not in schema.entries:
                read[terminated] = torch.zeros_like(ends)
            flag = storage.read_selected(selection, done)
            if not isinstance(flag, Tensor):
                read[done] = ends.clone()
            elif flag.dtype == ends.dtype == torch.bool and flag.shape == ends.shape:
                read[done] = flag | ends
            else:
                flag[cut.edges(device)[1]] = True
        for path in self._inits:
            begins = storage.read_selected(selection, path) if path in schema.entries else None
            if isinstance(begins, Tensor):
                begins[cut.edges(device)[0]] = True
        if cut.width is not None:
            read[MASK] = to_device(cut.mask(), device)
        if self._burn_in:
            read[BURN_IN] = to_device(cut.first(self._burn_in), device)

    def _ends_of(self, schema: Schema, steps: int, cut: Cut, device: torch.device) -> Tensor:
        """Flags ``[steps, *shape]`` of the ends of clips; kept for clips of one length."""
        one_length = isinstance(cut.spans, int)
        known = (schema, steps, cut.spans, device)
        if one_length and self._known_ends[0] == known:
            return self._known_ends[1]
        stored = (schema.entries[path] for path in self._flags if path in schema.entries)
        like = next((entry for entry in stored if entry.kind == "dense"), _FLAG)
        ends = torch.zeros((steps, *like.shape), dtype=like.dtype, device=device)
        ends[cut.edges(device)[1]] = True
        if one_length:
            self._known_ends = (known, ends)
        return ends
