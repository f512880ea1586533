"""Where stored tensors live: the memory of a device, or files that are mapped into memory."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from torchrl_mt.data.leases import Leases

__all__ = ["Memory", "to_device"]


class Memory:
    """Gives out tensors without values: to keep, or for a sample.

    Args:
        device: where they are.
        scratch_dir: the folder for files that hold them; None for the device's memory. The files
            are scratch: they go when the tensors do, or with the process.

    Raises:
        ValueError: if files are asked for on another device than the CPU.
    """

    def __init__(self, device: torch.device, scratch_dir: str | Path | None = None) -> None:
        self.device = device
        self._leases = Leases()
        self.scratch_dir = scratch_dir
        self._folder: Path | None = None
        if scratch_dir is None:
            return
        if device.type != "cpu":
            raise ValueError(
                f"scratch_dir holds files that are mapped into the CPU's memory: use device='cpu', "
                f"got {str(device)!r}"
            )
        Path(scratch_dir).mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="episodes-", dir=scratch_dir))
        self._names = count()
        weakref.finalize(self, _remove, self._folder, os.getpid())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """A tensor whose values are yet to be written.

        Raises:
            OSError: if the disk has no room for it.
        """
        size = math.prod(shape)
        if self._folder is None or not size:
            return torch.empty(shape, dtype=dtype, device=self.device)
        dtype = dtype or torch.get_default_dtype()
        path = self._folder / f"{next(self._names)}.memmap"
        nbytes = size * dtype.itemsize
        _reserve(path, nbytes)
        data = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        data = data.view(dtype).view(shape)
        weakref.finalize(data, _remove, path, os.getpid())
        return data

    def for_sample(self, size: int, dtype: torch.dtype) -> Tensor | None:
        """A vector to read a sample into; None where fresh memory does as well."""
        if self.device.type == "cpu" and Leases.worthwhile(size * dtype.itemsize):
            return self._leases.empty(size, dtype)
        return None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor's values on ``device``, without waiting for the device."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _reserve(path: Path, nbytes: int) -> None:
    """Make a file of so many bytes: a full disk is an error now, not a crash when it is written."""
    with open(path, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError:
                path.unlink()
                raise
        else:
            file.truncate(nbytes)


def _remove(path: Path, owner: int) -> None:
    """Delete a file or folder, unless this is a fork of the process that made it."""
    if os.getpid() != owner:
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
