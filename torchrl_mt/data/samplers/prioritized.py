"""A sampler of clips in proportion to their priorities.

A priority belongs to the clip that begins at a step and stays with it, whatever is written or evicted.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, Literal

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt.checks import as_tensor, check_choice, check_positive_integer
from torchrl_mt.data._store.handles import HANDLES, PADDING, integers, numbers_of
from torchrl_mt.data._store.selection import Clips
from torchrl_mt.data._store.table import Choice
from torchrl_mt.data.samplers.clip import ClipSampler
from torchrl_mt.data.samplers.draws import episode_storage
from torchrl_mt.data.samplers.priorities.clip_priorities import ClipPriorities
from torchrl_mt.data.samplers.priorities.updates import (
    check_priority,
    reduce_by_clip,
    reduce_rows,
)
from torchrl_mt.data.storage import EpisodeStorage
from torchrl_mt.devices import on_cpu, sent

__all__ = ["PrioritizedClipSampler"]


class PrioritizedClipSampler(ClipSampler, PrioritizedSampler):
    """Samples clips in proportion to ``(priority + eps) ** alpha``, as prioritized replay does.

    A priority belongs to the clip that begins at a step. A new clip gets the largest priority so far, 1
    at first. After training on a sample, pass its priorities to
    ``rb.update_tensordict_priority(sample)`` or :meth:`rb.update_priority(index, priority)
    <update_priority>`; :doc:`/replay` shows a whole step. Names are TorchRL's. One sampler serves one
    storage, which several buffers may share. (Schaul et al., Prioritized Experience Replay, 2016.)

    The sample's ``info`` has the importance weights ``(w / w_min) ** -beta`` as ``"priority_weight"``,
    one per step, where ``w`` is the clip's ``(priority + eps) ** alpha``, ``w_min`` the least one above
    0.

    Args:
        max_capacity: number of steps with priorities, at least the storage's ``max_steps``, the default.
        alpha: exponent of the priorities; 0 draws uniformly.
        beta: exponent of the importance weights; 0 makes all 1. Both may be changed at any time.
        eps: added to every priority.
        dtype: of priorities and weights, ``torch.float32`` or ``torch.float64``: prefer the latter for
            millions of steps, as single precision is too coarse for their sum.
        reduction: of a clip's priorities to one: ``"max"``, ``"min"``, ``"mean"`` or ``"median"``.
        slice_len: this and ``num_slices``, ``stride``, ``strict_length``, ``pad_output``, ``burn_in``,
            ``layout``, ``truncated_key`` and ``init_key`` are as for
            :class:`~torchrl_mt.data.ClipSampler`.
        max_priority_within_buffer: whether new clips get the largest priority of a stored clip instead
            of the largest ever.

    Raises:
        TypeError, ValueError: as for :class:`~torchrl_mt.data.ClipSampler`.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_mt.data import EpisodeWriter
        >>> parts = {"storage": EpisodeStorage(100), "writer": EpisodeWriter(), "batch_size": 4}
        >>> rb = ReplayBuffer(sampler=PrioritizedClipSampler(slice_len=2), **parts)
        >>> done = torch.tensor([[False], [False], [True], [False], [True]])
        >>> index = rb.extend(TensorDict({"action": torch.arange(5), "next": {"done": done}}, [5]))
        >>> rb.update_priority([0, 1, 3], [0.0, 0.0, 7.0])
        >>> rb.sample()["action"]
        tensor([3, 4, 3, 4])
    """

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.7,
        beta: float = 0.9,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: Literal["max", "min", "mean", "median"] = "max",
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        stride: int = 1,
        strict_length: bool = True,
        pad_output: bool = False,
        burn_in: int = 0,
        layout: Literal["flat", "clips"] = "flat",
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        max_priority_within_buffer: bool = False,
    ) -> None:
        ClipSampler.__init__(
            self,
            slice_len=slice_len,
            num_slices=num_slices,
            stride=stride,
            strict_length=strict_length,
            pad_output=pad_output,
            burn_in=burn_in,
            layout=layout,
            truncated_key=truncated_key,
            init_key=init_key,
        )
        if max_capacity is not None:
            max_capacity = check_positive_integer("max_capacity", max_capacity)
        check_choice("reduction", reduction, ("max", "min", "mean", "median"))
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}.")
        self._beta = _not_negative("beta", beta)
        self._max_capacity = max_capacity
        self.dtype = dtype
        self.reduction = reduction
        self._priorities = ClipPriorities(
            max_capacity,
            _not_negative("alpha", alpha),
            _not_negative("eps", eps),
            dtype,
            span=None if slice_len is None else slice_len * stride,
            unit="clips" if strict_length else "clips_or_whole",
            least=self._least,
            within=max_priority_within_buffer,
        )
        self._storage: EpisodeStorage | None = None
        self.dropped = 0
        """Number of priorities that were given for evicted steps."""

    # ---- properties and hooks of TorchRL's samplers ---------------------------------------------

    @property
    def alpha(self) -> float:
        """Exponent of the priorities; a new value applies to all from the next sample on."""
        return self._priorities.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._priorities.alpha = _not_negative("alpha", value)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _not_negative("beta", value)

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return self._priorities.eps

    @property
    def max_size(self) -> int | None:
        """Number of steps with priorities; None before a storage is known."""
        if self._max_capacity is None and self._storage is not None:
            return self._storage.max_size
        return self._max_capacity

    @property
    def device(self) -> torch.device:
        """Device of the priorities: the CPU."""
        return torch.device("cpu")

    @property
    def default_priority(self) -> float:
        """Priority of new clips."""
        return self._priorities.default

    def add(self, index: Any) -> None:
        """Do nothing: new steps are found when sampling."""

    def extend(self, index: Tensor) -> None:
        """Do nothing: new steps are found when sampling."""

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Do nothing: new steps are found when sampling."""

    # ---- sampling -------------------------------------------------------------------------------

    def _draw(
        self, storage: EpisodeStorage, num: int, clips: Choice, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw clips by priority: episode positions and first steps within the episode."""
        self._units(storage, clips)
        self._follow(storage, clips.span)
        numbers = self._priorities.ring.draw(num, self._rng)
        return storage.table.find(numbers.numpy() - storage.table.first)

    def _info(self, storage: EpisodeStorage, clips: Clips, index: Tensor) -> dict[Any, Any]:
        """Return the importance weights."""
        numbers, _ = storage.table.places(clips.episodes, clips.offsets)
        weight = self._priorities.importance(torch.from_numpy(numbers), self._beta)
        steps = torch.from_numpy(weight.numpy().repeat(clips.widths))
        return {"priority_weight": sent(steps.view(index.shape), storage.device)}

    # ---- priorities -----------------------------------------------------------------------------

    @torch.no_grad()
    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set the priorities of clips.

        - Each element of an index ``[N]`` stands for the clip that begins at its step, as in TorchRL. So
          a flat sample with a priority per step sets those of the clips that begin at each of them.
        - Each row of an index ``[n, L]``, such as that of a sample with ``layout="clips"``, stands for
          the clip that begins at its first step. Priorities ``[n, L]`` are reduced to one per row by
          ``reduction``, without padding. For a flat sample of clips of one length, give
          ``index.view(n, -1)``.

        Several priorities for one clip are reduced too. Priorities for evicted steps are dropped and
        counted in ``dropped``. Those for padding and for negative integers are left out. A priority
        for a step at which no clip begins is kept for clips of another length.

        Args:
            index: handles, or positions by age (0 is the oldest stored step), of any shape; more than
                two dimensions count as rows of the last one.
            priority: numbers of at least 0: one per element of ``index``, one per row, or one for all.
            storage: the storage; by default the one that was last used.

        Raises:
            TypeError: if ``index`` does not hold integers or ``storage`` no episodes.
            ValueError: if ``priority`` has another shape, or a negative or infinite value or NaN.
            IndexError: if ``index`` has a step that was never stored.
        """
        held = episode_storage(self._storage if storage is None else storage, self)
        index = integers(as_tensor("index", index), "index")
        index, priority = on_cpu(index, as_tensor("priority", priority))
        values = check_priority(priority, index, self.dtype)
        if not index.numel():
            return
        rows = index.reshape(-1, index.shape[-1] if index.ndim > 1 else 1).numpy()
        if values.shape[0] != rows.shape[0]:
            values = reduce_rows(values.view(rows.shape), rows & PADDING != 0, self.reduction)
        steps = rows[:, 0]
        is_handle, is_meant = steps >= HANDLES, steps & PADDING == 0  # Those of -1 are set too.
        with held.lock:
            self._follow(held)
            first, stored = held.table.first, held.table.num_steps
            numbers = np.where(is_handle, numbers_of(steps), steps + first)
            for step in steps[is_meant & (numbers >= first + stored)].tolist():
                raise IndexError(
                    f"index must be below {stored}, the number of stored steps, or the handle of one, "
                    f"below {HANDLES + first + stored}; got {step}."
                )
            here = is_meant & (numbers >= first)
            self.dropped += int((is_meant & ~here).sum())
            at, of = torch.from_numpy(numbers[here]), values[torch.from_numpy(here)]
            self._priorities.update(held, *reduce_by_clip(at, of, self.reduction))

    def _follow(self, storage: EpisodeStorage, span: int | None = None) -> None:
        """Update the priorities to what is stored."""
        self._priorities.follow(storage, span)
        self._storage = storage

    # ---- saving ---------------------------------------------------------------------------------

    def _empty(self) -> None:
        """Reset the priorities; the count of samples continues."""
        with self._locked():
            self._priorities.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the priorities, exponents and count of samples."""
        with self._locked():
            return super().state_dict() | {
                "beta": self._beta,
                "priorities": self._priorities.state_dict(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, for the storage that was saved with it.

        Only the newest ``max_capacity`` steps keep their priorities.
        """
        with self._locked():
            self._priorities.load_state_dict(state_dict["priorities"])
            super().load_state_dict(state_dict)
            self._beta = state_dict["beta"]

    def __getstate__(self) -> dict[str, Any]:
        with self._locked():
            # Copied under the lock, as pickling happens after it is released.
            state = super().__getstate__() | {"_priorities": copy(self._priorities)}
        return state | {"_storage": None}

    def _locked(self) -> AbstractContextManager[Any]:
        """Return the storage's lock; no lock before there is a storage."""
        return nullcontext() if self._storage is None else self._storage.lock

    def __repr__(self) -> str:
        return (
            f"PrioritizedClipSampler(slice_len={self.slice_len}, num_slices={self.num_slices}, "
            f"stride={self.stride}, strict_length={self.strict_length}, layout={self.layout!r}, "
            f"alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"reduction={self.reduction!r})"
        )


def _not_negative(name: str, value: Any) -> float:
    """Return ``value`` as a float; refuse negative, infinite and NaN."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}.")
    return float(value)
