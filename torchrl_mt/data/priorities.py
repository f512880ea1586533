"""Priorities as they are given: checked whole before anything is changed, one per clip after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["check_index", "check_priority", "reduce_by_clip"]


def check_index(index: Any) -> Tensor:
    """The index as an int64 tensor, of the same memory if it is one.

    Raises:
        TypeError: if it does not hold integers.
    """
    index = torch.as_tensor(index)
    if not index.numel():
        return index.long()
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"index must hold integers, got {index.dtype}")
    return index.long()


def check_priority(priority: Any, index: Tensor, dtype: torch.dtype) -> Tensor:
    """The priorities, flat and on the CPU: one for each element of ``index``, or for each row.

    Args:
        priority: numbers, not negative: of the shape of ``index``, or ``[N]``, or one, or one for
            each row of ``index``.
        index: ``N`` integers.
        dtype: what they are converted to.

    Raises:
        ValueError: if there are as many as neither, or one is negative, infinite or NaN.

    Examples:
        >>> check_priority([1, 2], torch.tensor([[0, 1], [5, 6]]), torch.float32)
        tensor([1., 2.])
    """
    given = torch.as_tensor(priority)
    if given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"priority must hold real numbers, got {given.dtype}")
    values = given.detach().to("cpu", dtype)
    if not bool(((values >= 0) & values.isfinite()).all()):
        worst = values[~((values >= 0) & values.isfinite())][0]
        raise ValueError(
            f"priority must be finite and not negative, in {dtype}; got {float(worst)}: use "
            f"td_error.abs(), say"
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
        f"{tuple(values.shape)} for index of shape {tuple(index.shape)}"
    )


def reduce_by_clip(clips: Tensor, values: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """One value for each clip.

    Args:
        clips: int64 ``[N]``, the clip that each value is for.
        values: floating point ``[N]``.
        reduction: ``"max"``, ``"min"``, ``"mean"`` or ``"median"`` (of an even number, the lower
            middle one, as ``torch.median``).

    Returns:
        int64 ``[n]``, the clips in ascending order, and ``[n]``, the value of each.

    Examples:
        >>> reduce_by_clip(torch.tensor([7, 3, 7]), torch.tensor([1.0, 2.0, 5.0]), "max")
        (tensor([3, 7]), tensor([2., 5.]))
    """
    if reduction == "mean":
        unique, group, count = clips.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(unique.shape, dtype=torch.float64, device="cpu")
        return unique, (sums.index_add_(0, group, values.double()) / count).to(values.dtype)
    # In order of clip, and of value within each: every other reduction is one of the values.
    order = values.argsort()
    order = order[clips[order].argsort(stable=True)]
    unique, count = clips[order].unique_consecutive(return_counts=True)
    last = count.cumsum(0) - 1
    if reduction == "max":
        chosen = last
    else:
        chosen = last - count + 1
        if reduction == "median":
            chosen = chosen + (count - 1) // 2
    return unique, values[order][chosen]
