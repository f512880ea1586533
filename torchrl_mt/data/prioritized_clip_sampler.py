"""Clips in proportion to their priorities.

A priority belongs to the clip that begins at a step, and stays with that clip whatever is written
or leaves: it never comes to count for another one.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, Literal

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt.data.clip_priorities import ClipPriorities
from torchrl_mt.data.clip_sampler import ClipSampler
from torchrl_mt.data.draw_log import Draw, DrawLog
from torchrl_mt.data.priorities import check_index, check_priority, reduce_by_clip
from torchrl_mt.data.sampling import episode_storage
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["PrioritizedClipSampler"]


class PrioritizedClipSampler(ClipSampler, PrioritizedSampler):
    """Samples clips in proportion to ``(priority + eps) ** alpha``, as prioritized replay does.

    Samples look as those of :class:`~torchrl_mt.data.ClipSampler`; the names are those of
    TorchRL's ``PrioritizedSliceSampler``. A priority belongs to the clip that begins at a step. A
    new clip gets the largest priority seen so far, 1 at first. The sample's ``info`` has the
    importance weights ``(w / w_min) ** -beta`` as ``"priority_weight"``, one per step, where ``w``
    is the clip's ``(priority + eps) ** alpha`` and ``w_min`` the least positive one of all clips.
    (Schaul et al., Prioritized Experience Replay, 2016.)

    After training on a sample, give its priorities to ``rb.update_tensordict_priority(sample)`` (a
    ``TensorDictReplayBuffer``, under its ``priority_key``) or ``rb.update_priority(index,
    priority)``: see :meth:`update_priority`.

    One sampler serves one storage; several buffers may share that.

    Args:
        max_capacity: most steps that priorities are kept for; by default the storage's
            ``max_steps``.
        alpha: exponent of the priorities; 0 draws uniformly. May be changed at any time.
        beta: exponent of the importance weights; 0 makes all of them 1. May be changed at any time.
        eps: added to every priority.
        dtype: of priorities and weights, ``torch.float32`` or ``torch.float64``. Prefer the latter
            for millions of steps: a sum of so many in single precision is coarse.
        reduction: what priorities given for the steps of one clip become: their ``"max"``,
            ``"min"``, ``"mean"`` or ``"median"``.
        slice_len: as for :class:`~torchrl_mt.data.ClipSampler`.
        num_slices: likewise. A sample of another ``batch_size`` than the one before has clips of
            another length, and all stored steps are looked at once.
        stride: as for :class:`~torchrl_mt.data.ClipSampler`.
        strict_length: likewise.
        layout: likewise.
        truncated_key: likewise.
        init_key: likewise.
        max_priority_within_buffer: whether new clips get the largest priority of a stored clip
            instead of the largest ever.

    Raises:
        TypeError: unless exactly one of ``slice_len`` and ``num_slices`` is given.
        ValueError: if an argument is out of range, or does not go with another.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> from torchrl_mt.data import EpisodeStorage, EpisodeWriter, PrioritizedClipSampler
        >>> rb = TensorDictReplayBuffer(
        ...     storage=EpisodeStorage(100),
        ...     writer=EpisodeWriter(),
        ...     sampler=PrioritizedClipSampler(slice_len=2),
        ...     batch_size=4,
        ... )
        >>> done = torch.tensor([False, False, True, False, True]).unsqueeze(-1)
        >>> two_episodes = TensorDict({"action": torch.arange(5), "next": {"done": done}}, [5])
        >>> rb.extend(two_episodes)
        tensor([0, 1, 2, 3, 4])
        >>> sample = rb.sample()
        >>> sample["priority_weight"]
        tensor([1., 1., 1., 1.])
        >>> sample["td_error"] = torch.rand(4)
        >>> rb.update_tensordict_priority(sample)
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
            layout=layout,
            truncated_key=truncated_key,
            init_key=init_key,
        )
        if max_capacity is not None and (type(max_capacity) is not int or max_capacity < 1):
            raise ValueError(f"max_capacity must be a positive integer, got {max_capacity!r}")
        if reduction not in ("max", "min", "mean", "median"):
            raise ValueError(
                f'reduction must be "max", "min", "mean" or "median", got {reduction!r}'
            )
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
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
        self._draws = DrawLog()
        self._storage: EpisodeStorage | None = None

    # ---- what TorchRL reads ---------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """Exponent of the priorities; a new value counts for all of them from the next sample on."""
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
        """Most steps that priorities are kept for; None if a storage is yet to tell."""
        if self._max_capacity is None and self._storage is not None:
            return self._storage.max_size
        return self._max_capacity

    @property
    def device(self) -> torch.device:
        """Where the priorities are: on the CPU, beside the episode table."""
        return torch.device("cpu")

    @property
    def default_priority(self) -> float:
        """The priority that new clips get."""
        return self._priorities.default

    def add(self, index: Any) -> None:
        """Called by the replay buffer once something is written."""
        if isinstance(index, Tensor):
            self.extend(index)

    def extend(self, index: Tensor) -> None:
        """Called by the replay buffer once something is written: the index means those steps."""
        storage = self._storage
        if storage is None or not index.numel() or not index.is_contiguous():
            return
        with storage.lock:
            # Not the number of now: others may have written since the index was given out.
            first = storage.first_when_written(index)
            if first is not None and self._priorities.follows(storage):
                numbers = index.flatten().cpu() + first
                self._draws.record(index, Draw(numbers, 1, 1, first), recent=False)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Nothing to do: stored steps never change, and new ones are noticed by themselves."""

    # ---- sampling -------------------------------------------------------------------------------

    def _draw(self, storage: EpisodeStorage, num: int, span: int) -> tuple[Tensor, Tensor]:
        """Positions of ``num`` episodes and the first step of a clip in each."""
        self._total(storage, self._priorities.unit, span)
        self._follow(storage, span)
        numbers = self._priorities.ring.draw(num, self._rng)
        return storage.table.find(numbers - storage.first_number)

    def _facts(
        self,
        storage: EpisodeStorage,
        episodes: Tensor,
        offsets: Tensor,
        spans: int | Tensor,
        index: Tensor,
    ) -> dict[Any, Any]:
        """The importance weights; what was drawn is noted."""
        first = storage.first_number
        numbers = storage.table.places(episodes, offsets)[0] + first
        self._draws.record(index, Draw(numbers, spans, self.stride, first))
        weight = self._priorities.importance(numbers, self._beta)
        steps = weight.repeat_interleave(
            torch.as_tensor(spans, device="cpu"), output_size=index.numel()
        )
        return {"priority_weight": steps.view(index.shape).to(index.device)}

    # ---- priorities -----------------------------------------------------------------------------

    @torch.no_grad()
    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Give clips new priorities.

        The index of a sample, or any view of it (``td["index"]`` of a slice or a reshape of the
        sample, say), means the clips as sampled: clips that left since are skipped. So does a copy
        of a whole index, or of the starts of its clips, of one of the last 256 samples. Priorities
        given for several steps of a clip become one by ``reduction``. The index that ``rb.extend``
        returned means the steps written there.

        Any other index means the clips that begin at these stored steps now, ``-1`` none; so does
        a copy of a part of a sample's index. Equal values are reduced, too. The priority of a step
        that no clip begins at is kept, and counts if clips of another length begin there.

        Args:
            index: integers of any shape.
            priority: as many numbers, not negative; or one for all; or one for each row of
                ``index``.
            storage: the storage; by default the one that was last used.

        Raises:
            TypeError: if ``index`` does not hold integers or ``storage`` no episodes.
            ValueError: if ``priority`` has another shape, or a negative or infinite value or NaN.
            IndexError: if ``index`` has a step that is not stored.
        """
        held = episode_storage(self._storage if storage is None else storage, self)
        index = check_index(index)
        priority = check_priority(priority, index, self.dtype)
        if priority.numel() != index.numel():
            while index.ndim > 1:
                index = index[..., 0]
        with held.lock:
            self._follow(held)
            ring = self._priorities.ring
            clips = self._draws.clips_of(index)
            if clips is None:
                steps = index.flatten().cpu()
                stored = len(held)
                if bool((steps >= stored).any()):
                    raise IndexError(
                        f"index must be below {stored}: so many steps are stored; got values up "
                        f"to {int(steps.max())}"
                    )
                clips = torch.where(steps < 0, -1, steps + ring.first)
            here = (clips >= ring.first) & (clips < ring.end)
            clips, values = reduce_by_clip(clips[here], priority[here], self.reduction)
            self._priorities.update(held, clips, values)

    def _follow(self, storage: EpisodeStorage, span: int | None = None) -> None:
        """Bring the priorities up to what is stored."""
        if self._priorities.follow(storage, span):
            self._draws.forget()
        self._storage = storage

    # ---- saving ---------------------------------------------------------------------------------

    def _empty(self) -> None:
        """Forget the priorities; the count of samples goes on."""
        with self._held():
            self._priorities.forget()

    def state_dict(self) -> dict[str, Any]:
        """Priorities of what is stored, exponents and count of samples, as copies."""
        with self._held():
            return super().state_dict() | {
                "beta": self._beta,
                "priorities": self._priorities.state_dict(),
                "draws": self._draws.state(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` left it, with the storage that belongs to it: of more than
        ``max_capacity`` steps, the newest keep their priorities.
        """
        with self._held():
            self._priorities.load_state_dict(state_dict["priorities"])
            super().load_state_dict(state_dict)
            self._beta = state_dict["beta"]
            self._draws.forget()
            self._draws.restore(state_dict["draws"])

    def __getstate__(self) -> dict[str, Any]:
        with self._held():
            # Copies are made now: what is pickled later may have changed by then.
            priorities, draws = copy(self._priorities), copy(self._draws)
            state = super().__getstate__()
        return state | {"_priorities": priorities, "_draws": draws, "_storage": None}

    def _held(self) -> AbstractContextManager[Any]:
        """The lock of the storage, once there is one."""
        return nullcontext() if self._storage is None else self._storage.lock

    def __repr__(self) -> str:
        return (
            f"PrioritizedClipSampler(slice_len={self.slice_len}, num_slices={self.num_slices}, "
            f"stride={self.stride}, strict_length={self.strict_length}, layout={self.layout!r}, "
            f"alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"reduction={self.reduction!r})"
        )


def _not_negative(name: str, value: Any) -> float:
    """The value of an argument, if it may have it."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)
