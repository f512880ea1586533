"""Selectors: functions that choose the clips of a :class:`~torchrl_mt.data.ClipSampler`.

They count clips: ``storage.num_clips(span)`` are stored, and clip 0 is the first of the oldest
episode. The ready-made ones draw with the buffer's generator: the same seed gives the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.checks import check_positive_integer
from torchrl_mt.data.samplers.draws import draw_integers, draw_order, draw_uniform
from torchrl_mt.data.storage import EpisodeStorage

__all__ = [
    "Selector",
    "check_selector",
    "check_step",
    "choose_clips",
    "linear_mix",
    "recent",
    "uniform",
]

Selector = Callable[[int, EpisodeStorage, int, int], Tensor]
"""``selector(step, storage, num_slices, span)`` returns clip indices, int64 ``[num_slices]``."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def uniform(step: int, storage: EpisodeStorage, num_slices: int, span: int) -> Tensor:
    """Draw uniformly from all clips, as a ``ClipSampler`` without a selector does.

    It is a selector itself: ``ClipSampler(slice_len=16, selector=uniform)``.

    Args:
        step: ignored.
        storage: the storage.
        num_slices: number of clips to draw.
        span: stored steps per clip.

    Returns:
        int64 ``[num_slices]``: clip indices.

    Raises:
        RuntimeError: if no stored episode holds a clip.

    Examples:
        >>> from tensordict import TensorDict
        >>> storage = EpisodeStorage(100)
        >>> _ = storage.append(TensorDict({"action": torch.arange(10)}, [10]))
        >>> clips = uniform(0, storage, 1000, span=4)
        >>> int(clips.min()), int(clips.max())
        (0, 6)
    """
    return draw_integers(_count(storage, span), num_slices, storage.generator)


def recent(n: int, until: int | None = None) -> Selector:
    """Return a selector that draws uniformly from the newest clips, and later from all.

    Args:
        n: number of newest clips to draw from; all, if fewer are stored.
        until: step (see ``ClipSampler.step``) from which on it draws from all clips; None for never.

    Raises:
        ValueError: if ``n`` is not a positive integer, or ``until`` a negative one.

    Examples:
        >>> from tensordict import TensorDict
        >>> storage, selector = EpisodeStorage(100), recent(2, until=1000)
        >>> _ = storage.append(TensorDict({"action": torch.arange(10)}, [10]))
        >>> sorted(set(selector(999, storage, 100, 4).tolist()))
        [5, 6]
        >>> sorted(set(selector(1000, storage, 100, 4).tolist()))
        [0, 1, 2, 3, 4, 5, 6]
    """
    n = check_positive_integer("n", n)
    return partial(_recent, n=n, until=None if until is None else check_step("until", until))


def linear_mix(first: Selector, second: Selector, steps: int) -> Selector:
    """Return a selector that goes over from one selector to another.

    The share of clips that ``second`` chooses grows linearly with the step (see ``ClipSampler.step``),
    from 0 at step 0 to 1 at step ``steps``, and stays there. A batch has that share up to one clip, and
    exactly that share on average. The clips of both come in random order.

    Args:
        first: the selector to begin with.
        second: the selector to end with.
        steps: number of samples that this takes.

    Raises:
        TypeError: if ``first`` or ``second`` is not callable.
        ValueError: if ``steps`` is not a positive integer.

    Examples:
        >>> from tensordict import TensorDict
        >>> storage = EpisodeStorage(100)
        >>> _ = storage.append(TensorDict({"action": torch.arange(100)}, [100]))
        >>> def oldest(step, storage, num_slices, span):
        ...     return torch.zeros(num_slices, dtype=torch.int64)
        >>> selector = linear_mix(oldest, recent(1), steps=1000)
        >>> [int((selector(step, storage, 100, 1) == 99).sum()) for step in (0, 500, 1000)]
        [0, 50, 100]
    """
    check_selector("first", first)
    check_selector("second", second)
    steps = check_positive_integer("steps", steps)
    return partial(_linear_mix, first=first, second=second, steps=steps)


def _recent(
    step: int, storage: EpisodeStorage, num_slices: int, span: int, *, n: int, until: int | None
) -> Tensor:
    """Draw from the newest ``n`` clips; from step ``until`` on, from all."""
    stored = _count(storage, span)
    among = stored if until is not None and step >= until else min(n, stored)
    return draw_integers(among, num_slices, storage.generator) + (stored - among)


def _linear_mix(
    step: int,
    storage: EpisodeStorage,
    num_slices: int,
    span: int,
    *,
    first: Selector,
    second: Selector,
    steps: int,
) -> Tensor:
    """Draw the step's share of clips with ``second``, and the others with ``first``."""
    # Rounded up or down at random, so that the mean is the share even of few clips.
    share = min(step / steps, 1.0) * num_slices
    of_second = min(int(share + float(draw_uniform(1, storage.generator))), num_slices)
    parts = [
        choose_clips(selector, step, storage, number, span)
        for selector, number in ((first, num_slices - of_second), (second, of_second))
        if number
    ]
    return torch.cat(parts)[draw_order(num_slices, storage.generator)]


def _count(storage: EpisodeStorage, span: int) -> int:
    """Count the stored clips; ``RuntimeError`` if there are none."""
    stored = storage.num_clips(span)
    if not stored:
        raise RuntimeError(f"no stored episode holds a clip of {span} steps: use shorter clips.")
    return stored


# ---- calling selectors --------------------------------------------------------------------------


def check_selector(name: str, selector: Any) -> None:
    """Refuse a selector that is not callable (``TypeError``)."""
    if not callable(selector):
        raise TypeError(
            f"{name} must be a function (step, storage, num_slices, span) -> clip indices, "
            f"got {type(selector).__name__}."
        )


def check_step(name: str, step: Any) -> int:
    """Refuse anything but an integer of at least 0 (``ValueError``); return it as an ``int``."""
    if isinstance(step, (bool, np.bool_)) or not isinstance(step, (int, np.integer)) or step < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {step!r}.")
    return int(step)


def choose_clips(
    selector: Selector, step: int, storage: EpisodeStorage, num_slices: int, span: int
) -> Tensor:
    """Call a selector and check what it returns.

    Returns:
        int64 ``[num_slices]`` on the CPU: clip indices in ``[0, storage.num_clips(span))``.

    Raises:
        TypeError: if it returns no tensor or array.
        ValueError: if it returns another shape or dtype, or clips that are not stored.
    """
    chosen: Any = selector(step, storage, num_slices, span)
    given = torch.from_numpy(chosen) if isinstance(chosen, np.ndarray) else chosen
    if not isinstance(given, Tensor):
        raise TypeError(
            f"selector must give clip indices as a tensor or array of integers, got "
            f"{type(chosen).__name__}."
        )
    if given.dtype not in _INTEGERS or given.shape != (num_slices,):
        raise ValueError(
            f"selector must give integers of shape ({num_slices},), got {given.dtype} and "
            f"{tuple(given.shape)}."
        )
    clips, stored = given.detach().cpu().long(), storage.num_clips(span)
    if bool(((clips < 0) | (clips >= stored)).any()):
        raise ValueError(
            f"selector must give clip indices in [0, {stored}): so many clips of {span} steps are "
            f"stored; got values from {int(clips.min())} to {int(clips.max())}."
        )
    return clips
