"""Clips: runs of consecutive steps that never cross from one episode into another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl._utils import _replace_last
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt.data.checkpoint import load_state, save_state
from torchrl_mt.data.memory import to_device
from torchrl_mt.data.sampling import draw_integers, draw_uniform, episode_storage, require_episodes
from torchrl_mt.data.schema import Entry
from torchrl_mt.data.selection import Selection
from torchrl_mt.data.signature import ConstructorSignature
from torchrl_mt.data.steps import Path, path_of
from torchrl_mt.data.storage import EpisodeStorage
from torchrl_mt.data.strides import check_strides
from torchrl_mt.data.table import Weight, weigh

__all__ = ["ClipSampler", "Selector"]

Selector = Callable[[int, EpisodeStorage, int, int], Tensor]
"""``selector(step, storage, num_slices, span)``: the clips to sample, int64 ``[num_slices]``."""


class ClipSampler(Sampler):
    """Samples clips of consecutive steps, with the conventions of TorchRL's ``SliceSampler``.

    ``batch_size`` counts steps and the sample is flat: ``[num_slices * slice_len]``, one clip after
    the other; or one clip per row, with ``layout="clips"``. The last step of each clip is marked
    truncated and done, the first one as ``is_init`` if the data has that entry: in the sample
    itself, in the shape and dtype that these entries are stored with. The cost of choosing clips does
    not grow with the number of stored steps.

    Args:
        slice_len: steps per clip. Exclusive with ``num_slices``.
        num_slices: clips per sample, each of ``batch_size // num_slices`` steps.
        stride: how many stored steps ``K`` make one sampled step, so that a clip spans
            ``slice_len * K`` stored ones. Entries are those of the first of the ``K`` steps and,
            under ``"next"``, of the last; ``action`` is all ``K``, one after the other (``[K * A]``
            for ``[A]``), ``("next", "reward")`` their sum, and a done flag is set if one of the
            ``K`` is. The sample's ``index`` is that of the first step. A ``("next", "return")``,
            too, is the last step's: to learn from returns, store them outside ``"next"``, with
            ``DiscountedReturn(gamma, out_key="return")``.
        strict_length: if False, an episode shorter than a clip's span is sampled whole, and the
            sample may be shorter than ``batch_size``. Of such an episode a stride takes as many
            times ``K`` steps as there are; one of fewer than ``K`` is never sampled.
        selector: chooses the clips in place of a random draw: ``selector(step, storage,
            num_slices, span)`` gives int64 ``[num_slices]`` clip indices in
            ``[0, storage.num_clips(span))``, which count the clips of ``span`` stored steps from
            the oldest on. ``step`` is how many samples were drawn before. Only with
            ``strict_length=True`` and ``weighting="clip"``.
        weighting: ``"clip"`` draws uniformly from all clips, ``"episode"`` an episode first and
            then one of its clips (as ``SliceSampler`` does).
        layout: ``"flat"`` gives ``[num_slices * slice_len]`` steps, ``"clips"``
            ``[num_slices, slice_len]`` (only with ``strict_length=True``).
        truncated_key: where the end of a clip is marked; None marks nothing.
        init_key: where the start of a clip is marked; None leaves that entry as it is.

    Raises:
        TypeError: unless exactly one of ``slice_len`` and ``num_slices`` is given, or if
            ``selector`` cannot be called.
        ValueError: if an argument is out of range, or does not go with another.

    Examples:
        >>> sampler = ClipSampler(slice_len=16)
        >>> sampler
        ClipSampler(slice_len=16, num_slices=None, stride=1, strict_length=True,
            weighting='clip', layout='flat')

        Every clip in turn, oldest first:

        >>> def in_turn(step, storage, num_slices, span):
        ...     clips = torch.arange(step * num_slices, (step + 1) * num_slices)
        ...     return clips % storage.num_clips(span)
        >>> sampler = ClipSampler(slice_len=16, selector=in_turn)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        stride: int = 1,
        strict_length: bool = True,
        selector: Selector | None = None,
        weighting: Literal["clip", "episode"] = "clip",
        layout: Literal["flat", "clips"] = "flat",
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
    ) -> None:
        if (slice_len is None) == (num_slices is None):
            raise TypeError(
                f"give exactly one of slice_len and num_slices, got slice_len={slice_len} and "
                f"num_slices={num_slices}"
            )
        counts = {"slice_len": slice_len, "num_slices": num_slices, "stride": stride}
        for name, value in counts.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if weighting not in ("clip", "episode"):
            raise ValueError(f'weighting must be "clip" or "episode", got {weighting!r}')
        if layout not in ("flat", "clips"):
            raise ValueError(f'layout must be "flat" or "clips", got {layout!r}')
        if layout == "clips" and not strict_length:
            raise ValueError(
                'layout="clips" needs clips of one length: use strict_length=True, or layout="flat"'
            )
        if selector is not None and not callable(selector):
            raise TypeError(
                f"selector must be a function (step, storage, num_slices, span) -> clip indices, "
                f"got {type(selector).__name__}"
            )
        if selector is not None and (not strict_length or weighting != "clip"):
            raise ValueError(
                f"selector chooses among the clips of full length: use strict_length=True and "
                f'weighting="clip", got strict_length={strict_length} and weighting={weighting!r}'
            )
        self.slice_len = slice_len
        self.num_slices = num_slices
        self.stride = stride
        self.strict_length = strict_length
        self.selector = selector
        self.weighting = weighting
        self.layout = layout
        self.truncated_key = truncated_key
        self.init_key = init_key
        self._flags: list[Path] = []
        """Truncated, terminated and done, beside each other."""
        if truncated_key is not None:
            others = (_replace_last(truncated_key, name) for name in ("terminated", "done"))
            self._flags = [path_of(key) for key in (truncated_key, *others)]
        self._known_ends: tuple[Any, Any] = (None, None)
        """The flags of :meth:`_ends_of` that were last asked for, and for what."""
        self._least = 1 if strict_length else stride
        """Stored steps that an episode must have to be sampled whole."""
        self._step = 0
        """Samples drawn before the next one."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw clips of ``batch_size`` steps in all.

        Args:
            storage: an :class:`~torchrl_mt.data.EpisodeStorage`.
            batch_size: number of steps.

        Returns:
            int64 ``[batch_size]`` handles of the steps (``[num_slices, slice_len]`` with
            ``layout="clips"``), and an empty ``info``: the marks are in what is read.

        Raises:
            TypeError: if ``storage`` is another kind of storage, or ``selector`` gives no tensor.
            RuntimeError: if ``batch_size`` is not divisible into clips, or no stored episode holds
                a clip.
            ValueError: if ``selector`` gives another shape or dtype, or clips that are not stored,
                or ``stride`` meets an action, reward or done flag whose shape varies.
        """
        storage = episode_storage(storage, self)
        num_slices, slice_len = self._clips(batch_size)
        with storage.lock:
            require_episodes(storage, "clips")
            if self.stride > 1 and storage.schema is not None:
                check_strides(storage.schema)
            episodes, offsets = self._draw(storage, num_slices, slice_len * self.stride)
            spans: int | Tensor = slice_len
            if not self.strict_length:
                held = storage.table.lengths[episodes] // self.stride
                if bool((held < slice_len).any()):
                    spans = held.clamp_max(slice_len)
            index, selection = storage.select(
                episodes, offsets, spans, stride=self.stride, rectangular=self.layout == "clips"
            )
            self._mark(storage, selection, spans)
            self._step += 1
            return index, self._facts(storage, episodes, offsets, spans, index)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether a clip of the length that ``batch_size`` asks for is stored."""
        storage = episode_storage(storage, self)
        _, slice_len = self._clips(batch_size)
        return storage.num_clips((slice_len if self.strict_length else 1) * self.stride) > 0

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        storage = episode_storage(storage, self)
        _, slice_len = self._clips(batch_size)
        weight: Weight = "clips" if self.strict_length else "clips_or_whole"
        return storage.table.total(weight, slice_len * self.stride, self._least)

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
        table, least = storage.table, self._least
        if self.weighting == "clip":
            weight: Weight = "clips" if self.strict_length else "clips_or_whole"
            total = self._total(storage, weight, span)
            if self.selector is None:
                units = draw_integers(total, num, self._rng)
            else:
                chosen = self.selector(self._step, storage, num, span)
                units = _checked(chosen, num, span, total)
            return table.locate(units, weight, span, least)
        reach = span if self.strict_length else least
        units = draw_integers(self._total(storage, "episodes", reach), num, self._rng)
        episodes, _ = table.locate(units, "episodes", reach)
        clips = weigh(table.lengths[episodes], span, "clips_or_whole")
        return episodes, (draw_uniform(num, self._rng) * clips).long().clamp_max(clips - 1)

    def _facts(
        self,
        storage: EpisodeStorage,
        episodes: Tensor,
        offsets: Tensor,
        spans: int | Tensor,
        index: Tensor,
    ) -> dict[Any, Any]:
        """What else the sample's ``info`` says about the clips that were drawn."""
        return {}

    def _total(self, storage: EpisodeStorage, weight: Weight, span: int) -> int:
        """Units to draw from, at least one."""
        total = storage.table.total(weight, span, self._least)
        if not total:
            needed = span if self.strict_length else self._least
            raise RuntimeError(
                f"no stored episode holds a clip of {needed} steps: the longest has "
                f"{int(storage.table.lengths.max())}; use shorter clips, a smaller stride or "
                f"strict_length=False"
            )
        return total

    def _mark(self, storage: EpisodeStorage, selection: Selection, spans: int | Tensor) -> None:
        """Mark where clips begin and end in what is about to be read.

        ``truncated`` marks the ends of clips only; ``done`` and ``is_init`` are the stored flags,
        set at the ends and starts of clips, too; ``terminated`` is as stored. Each has the shape and
        dtype that it is stored with; one that is not is like the first of truncated, terminated and
        done that is.
        """
        read, schema = selection.read, storage.schema
        assert schema is not None
        if self._flags:
            truncated, terminated, done = self._flags
            entries = [schema.entries.get(path, _FLAG) for path in self._flags]
            like = next((e for e in entries if e is not _FLAG and e.kind == "dense"), _FLAG)
            ends = self._ends_of(len(selection.plan), spans, like, storage.device)
            read[truncated] = ends.clone()
            if entries[1] is _FLAG:
                read[terminated] = torch.zeros_like(ends)
            flag = storage.read_selected(selection, done)
            if not isinstance(flag, Tensor):
                read[done] = ends.clone()
            elif flag.dtype == ends.dtype == torch.bool and flag.shape == ends.shape:
                read[done] = flag | ends
            else:
                flag[_edges(spans, flag.device)[1]] = True
        if self.init_key is not None and path_of(self.init_key) in schema.entries:
            begins = storage.read_selected(selection, self.init_key)
            if isinstance(begins, Tensor):
                begins[_edges(spans, begins.device)[0]] = True

    def _ends_of(
        self, steps: int, spans: int | Tensor, like: Entry, device: torch.device
    ) -> Tensor:
        """Flags ``[steps, *shape]`` of the ends of clips; kept for clips of one length."""
        known = (steps, spans, like.shape, like.dtype, device)
        if isinstance(spans, int) and self._known_ends[0] == known:
            return self._known_ends[1]
        ends = torch.zeros((steps, *like.shape), dtype=like.dtype, device=device)
        ends[_edges(spans, device)[1]] = True
        if isinstance(spans, int):
            self._known_ends = (known, ends)
        return ends

    def state_dict(self) -> dict[str, Any]:
        """How many samples were drawn."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the count of samples where :meth:`state_dict` left it."""
        self._step = state_dict["step"]

    def dumps(self, path: Any) -> None:
        """Save the state in the folder ``path``."""
        save_state(self.state_dict(), path)

    def loads(self, path: Any) -> None:
        """Load the state from the folder ``path``."""
        self.load_state_dict(load_state(path))

    def _empty(self) -> None:
        """Nothing to forget: the count of samples goes on."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(slice_len={self.slice_len}, num_slices={self.num_slices}, "
            f"stride={self.stride}, strict_length={self.strict_length}, "
            f"weighting={self.weighting!r}, layout={self.layout!r})"
        )


_FLAG = Entry("dense", (1,), torch.bool)
"""What flags look like if none is stored."""


def _edges(spans: int | Tensor, device: torch.device) -> tuple[Any, Any]:
    """Where the first and the last steps of the clips are in a sample."""
    if isinstance(spans, int):
        return slice(0, None, spans), slice(spans - 1, None, spans)
    after = spans.cumsum(0)
    return to_device(after - spans, device), to_device(after - 1, device)


def _checked(clips: Any, num_slices: int, span: int, stored: int) -> Tensor:
    """What a selector gave, on the CPU, if it is what a selector must give."""
    if not isinstance(clips, Tensor):
        raise TypeError(
            f"selector must give an int64 tensor of clip indices, got {type(clips).__name__}"
        )
    if clips.dtype != torch.int64 or clips.shape != (num_slices,):
        raise ValueError(
            f"selector must give clip indices of dtype torch.int64 and shape ({num_slices},), got "
            f"{clips.dtype} and {tuple(clips.shape)}"
        )
    clips = clips.detach().cpu()
    if bool(((clips < 0) | (clips >= stored)).any()):
        raise ValueError(
            f"selector must give clip indices in [0, {stored}): so many clips of {span} steps are "
            f"stored; got values from {int(clips.min())} to {int(clips.max())}"
        )
    return clips
