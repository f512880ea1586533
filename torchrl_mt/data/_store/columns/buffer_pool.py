"""Memory for large samples that is reused once no tensor refers to it.

The system maps and zeroes fresh memory page by page, which for a sample of images costs several times
as much as copying them.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

__all__ = ["LEAST", "BufferPool"]

LEAST = 1 << 20
"""Fewest bytes for which reuse is worth it."""
_PARTS = 8
"""A block exceeds the request by at most 1 part in 8, as saving or sending a tensor takes all of it."""
_SPARE = 4
"""Most blocks kept for the next samples."""


class _Buffer(np.ndarray):
    """A block that tensors share: it dies with the last of them."""


class BufferPool:
    """Allocates tensors on the CPU whose memory returns to the pool by itself.

    A block is reused only when every tensor on it, views included, is gone.

    Examples:
        >>> pool = BufferPool()
        >>> tensor = pool.empty(1 << 18, torch.float32)
        >>> place = tensor.data_ptr()
        >>> view = tensor[5:].view(-1)
        >>> del tensor
        >>> pool.empty(1 << 18, torch.float32).data_ptr() == place
        False
        >>> del view
        >>> pool.empty(1 << 18, torch.float32).data_ptr() == place
        True
    """

    def __init__(self) -> None:
        self._spare: dict[int, np.ndarray] = {}
        """Spare blocks by id, the last returned one at the end."""

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized vector of ``size`` values."""
        nbytes = size * dtype.itemsize
        block = self._block(nbytes)
        buffer = block.view(_Buffer)
        weakref.finalize(buffer, self._give_back, block).atexit = False
        return torch.from_numpy(buffer)[:nbytes].view(dtype)

    def _block(self, nbytes: int) -> np.ndarray:
        """Take a spare block of about this size, or a new one."""
        # Threads may take and return blocks at any time; each step on the dict is atomic.
        for key, block in reversed(list(self._spare.items())):
            fits = nbytes <= block.nbytes and _PARTS * block.nbytes <= (_PARTS + 1) * nbytes
            if fits and self._spare.pop(key, None) is not None:
                return block
        return np.empty(nbytes, dtype=np.uint8)

    def _give_back(self, block: np.ndarray) -> None:
        self._spare[id(block)] = block
        for key in list(self._spare)[:-_SPARE]:
            self._spare.pop(key, None)
