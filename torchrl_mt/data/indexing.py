"""What an index of stored steps means: the i-th oldest step, or several of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["resolve_index"]


def resolve_index(index: Any, stored: int) -> tuple[Tensor, torch.Size | None]:
    """The steps that an index stands for.

    Args:
        index: an int, a slice, a range, a mask ``[stored]`` or integers of any shape.
        stored: number of stored steps.

    Returns:
        int64 ``[n]`` on the CPU, in ``[0, stored)``; and the shape that was asked for, None for a
        single step.

    Raises:
        IndexError: if a step is not stored, or a mask has another shape.
        TypeError: if it is no index.

    Examples:
        >>> resolve_index([-1, 0], 5)
        (tensor([4, 0]), torch.Size([2]))
    """
    if isinstance(index, slice):
        part = range(*index.indices(stored))
        if not part:
            return torch.zeros(0, dtype=torch.int64, device="cpu"), torch.Size([0])
        stop = part.start + len(part) * part.step
        return torch.arange(part.start, stop, part.step, device="cpu"), torch.Size([len(part)])
    if index is None or index is Ellipsis or isinstance(index, (str, tuple)):
        raise TypeError(f"index must be an int, a slice, a mask or integers, got {index!r}")
    if isinstance(index, range):
        index = list(index)
    wanted = index.cpu() if isinstance(index, Tensor) else torch.from_numpy(np.asarray(index))
    if wanted.dtype == torch.bool:
        if wanted.shape != (stored,):
            raise IndexError(f"a mask must have shape {(stored,)}, got {tuple(wanted.shape)}")
        wanted = wanted.nonzero().squeeze(1)
    if wanted.numel() == 0:
        wanted = wanted.long()
    if wanted.is_floating_point() or wanted.is_complex():
        raise TypeError(f"index must be of an integer dtype, got {wanted.dtype}")
    steps = wanted.reshape(-1).long()
    if steps.numel() and (int(steps.min()) < -stored or int(steps.max()) >= stored):
        raise IndexError(
            f"index must lie in [{-stored}, {stored}): {stored} steps are stored, got values "
            f"from {int(steps.min())} to {int(steps.max())}"
        )
    return torch.where(steps < 0, steps + stored, steps), wanted.shape if wanted.ndim else None
