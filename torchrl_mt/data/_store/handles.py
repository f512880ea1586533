"""Indices of stored steps: handles, which stay with a step, or positions by age.

Every step has a number: how many steps were ever stored before it. Its handle is ``HANDLES`` plus that
number, and no other step ever has it. The handle of a sampled step also tells its place in its clip, so
that whoever reads it, reads the same. Smaller integers count the stored steps from the oldest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BURN_IN",
    "END",
    "HANDLES",
    "KINDS",
    "PADDING",
    "START",
    "Resolved",
    "integers",
    "kind_of",
    "numbers_of",
    "of_kind",
    "resolve_index",
]

HANDLES = 1 << 52
"""The smallest handle: above every position by age, and exact as a float64."""
_NUMBER = (1 << 42) - 1
"""Bits of the step's number."""
KINDS = 64
"""How many kinds of marks a storage can tell apart; 0 stands for none."""
_KIND_SHIFT = 42
START = 1 << 48
"""The step is the first of a sampled clip."""
END = 1 << 49
"""The step is the last of a sampled clip."""
PADDING = 1 << 50
"""The step repeats the last one of its clip."""
BURN_IN = 1 << 51
"""The step only warms up a recurrent state."""


class Resolved(NamedTuple):
    """An index of stored steps, resolved."""

    places: Tensor
    """int64 ``[n]`` on the CPU, positions by age in ``[0, stored)``."""
    shape: torch.Size | None
    """Shape of the index; None for a single step."""
    given: Tensor
    """int64 ``[n]`` on the CPU, the index."""


def of_kind(kind: int) -> int:
    """Return what is added to the handles of steps that are sampled with marks of this kind."""
    return kind << _KIND_SHIFT


def kind_of(given: Tensor) -> int:
    """Return the kind of marks that these steps of samples have; 0 for other steps.

    Raises:
        IndexError: if they have different marks.
    """
    if not given.numel() or int(given.max()) < HANDLES:
        return 0
    kinds = (torch.where(given >= HANDLES, given, 0) >> _KIND_SHIFT) & (KINDS - 1)
    kind = int(kinds[0])
    if bool((kinds != kind).any()):
        raise IndexError(
            "index has steps of samples with different marks (other keys, stride, padding or burn-in): "
            "read those of each sample by themselves, or all without marks, at storage.places(index)."
        )
    return kind


def numbers_of(handles: Any) -> Any:
    """Return the numbers of steps by their handles, whatever else those tell."""
    return handles & _NUMBER


def resolve_index(index: Any, first: int, stored: int) -> Resolved:
    """Resolve an index to positions by age.

    Args:
        index: an int, a slice, a range, a mask ``[stored]`` or integers of any shape: handles, or
            positions by age, from 0 for the oldest or -1 for the newest step.
        first: number of the oldest stored step.
        stored: number of stored steps.

    Raises:
        TypeError: if ``index`` is none of these.
        IndexError: if a step is not stored (any more), or a mask has another shape.

    Examples:
        >>> resolve_index([-1, 0, HANDLES + 12], 10, 5).places
        tensor([4, 0, 2])
    """
    if isinstance(index, slice):
        part = range(*index.indices(stored))
        stop = part.start + len(part) * part.step
        places = torch.arange(part.start, stop, part.step, device="cpu")
        return Resolved(places, places.shape, places)
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
        places = torch.where(is_handle, numbers_of(given) - first, given)
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
    return Resolved(places, wanted.shape if wanted.ndim else None, given)


def integers(values: Tensor, name: str) -> Tensor:
    """Convert integers to int64; raise ``TypeError`` for another dtype."""
    if not values.numel():
        return values.long()
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name} must be of an integer dtype, got {values.dtype}.")
    return values.long()
