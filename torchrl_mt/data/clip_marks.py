"""Marks of the clips in a sample: where each begins and ends, what is padding, what only warms up.

The stored flags stay, beside the marks; each mark has the shape and dtype that its entry is stored
with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl._utils import _replace_last

from torchrl_mt.data.memory import to_device
from torchrl_mt.data.ring import runs
from torchrl_mt.data.schema import Entry
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

    offsets: Tensor
    """int64 ``[n]``: steps of its episode before each clip."""
    spans: int | Tensor
    """Steps of each clip: one number for all, or int64 ``[n]``."""
    width: int | None = None
    """Steps that each takes in the sample, with its padding; None if nothing is padded."""

    def edges(self, device: torch.device) -> tuple[Any, Any]:
        """Where the first and the last steps of the clips are."""
        if isinstance(self.spans, int):
            return slice(0, None, self.spans), slice(self.spans - 1, None, self.spans)
        if self.width is None:
            after = self.spans.cumsum(0)
            begins = after - self.spans
        else:
            begins = torch.arange(len(self.spans), device="cpu") * self.width
            after = begins + self.spans
        return to_device(begins, device), to_device(after - 1, device)

    def mask(self) -> Tensor:
        """Which steps are no padding: bool ``[N]``, of a sample that may be padded."""
        assert self.width is not None
        if isinstance(self.spans, int):
            return torch.ones(len(self.offsets) * self.width, dtype=torch.bool, device="cpu")
        within = torch.arange(self.width, device="cpu")
        return (within < self.spans[:, None]).flatten()

    def first(self, steps: int) -> Tensor:
        """The first ``steps`` of each clip that does not begin with its episode: bool ``[N]``."""
        inside = self.offsets > 0
        width = self.spans if self.width is None else self.width
        if isinstance(width, int):
            within = torch.arange(width, device="cpu")
            return (inside[:, None] & (within < steps)).flatten()
        within = runs(torch.zeros_like(width), width)
        return inside.repeat_interleave(width) & (within < steps)


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
        """The flags of :meth:`_ends_of` that were last asked for, and for what."""

    def mark(self, storage: EpisodeStorage, selection: Selection, cut: Cut) -> None:
        """Put the marks in what is about to be read."""
        read, schema = selection.read, storage.schema
        assert schema is not None
        if self._flags:
            truncated, terminated, done = self._flags
            entries = [schema.entries.get(path, _FLAG) for path in self._flags]
            like = next((e for e in entries if e is not _FLAG and e.kind == "dense"), _FLAG)
            ends = self._ends_of(len(selection.plan), cut, like, storage.device)
            read[truncated] = ends.clone()
            if entries[1] is _FLAG:
                read[terminated] = torch.zeros_like(ends)
            flag = storage.read_selected(selection, done)
            if not isinstance(flag, Tensor):
                read[done] = ends.clone()
            elif flag.dtype == ends.dtype == torch.bool and flag.shape == ends.shape:
                read[done] = flag | ends
            else:
                flag[cut.edges(flag.device)[1]] = True
        for path in self._inits:
            begins = storage.read_selected(selection, path) if path in schema.entries else None
            if isinstance(begins, Tensor):
                begins[cut.edges(begins.device)[0]] = True
        if cut.width is not None:
            read[MASK] = to_device(cut.mask(), storage.device)
        if self._burn_in:
            read[BURN_IN] = to_device(cut.first(self._burn_in), storage.device)

    def _ends_of(self, steps: int, cut: Cut, like: Entry, device: torch.device) -> Tensor:
        """Flags ``[steps, *shape]`` of the ends of clips; kept for clips of one length."""
        spans = cut.spans
        known = (steps, spans, like.shape, like.dtype, device)
        if isinstance(spans, int) and self._known_ends[0] == known:
            return self._known_ends[1]
        ends = torch.zeros((steps, *like.shape), dtype=like.dtype, device=device)
        ends[cut.edges(device)[1]] = True
        if isinstance(spans, int):
            self._known_ends = (known, ends)
        return ends
