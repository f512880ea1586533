"""The priorities of the clips in a storage.

Exactly the stored clips can be drawn, and a clip keeps its priority, whatever is written, evicted or
loaded. Following a write costs no more than the write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.ring import runs
from torchrl_mt.data._store.table import Choice, EpisodeTable, Unit
from torchrl_mt.data.samplers.priorities.priority_ring import PriorityRing
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["ClipPriorities"]


class ClipPriorities:
    """Priorities of clips, by number of their first step. Call its methods under the storage's lock.

    Args:
        capacity: number of steps with priorities; None takes the storage's ``max_steps``.
        alpha: exponent of the priorities.
        eps: added to every priority.
        dtype: dtype of priorities and weights.
        span: stored steps of a clip; None before it is known.
        unit: what counts as a clip, see :class:`~torchrl_mt.data._store.table.Choice`.
        least: see there.
        within: whether new clips get the largest priority of a stored clip instead of the largest
            ever.
    """

    def __init__(
        self,
        capacity: int | None,
        alpha: float,
        eps: float,
        dtype: torch.dtype,
        *,
        span: int | None,
        unit: Unit,
        least: int,
        within: bool,
    ) -> None:
        self.capacity = capacity
        self.eps = eps
        self.dtype = dtype
        self.span = span
        self.unit = unit
        self.least = least
        self.within = within
        self._alpha = alpha
        self._largest = 1.0
        self._ring: PriorityRing | None = None
        self._loaded: tuple[int, Tensor, Tensor] | None = None
        """First number, priorities and weights that were loaded and are not in the ring yet."""
        self._renumbered = 0
        """:attr:`EpisodeTable.renumbered` when the loaded numbers were saved."""
        self._table: EpisodeTable | None = None
        """Table of the followed storage; loading a storage replaces its table."""
        self._reweigh = False
        """Whether ``alpha`` changed since the weights were computed."""
        self._reopen = True
        """Whether the first steps of clips must be found anew."""

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        # In this order, a thread that computes the weights meanwhile computes them again later.
        changed, self._alpha = value != self._alpha, value
        self._reweigh |= changed

    @property
    def default(self) -> float:
        """Priority of new clips."""
        if not self.within or self._ring is None or self.span is None:
            return self._largest
        largest = self._ring.largest
        return 1.0 if largest is None else largest

    @property
    def ring(self) -> PriorityRing:
        """The priorities by number; exists once a storage is followed."""
        assert self._ring is not None
        return self._ring

    def follow(self, storage: EpisodeStorage, span: int | None = None) -> None:
        """Update to what was written and evicted.

        Args:
            storage: the storage.
            span: stored steps of a clip from now on; None keeps the current span.
        """
        self._bind(storage)
        ring, end = self.ring, storage.table.end
        if span is not None and span != self.span:
            self.span, self._reopen = span, True
        ring.release(storage.table.first)
        self._settle_weights()
        if self._reopen:
            ring.open_only(self._clips(storage, ring.first, ring.end))
            self._reopen = False
        known = ring.end
        if known < end:
            priority = torch.tensor(self.default, dtype=self.dtype, device="cpu")
            ring.admit(end, float(priority), float(self._weigh(priority)))
            ring.open(self._clips(storage, known, end))

    def update(self, storage: EpisodeStorage, numbers: Tensor, priority: Tensor) -> None:
        """Set the priorities of clips.

        Args:
            storage: the followed storage.
            numbers: int64 ``[n]``, numbers of stored steps, all different.
            priority: ``[n]``, of ``dtype``.
        """
        if numbers.shape[0]:
            is_clip = self._is_clip(storage, numbers)
            self.ring.set(numbers, priority, self._weigh(priority), is_clip)
            self._largest = max(self._largest, float(priority.numpy().max()))

    def importance(self, numbers: Tensor, beta: float) -> Tensor:
        """Return the importance weights ``(w / w_min) ** -beta`` of drawn clips: ``[n]``."""
        weight = self.ring.weight.numpy()[self.ring.slots(numbers).numpy()].astype(np.float64)
        return torch.from_numpy((weight / self.ring.least) ** -beta).to(self.dtype)

    def forget(self) -> None:
        """Reset all priorities."""
        self._ring, self._loaded, self._largest = None, None, 1.0
        self._reweigh, self._reopen = False, True

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as copies."""
        self._settle_weights()
        return {
            "alpha": self._alpha,
            "eps": self.eps,
            "span": self.span,
            "largest": self._largest,
            "stored": self._loaded if self._ring is None else self._ring.stored(),
            "renumbered": self._renumbered if self._table is None else self._table.renumbered,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, for the storage that is followed next; keep the newest ``capacity`` steps."""
        stored = state_dict["stored"]
        if stored is not None:
            first, priority, weight = stored
            left = max(0, priority.shape[0] - (self.capacity or priority.shape[0]))
            stored = first + left, priority[left:].to(self.dtype), weight[left:].to(self.dtype)
        self.forget()
        self._loaded, self._table = stored, None
        self._renumbered = state_dict["renumbered"]
        self._alpha, self.eps = state_dict["alpha"], state_dict["eps"]
        self.span, self._largest = state_dict["span"], state_dict["largest"]

    def __getstate__(self) -> dict[str, Any]:
        known = self.state_dict()
        loaded = {"_loaded": known["stored"], "_renumbered": known["renumbered"]}
        state = self.__dict__ | loaded | {"_reopen": True}
        return state | {"_ring": None, "_table": None}

    def _bind(self, storage: EpisodeStorage) -> None:
        """Start to follow a storage, with what was loaded for it, unless it is followed already."""
        if self._ring is not None and self._table is storage.table:
            return
        capacity = self.capacity or storage.max_size
        if capacity < storage.max_size:
            raise ValueError(
                f"max_capacity must be at least the storage's max_steps={storage.max_size}, got "
                f"{capacity}: give none to take the storage's."
            )
        if self._table is not None and self._table is not storage.table:
            self.forget()
        # With the same slots, a loaded buffer draws what the saved one would have drawn.
        origin, first = storage.table.renumbered, storage.table.first
        ring = PriorityRing(capacity, self.dtype, knows_largest=self.within, origin=origin)
        ring.load(first, *2 * [torch.zeros(0, dtype=self.dtype, device="cpu")])
        if self._loaded is not None:
            begin, priority, weight = self._loaded
            begin += storage.table.renumbered - self._renumbered
            if begin <= first:
                kept = slice(first - begin, first - begin + len(storage))
                ring.load(first, priority[kept], weight[kept])
        self._ring, self._loaded, self._table, self._reopen = ring, None, storage.table, True

    def _weigh(self, priority: Tensor) -> Tensor:
        """Compute weights from priorities."""
        values = priority.numpy().astype(np.float64)
        return torch.from_numpy(np.asarray((values + self.eps) ** self._alpha)).to(self.dtype)

    def _settle_weights(self) -> None:
        """Recompute the weights if ``alpha`` changed."""
        if not self._reweigh:
            return
        self._reweigh = False
        if self._ring is not None:
            self._ring.reweigh(self._weigh)
            self._reopen = True
        elif self._loaded is not None:
            first, priority, _ = self._loaded
            self._loaded = first, priority, self._weigh(priority)

    def _clips(self, storage: EpisodeStorage, begin: int, end: int) -> Tensor:
        """List the clips of the episodes with the steps from number ``begin`` to before ``end``."""
        if begin >= end or self.span is None:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        table = storage.table
        (oldest, newest), _ = table.find(np.array([begin, end - 1]) - table.first)
        episodes = np.arange(oldest, newest + 1)
        clips = Choice(self.span, self.unit, self.least).units(table.lengths.numpy()[episodes])
        starts, _ = table.places(episodes, 0)
        return runs(torch.from_numpy(starts), torch.from_numpy(clips))

    def _is_clip(self, storage: EpisodeStorage, numbers: Tensor) -> Tensor:
        """Return whether a clip begins at each stored step: bool ``[n]``."""
        if self.span is None:
            return torch.zeros_like(numbers, dtype=torch.bool)
        episodes, offsets = storage.table.find(numbers.numpy() - storage.table.first)
        lengths = storage.table.lengths.numpy()[episodes]
        return torch.from_numpy(offsets < Choice(self.span, self.unit, self.least).units(lengths))
