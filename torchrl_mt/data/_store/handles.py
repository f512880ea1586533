"""Indices of stored steps: handles, which stay with a step, or positions by age.

Every step has a number: how many steps were ever stored before it. Its handle is ``HANDLES`` plus that
number, and no other step ever has it. Smaller integers count the stored steps from the oldest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["HANDLES", "integers", "resolve_index"]

HANDLES = 1 << 52
"""The smallest handle: above every position by age, and exact as a float64."""


def resolve_index(index: Any, first: int, stored: int) -> tuple[Tensor, torch.Size | None]:
    """Resolve an index to positions by age.

    Args:
        index: an int, a slice, a range, a mask ``[stored]`` or integers of any shape: handles, or
            positions by age, from 0 for the oldest or -1 for the newest step.
        first: number of the oldest stored step.
        stored: number of stored steps.

    Returns:
        int64 ``[n]`` on the CPU, positions in ``[0, stored)``; and the shape of the index, None for a
        single step.

    Raises:
        TypeError: if ``index`` is none of these.
        IndexError: if a step is not stored (any more), or a mask has another shape.

    Examples:
        >>> resolve_index([-1, 0, HANDLES + 12], 10, 5)
        (tensor([4, 0, 2]), torch.Size([3]))
    """
    if isinstance(index, slice):
        part = range(*index.indices(stored))
        if not part:
            return torch.zeros(0, dtype=torch.int64, device="cpu"), torch.Size([0])
        stop = part.start + len(part) * part.step
        return torch.arange(part.start, stop, part.step, device="cpu"), torch.Size([len(part)])
    if index is None or index is Ellipsis or isinstance(index, (str, tuple)):
        raise TypeError(f"index must be an int, a slice, a mask or integers, got {index!r}.")
    if isinstance(index, range):
        index = list(index)
    wanted = index.cpu() if isinstance(index, Tensor) else torch.from_numpy(np.asarray(index))
    if wanted.dtype == torch.bool:
        if wanted.shape != (stored,):
            raise IndexError(f"a mask must have shape {(stored,)}, got {tuple(wanted.shape)}.")
        wanted = wanted.nonzero().squeeze(1)
    given = integers(wanted, "index").reshape(-1)
    places = given
    if given.numel() and int(given.max()) >= HANDLES:
        is_handle = given >= HANDLES
        places = torch.where(is_handle, given - (HANDLES + first), given)
        gone = is_handle & ((places < 0) | (places >= stored))
        if bool(gone.any()):
            raise IndexError(
                f"index has handles of {int(gone.sum())} steps that are not stored (any more), such "
                f"as {int(given[gone][0])}: the {stored} stored steps have the handles "
                f"from {HANDLES + first}."
            )
    if given.numel() and (int(places.min()) < -stored or int(places.max()) >= stored):
        raise IndexError(
            f"index must lie in [{-stored}, {stored}): {stored} steps are stored, got values "
            f"from {int(places.min())} to {int(places.max())}."
        )
    places = torch.where(places < 0, places + stored, places)
    return places, wanted.shape if wanted.ndim else None


def integers(values: Tensor, name: str) -> Tensor:
    """Convert integers to int64; raise ``TypeError`` for another dtype."""
    if not values.numel():
        return values.long()
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name} must be of an integer dtype, got {values.dtype}.")
    return values.long()
