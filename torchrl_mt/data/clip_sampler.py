"""Clips: runs of consecutive steps that never cross from one episode into another."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl._utils import _replace_last
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt.data.sampling import draw_integers, draw_uniform, episode_storage
from torchrl_mt.data.storage import EpisodeStorage, Selection
from torchrl_mt.data.table import Weight, weigh

__all__ = ["ClipSampler"]


class ClipSampler(Sampler):
    """Samples clips of consecutive steps, with the conventions of TorchRL's ``SliceSampler``.

    ``batch_size`` counts steps and the sample is flat: ``[num_slices * slice_len]``, one clip after
    the other. The last step of each clip is marked truncated, the first one as ``is_init`` if the
    data has that entry, through the sample's ``info`` (which a ``TensorDictReplayBuffer`` writes in
    the sample). The cost of choosing clips does not grow with the number of stored steps.

    Args:
        slice_len: steps per clip. Exclusive with ``num_slices``.
        num_slices: clips per sample, each of ``batch_size // num_slices`` steps.
        strict_length: if False, an episode shorter than a clip is sampled whole, and the sample
            may be shorter than ``batch_size``.
        weighting: ``"clip"`` draws uniformly from all clips, ``"episode"`` an episode first and
            then one of its clips (as ``SliceSampler`` does).
        truncated_key: where the end of a clip is marked; None marks nothing.
        init_key: where the start of a clip is marked; None leaves that entry as it is.

    Raises:
        TypeError: unless exactly one of ``slice_len`` and ``num_slices`` is given.
        ValueError: if an argument is out of range.

    Examples:
        >>> sampler = ClipSampler(slice_len=16)
        >>> sampler
        ClipSampler(slice_len=16, num_slices=None, strict_length=True, weighting='clip')
    """

    def __init__(
        self,
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        strict_length: bool = True,
        weighting: Literal["clip", "episode"] = "clip",
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
    ) -> None:
        if (slice_len is None) == (num_slices is None):
            raise TypeError(
                f"give exactly one of slice_len and num_slices, got slice_len={slice_len} and "
                f"num_slices={num_slices}"
            )
        for name, value in (("slice_len", slice_len), ("num_slices", num_slices)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if weighting not in ("clip", "episode"):
            raise ValueError(f'weighting must be "clip" or "episode", got {weighting!r}')
        self.slice_len = slice_len
        self.num_slices = num_slices
        self.strict_length = strict_length
        self.weighting = weighting
        self.truncated_key = truncated_key
        self.init_key = init_key

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw clips of ``batch_size`` steps in all.

        Args:
            storage: an :class:`~torchrl_mt.data.EpisodeStorage`.
            batch_size: number of steps.

        Returns:
            int64 ``[batch_size]`` storage indices and the marks.

        Raises:
            TypeError: if ``storage`` is another kind of storage.
            RuntimeError: if ``batch_size`` is not divisible into clips, or no stored episode holds
                a clip.
        """
        storage = episode_storage(storage, self)
        num_slices, span = self._clips(batch_size)
        with storage.lock:
            if not storage.num_episodes:
                raise RuntimeError("cannot sample clips: nothing is stored yet")
            episodes, offsets = self._draw(storage, num_slices, span)
            spans: int | Tensor = span
            if not self.strict_length:
                lengths = storage.table.lengths[episodes]
                if bool((lengths < span).any()):
                    spans = lengths.clamp_max(span)
            index, selection = storage.select(episodes, offsets, spans)
            return index, self._marks(storage, selection, index, spans)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether a clip of the length that ``batch_size`` asks for is stored."""
        storage = episode_storage(storage, self)
        _, span = self._clips(batch_size)
        return storage.num_clips(span if self.strict_length else 1) > 0

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        storage = episode_storage(storage, self)
        _, span = self._clips(batch_size)
        return storage.table.total("clips" if self.strict_length else "clips_or_whole", span)

    def _clips(self, batch_size: int) -> tuple[int, int]:
        """Number of clips and steps per clip."""
        name = "slice_len" if self.slice_len is not None else "num_slices"
        divisor = self.slice_len if self.slice_len is not None else self.num_slices
        assert divisor is not None
        if batch_size < 1 or batch_size % divisor:
            raise RuntimeError(
                f"batch_size counts steps and must be a positive multiple of {name}, got "
                f"batch_size={batch_size} and {name}={divisor}"
            )
        other = batch_size // divisor
        return (other, divisor) if self.slice_len is not None else (divisor, other)

    def _draw(self, storage: EpisodeStorage, num: int, span: int) -> tuple[Tensor, Tensor]:
        """Positions of ``num`` episodes and the first step of a clip in each."""
        table = storage.table
        if self.weighting == "clip":
            weight: Weight = "clips" if self.strict_length else "clips_or_whole"
            units = draw_integers(self._total(storage, weight, span), num, self._rng)
            return table.locate(units, weight, span)
        if self.strict_length:
            units = draw_integers(self._total(storage, "episodes", span), num, self._rng)
            episodes, _ = table.locate(units, "episodes", span)
        else:
            episodes = draw_integers(table.num_episodes, num, self._rng)
        clips = weigh(table.lengths[episodes], span, "clips_or_whole")
        return episodes, (draw_uniform(num, self._rng) * clips).long().clamp_max(clips - 1)

    def _total(self, storage: EpisodeStorage, weight: Weight, span: int) -> int:
        """Units to draw from, at least one."""
        total = storage.table.total(weight, span)
        if not total:
            raise RuntimeError(
                f"no stored episode holds a clip of {span} steps: the longest has "
                f"{int(storage.table.lengths.max())}; use shorter clips or strict_length=False"
            )
        return total

    def _marks(
        self, storage: EpisodeStorage, selection: Selection, index: Tensor, spans: int | Tensor
    ) -> dict[Any, Any]:
        """The sample's ``info``.

        ``truncated`` marks the ends of clips only; ``done`` and ``is_init`` are the stored flags
        OR-ed with the ends and starts of clips; ``terminated`` is as stored.
        """
        info: dict[Any, Any] = {}
        if isinstance(spans, int):
            starts: Any = slice(0, None, spans)
            ends: Any = slice(spans - 1, None, spans)
        else:
            ends = spans.cumsum(0).to(index.device) - 1
            starts = ends - spans.to(index.device) + 1
        if self.truncated_key is not None:
            done_key = _replace_last(self.truncated_key, "done")
            terminated_key = _replace_last(self.truncated_key, "terminated")
            done = storage.read_selected(selection, done_key)
            terminated = storage.read_selected(selection, terminated_key)
            shape = done.shape if isinstance(done, Tensor) else (index.shape[0], 1)
            truncated = torch.zeros(shape, dtype=torch.bool, device=index.device)
            truncated[ends] = True
            info[self.truncated_key] = truncated
            info[done_key] = done | truncated if isinstance(done, Tensor) else truncated.clone()
            info[terminated_key] = (
                terminated.clone()
                if isinstance(terminated, Tensor)
                else torch.zeros_like(truncated)
            )
        if self.init_key is not None:
            stored = storage.read_selected(selection, self.init_key)
            if isinstance(stored, Tensor):
                is_init = stored.clone()
                is_init[starts] = True
                info[self.init_key] = is_init
        return info

    def state_dict(self) -> dict[str, Any]:
        """Nothing: clips are drawn independently."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""

    def dumps(self, path: Any) -> None:
        """Nothing to save."""

    def loads(self, path: Any) -> None:
        """Nothing to load."""

    def _empty(self) -> None:
        """Nothing to forget."""

    def __repr__(self) -> str:
        return (
            f"ClipSampler(slice_len={self.slice_len}, num_slices={self.num_slices}, "
            f"strict_length={self.strict_length}, weighting={self.weighting!r})"
        )
