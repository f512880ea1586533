"""Checks of priority updates, and their reduction to one priority per clip."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.checks import as_tensor

__all__ = ["check_priority", "reduce_by_clip", "reduce_rows"]


def check_priority(priority: Any, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Check priorities; return them flat, on the CPU, one per element or row of ``index``.

    Args:
        priority: numbers of at least 0: of the shape of ``index``, ``[N]``, a single one, or one per
            row of ``index``.
        index: ``N`` integers.
        dtype: dtype of the result.

    Raises:
        ValueError: if it has another shape, or a negative, infinite, NaN or bool value.
        TypeError: if it does not hold real numbers.

    Examples:
        >>> check_priority([1, 2], torch.tensor([[0, 1], [5, 6]]), torch.float32)
        tensor([1., 2.])
    """
    given = as_tensor("priority", priority)
    if given.dtype == torch.bool:
        raise ValueError(f"priority must hold real numbers, got {given.dtype}.")
    values = given.detach().to("cpu", dtype)
    numbers = values.numpy()
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < math.inf):
        worst = values[~((values >= 0) & values.isfinite())][0]
        raise ValueError(
            f"priority must be finite and not negative, in {dtype}; got {float(worst)}: use "
            f"td_error.abs(), say."
        )
    if values.numel() == 1:
        return values.flatten().expand(index.numel())
    same = values.numel() == index.numel() and (
        values.ndim == 1 or index.ndim == 1 or values.squeeze().shape == index.squeeze().shape
    )
    if same or (index.ndim > 1 and values.squeeze().shape == index.shape[:1]):
        return values.flatten()
    raise ValueError(
        f"priority must be one number, or one for each element of index: got priority of shape "
        f"{tuple(values.shape)} for index of shape {tuple(index.shape)}."
    )


def reduce_rows(values: Tensor, left_out: np.ndarray, reduction: str) -> Tensor:
    """Reduce each row to one value.

    Args:
        values: floating point ``[n, L]``.
        left_out: bool ``[n, L]``, true for values that do not count.
        reduction: as for :func:`reduce_by_clip`.

    Returns:
        floating point ``[n]``.

    Examples:
        >>> reduce_rows(torch.tensor([[1.0, 3.0, 9.0]]), np.array([[False, False, True]]), "mean")
        tensor([2.])
    """
    counted = values.masked_fill(torch.from_numpy(left_out), math.nan) if left_out.any() else values
    if reduction in ("mean", "median"):
        return counted.nanmean(1) if reduction == "mean" else counted.nanmedian(1).values
    reduce = np.fmax.reduce if reduction == "max" else np.fmin.reduce
    # NumPy reduces long rows much faster than short ones.
    return torch.from_numpy(reduce(np.ascontiguousarray(counted.numpy().T)))


def reduce_by_clip(clips: Tensor, values: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """Reduce values to one per clip.

    Args:
        clips: int64 ``[N]``, clip of each value.
        values: floating point ``[N]``.
        reduction: ``"max"``, ``"min"``, ``"mean"`` or ``"median"`` (as ``torch.median``, the lower
            middle one of an even number).

    Returns:
        int64 ``[n]``, the clips in ascending order, and ``[n]``, their values.

    Examples:
        >>> reduce_by_clip(torch.tensor([7, 3, 7]), torch.tensor([1.0, 2.0, 5.0]), "max")
        (tensor([3, 7]), tensor([2., 5.]))
    """
    of, given = clips.numpy(), values.numpy()
    order = of.argsort()
    ordered = of[order]
    if (ordered[1:] != ordered[:-1]).all():
        return torch.from_numpy(ordered), torch.from_numpy(given[order])
    if reduction == "mean":
        unique, group, count = clips.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(unique.shape, dtype=torch.float64, device="cpu")
        return unique, (sums.index_add_(0, group, values.double()) / count).to(values.dtype)
    # Sorted by clip, then value: every other reduction picks one of the values.
    order = np.lexsort((given, of))
    of = of[order]
    ends = np.flatnonzero(np.append(of[1:] != of[:-1], True)) if len(of) else order
    first = np.append(0, ends[:-1] + 1)[: len(ends)]
    chosen = {"max": ends, "min": first, "median": (first + ends) // 2}[reduction]
    return torch.from_numpy(of[ends]), torch.from_numpy(given[order[chosen]])
