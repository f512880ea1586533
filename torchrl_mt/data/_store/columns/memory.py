"""Allocation of stored tensors: in a device's memory, or in memory-mapped files."""

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

__all__ = ["Memory"]


class Memory:
    """Allocates uninitialized tensors for the storage and for samples.

    Args:
        device: device of the tensors.
        scratch_dir: folder for files that hold stored tensors; None for the device's memory. The
            files have no name: their space is freed with the tensors, or with the process.

    Raises:
        ValueError: if ``scratch_dir`` is used with another device than the CPU.
    """

    def __init__(self, device: torch.device, scratch_dir: str | Path | None = None) -> None:
        self.device = device
        self.is_cpu = device.type == "cpu"
        self.large = LEAST if self.is_cpu else math.inf
        """Fewest bytes of a sample for which :meth:`for_sample` is faster than fresh memory."""
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
        """Allocate a tensor to store."""
        size = math.prod(shape)
        dtype = dtype or torch.get_default_dtype()
        if not size or not self.is_cpu:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if self.scratch_dir is None:
            # NumPy asks the system for huge pages, which makes random reads faster.
            block = torch.from_numpy(np.empty(size * dtype.itemsize, dtype=np.uint8))
            return block.view(dtype).view(shape)
        data = torch.frombuffer(_mapped(self.scratch_dir, size * dtype.itemsize), dtype=torch.uint8)
        return data.view(dtype).view(shape)

    def for_sample(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate a vector for a sample of at least ``large`` bytes."""
        return self._pool.empty(size, dtype)


def _mapped(folder: str | Path, nbytes: int) -> mmap.mmap:
    """Map a new file without a name into memory."""
    with tempfile.TemporaryFile(dir=folder) as file:
        # A full disk is an error now, not a crash when the memory is written.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes)
