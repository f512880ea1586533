"""A sampler of clips: runs of consecutive steps of one episode."""

from __future__ import annotations

import sys
from typing import Any, Literal

import numpy as np
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt._hosts.torchrl import ConstructorSignature
from torchrl_mt.checks import check_choice, check_positive_integer
from torchrl_mt.data._store.clip_marks import clip_marks
from torchrl_mt.data._store.selection import Clips
from torchrl_mt.data._store.strides import check_strides
from torchrl_mt.data._store.table import Choice, EpisodeTable, Unit, search
from torchrl_mt.data.checkpoint import SavesState
from torchrl_mt.data.samplers.draws import (
    draw_integers,
    draw_uniform,
    episode_storage,
    require_episodes,
)
from torchrl_mt.data.samplers.selectors import Selector, check_selector, check_step, choose_clips
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["ClipSampler"]


class ClipSampler(SavesState, Sampler):
    """Samples clips of consecutive steps, with the conventions of TorchRL's ``SliceSampler``.

    ``batch_size`` counts steps. The last step of each clip is marked as truncated and done, and the
    first one as ``is_init`` if the data has that entry. Drawing takes the same time, however many steps
    are stored.

    Args:
        slice_len: steps per clip. Exclusive with ``num_slices``.
        num_slices: clips per sample, each of ``batch_size // num_slices`` steps.
        stride: number of stored steps that make one sampled step (frame skip); see :doc:`/replay`.
        strict_length: False samples an episode shorter than a clip whole, so that a sample may have
            fewer than ``batch_size`` steps.
        pad_output: whether to pad shorter clips to ``slice_len`` by repeating their last step.
            ``("collector", "mask")``, bool, is then false for padding. Needs ``strict_length=False`` or
            ``span``.
        span: how far a clip may overhang its episode, in steps; the overhang is cut off. With True,
            every step of an episode of ``slice_len`` or more is drawn equally often, and with
            ``strict_length=False`` those of shorter ones nearly so. A tuple of two has one value for
            each side. Needs ``stride=1``.
        burn_in: number of steps at the start of a clip that only warm up a recurrent state:
            ``"burn_in"``, bool, is true for them. A clip at the start of its episode has none.
        selector: chooses the clips instead of a random draw, such as :func:`~torchrl_mt.data.recent`:
            ``selector(step, storage, num_slices, span)`` returns ``num_slices`` integers in ``[0,
            storage.num_clips(span))``, which count the clips of ``span`` stored steps, oldest first.
            Needs ``strict_length=True``, ``weighting="clip"`` and no ``span`` of the sampler.
        weighting: ``"clip"`` draws uniformly from all clips; ``"episode"`` draws an episode and then one
            of its clips, as ``SliceSampler`` does.
        layout: ``"flat"`` samples ``[num_slices * slice_len]`` steps, one clip after the other,
            ``"clips"`` ``[num_slices, slice_len]`` (needs clips of one length, or padded ones).
        truncated_key: flag that marks the end of a clip; None marks nothing.
        init_key: flag that marks the start of a clip, also under ``"next"``; None marks nothing.

    Raises:
        TypeError: unless exactly one of ``slice_len`` and ``num_slices`` is given, or if ``selector`` is
            not callable.
        ValueError: if an argument is out of range or does not fit another.

    Examples:
        >>> ClipSampler(slice_len=16)
        ClipSampler(slice_len=16, num_slices=None, stride=1, strict_length=True,
            weighting='clip', layout='flat')
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        stride: int = 1,
        strict_length: bool = True,
        pad_output: bool = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        burn_in: int = 0,
        selector: Selector | None = None,
        weighting: Literal["clip", "episode"] = "clip",
        layout: Literal["flat", "clips"] = "flat",
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
    ) -> None:
        if (slice_len is None) == (num_slices is None):
            raise TypeError(
                f"give exactly one of slice_len and num_slices, got slice_len={slice_len} and "
                f"num_slices={num_slices}."
            )
        if slice_len is not None:
            slice_len = check_positive_integer("slice_len", slice_len)
        if num_slices is not None:
            num_slices = check_positive_integer("num_slices", num_slices)
        stride = check_positive_integer("stride", stride)
        check_choice("weighting", weighting, ("clip", "episode"))
        check_choice("layout", layout, ("flat", "clips"))
        self.span = _both_sides(span, slice_len)
        varying = not strict_length or any(self.span)
        if pad_output and not varying:
            raise ValueError(
                "pad_output=True pads clips that are shorter than others: use it with "
                "strict_length=False or with span."
            )
        if layout == "clips" and varying and not pad_output:
            raise ValueError(
                'layout="clips" needs clips of one length: use strict_length=True without span, '
                'pad_output=True, or layout="flat".'
            )
        if any(self.span) and stride > 1:
            raise ValueError(f"span needs stride=1, got span={span} and stride={stride}.")
        burn_in = check_step("burn_in", burn_in)
        if slice_len is not None:
            _check_burn_in(burn_in, slice_len)
        if selector is not None:
            check_selector("selector", selector)
        if selector is not None and (varying or weighting != "clip"):
            raise ValueError(
                f"selector chooses among the clips of full length: use strict_length=True, no span "
                f'and weighting="clip", got strict_length={strict_length}, span={span} and '
                f"weighting={weighting!r}."
            )
        self.slice_len = slice_len
        self.num_slices = num_slices
        self.stride = stride
        self.strict_length = strict_length
        self.pad_output = pad_output
        self.burn_in = burn_in
        self.selector = selector
        self.weighting = weighting
        self.layout = layout
        self.truncated_key = truncated_key
        self.init_key = init_key
        self._least = 1 if strict_length else stride
        """Fewest stored steps of an episode that is sampled whole."""
        self._step = 0

    @property
    def step(self) -> int:
        """The ``step`` that the next sample gives to the selector: the number of samples so far.

        Set it to the learner's step to go on from there. A buffer with ``prefetch`` has drawn its next
        samples already.

        Raises:
            ValueError: if it is set to anything but an integer of at least 0.
        """
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = check_step("step", value)

    def sample(
        self, storage: Storage, batch_size: int, *, step: int | None = None
    ) -> tuple[Tensor, dict[Any, Any]]:
        """Draw clips of ``batch_size`` steps in all.

        Args:
            storage: an :class:`~torchrl_mt.data.EpisodeStorage`.
            batch_size: number of steps.
            step: :attr:`step` of this sample, which goes on from ``step + 1``; None for the next one.

        Returns:
            int64 ``[batch_size]`` handles of the steps (``[num_slices, slice_len]`` with
            ``layout="clips"``), and an empty ``info``. The handles tell the marks to whoever reads them.

        Raises:
            TypeError: if ``storage`` is another kind of storage, or ``selector`` returns no tensor.
            RuntimeError: if ``batch_size`` is not divisible into clips, or no stored episode holds
                a clip.
            ValueError: if ``selector`` returns another shape or dtype, or clips that are not stored,
                or if an action, reward or done flag has varying shapes and ``stride`` is above 1, or
                if ``step`` is negative or no integer.
        """
        storage = episode_storage(storage, self)
        if step is not None:
            step = check_step("step", step)
        num_slices, slice_len, clips = self._clips(batch_size)
        with storage.lock:
            step = self._step if step is None else step
            if self.stride > 1 and storage.schema is not None:
                check_strides(storage.schema.entries)
            episodes, offsets = self._draw(storage, num_slices, clips, step)
            cut = self._cut(storage.table, episodes, offsets, slice_len)
            marks = clip_marks(
                self.truncated_key, self.init_key, self.stride, self.pad_output, self.burn_in > 0
            )
            index = storage.select(cut, marks=marks, rectangular=self.layout == "clips")
            self._step = step + 1
            return index, self._info(storage, cut, index)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether a clip of the length that ``batch_size`` asks for is stored."""
        storage = episode_storage(storage, self)
        _, slice_len, _ = self._clips(batch_size)
        return storage.num_clips((slice_len if self.strict_length else 1) * self.stride) > 0

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        storage = episode_storage(storage, self)
        _, _, clips = self._clips(batch_size)
        return storage.table.total(clips)

    def _clips(self, batch_size: int) -> tuple[int, int, Choice]:
        """Return the number of clips, the steps per clip and the :class:`Choice` to draw from."""
        name = "slice_len" if self.slice_len is not None else "num_slices"
        divisor = self.slice_len if self.slice_len is not None else self.num_slices
        assert divisor is not None
        if batch_size < 1 or batch_size % divisor:
            raise RuntimeError(
                f"batch_size counts steps and must be a positive multiple of {name}, got "
                f"batch_size={batch_size} and {name}={divisor}."
            )
        other = batch_size // divisor
        num, steps = (other, divisor) if self.slice_len is not None else (divisor, other)
        if self.burn_in:
            _check_burn_in(self.burn_in, steps)
        left, right = self.span
        beyond = (steps - 1 if left is True else left, steps - 1 if right is True else right)
        unit: Unit = "clips" if self.strict_length else "clips_or_whole"
        return num, steps, Choice(steps * self.stride, unit, self._least, beyond)

    def _cut(
        self, table: EpisodeTable, episodes: np.ndarray, offsets: np.ndarray, slice_len: int
    ) -> Clips:
        """Cut drawn clips to the steps inside their episodes."""
        if self.strict_length and not any(self.span):
            return Clips(episodes, offsets, slice_len, burn_in=self.burn_in)
        held = table.lengths.numpy()[episodes]
        spans = np.minimum(held // self.stride, slice_len)
        if any(self.span):
            stops = np.minimum(offsets + spans, held)
            offsets = np.maximum(offsets, 0)
            spans = stops - offsets
        same = bool((spans == slice_len).all())
        width = slice_len if self.pad_output else None
        return Clips(episodes, offsets, slice_len if same else spans, width, self.burn_in)

    def _draw(
        self, storage: EpisodeStorage, num: int, clips: Choice, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw clips: episode positions and first steps within the episode, negative before it."""
        table = storage.table
        if self.weighting == "clip":
            before, total = self._units(storage, clips)
            if self.selector is None:
                units = draw_integers(total, num, self._rng)
            else:
                with storage.drawing_with(self._rng):
                    units = choose_clips(self.selector, step, storage, num, clips.span)
            episodes, offsets = search(before, units.numpy())
        else:
            holding = Choice(clips.span if self.strict_length else self._least, "episodes")
            before, total = self._units(storage, holding)
            episodes, _ = search(before, draw_integers(total, num, self._rng).numpy())
            own = clips._replace(unit="clips_or_whole", least=1)
            number = own.units(table.lengths.numpy()[episodes])
            drawn = draw_uniform(num, self._rng).numpy() * number
            offsets = np.minimum(drawn.astype(np.int64), number - 1)
        if clips.beyond[0]:
            outside = np.minimum(table.lengths.numpy()[episodes], clips.span) - 1
            offsets = offsets - np.minimum(outside, clips.beyond[0])
        return episodes, offsets

    def _info(self, storage: EpisodeStorage, clips: Clips, index: Tensor) -> dict[Any, Any]:
        """Return the sample's ``info``."""
        return {}

    def _units(self, storage: EpisodeStorage, choice: Choice) -> tuple[np.ndarray, int]:
        """Count the units before each episode and in all; ``RuntimeError`` if there are none."""
        before = storage.table.before(choice)
        total = int(before[-1] - before[0])
        if not total:
            require_episodes(storage, "clips")
            needed = choice.span if self.strict_length else self._least
            raise RuntimeError(
                f"no stored episode holds a clip of {needed} steps: the longest has "
                f"{int(storage.table.lengths.max())}; use shorter clips, a smaller stride or "
                f"strict_length=False."
            )
        return before, total

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._step = state_dict["step"]

    def _empty(self) -> None:
        """Do nothing: the count of samples continues."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(slice_len={self.slice_len}, num_slices={self.num_slices}, "
            f"stride={self.stride}, strict_length={self.strict_length}, "
            f"weighting={self.weighting!r}, layout={self.layout!r})"
        )


def _both_sides(span: Any, slice_len: int | None) -> tuple[bool | int, bool | int]:
    """Return how many steps clips may reach before and after their episode; True is no limit."""
    sides = span if isinstance(span, tuple) else (span, span)
    most = (slice_len or sys.maxsize) - 1
    if len(sides) != 2 or any(type(s) not in (bool, int) or not 0 <= s <= most for s in sides):
        raise ValueError(
            f"span must be a bool, a number of steps below slice_len, or a tuple of two of them, "
            f"got {span!r}."
        )
    return sides


def _check_burn_in(burn_in: int, slice_len: int) -> None:
    """Refuse clips that would be burn-in only."""
    if burn_in >= slice_len:
        raise ValueError(
            f"burn_in must be less than the steps of a clip, {slice_len}, of which it is a part; got "
            f"{burn_in}."
        )
