"""Where stored tensors live: the memory of a device, or files that are mapped into memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.buffer_pool import LEAST, BufferPool

__all__ = ["Memory", "to_device"]


class Memory:
    """Gives out tensors without values: to keep, or for a sample.

    Args:
        device: where they are.
        scratch_dir: the folder for files that hold them; None for the device's memory. The files
            have no name: the disk space comes back with the tensors, or with the process, however
            it ends.
    """

    def __init__(self, device: torch.device, scratch_dir: str | Path | None = None) -> None:
        self.device = device
        self.is_cpu = device.type == "cpu"
        self.large = LEAST if self.is_cpu else math.inf
        """Bytes of a sample from which on fresh memory takes longer than :meth:`for_sample`."""
        self._pool = BufferPool()
        self.scratch_dir = scratch_dir
        if scratch_dir is None:
            return
        if not self.is_cpu:
            raise ValueError(
                f"scratch_dir holds files that are mapped into the CPU's memory: use device='cpu', "
                f"got {str(device)!r}."
            )
        self.scratch_dir = Path(scratch_dir).absolute()
        self.scratch_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.scratch_dir).close()  # A folder without access fails now.

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """A tensor whose values are yet to be written."""
        size = math.prod(shape)
        dtype = dtype or torch.get_default_dtype()
        if not size or not self.is_cpu:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if self.scratch_dir is None:
            # NumPy asks the system for huge pages, which makes reading at random places faster.
            block = torch.from_numpy(np.empty(size * dtype.itemsize, dtype=np.uint8))
            return block.view(dtype).view(shape)
        data = torch.frombuffer(_mapped(self.scratch_dir, size * dtype.itemsize), dtype=torch.uint8)
        return data.view(dtype).view(shape)

    def for_sample(self, size: int, dtype: torch.dtype) -> Tensor:
        """A vector to read a sample of at least ``large`` bytes into."""
        return self._pool.empty(size, dtype)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor's values on ``device``, without waiting for the device."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _mapped(folder: str | Path, nbytes: int) -> mmap.mmap:
    """A file of so many bytes in a folder, without a name, mapped into memory."""
    with tempfile.TemporaryFile(dir=folder) as file:
        # A full disk is an error now, not a crash when the memory is written.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes)
