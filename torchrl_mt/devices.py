"""Copies between devices; each copy from a device waits until the device has caught up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    """Return detached tensors on the CPU; those of one device come in one copy.

    Examples:
        >>> on_cpu(torch.tensor([1, 2]), torch.tensor(True))
        [tensor([1, 2]), tensor(True)]
    """
    away = [x.detach() for x in tensors if not x.is_cpu]
    if len(away) < 2 or any(x.device != away[0].device for x in away):
        return [x.detach().cpu() for x in tensors]
    parts = [x.contiguous().reshape(-1).view(torch.uint8) for x in away]
    joined = torch.cat(parts).cpu().split([len(part) for part in parts])
    # Copies, because a view of another type must begin at a multiple of its size.
    copies = (
        part.clone().view(x.dtype).view(x.shape) for part, x in zip(joined, away, strict=True)
    )
    return [x.detach() if x.is_cpu else next(copies) for x in tensors]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; a copy from the CPU does not wait for the device.

    A tensor in pinned memory is waited for: its owner may change it before it is copied.
    """
    if tensor.is_cpu and device.type == "cuda" and not tensor.is_pinned():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor of numbers on a device without waiting for it."""
    return sent(torch.tensor(values, dtype=dtype, device="cpu"), device)
