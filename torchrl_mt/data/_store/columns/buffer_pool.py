"""Memory for large samples that is used again once no tensor refers to it any more.

Fresh memory has to be mapped and zeroed page by page, which for a sample of images costs several
times as much as copying them.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

__all__ = ["LEAST", "BufferPool"]

LEAST = 1 << 20
"""Bytes from which on memory is worth keeping."""
_PARTS = 8
"""A block is at most one of so many parts larger than what was asked for: all of it travels where a
tensor is saved or sent."""
_SPARE = 4
"""Blocks kept for the next samples, at most."""


class _Buffer(np.ndarray):
    """A block that tensors share: it dies with the last of them."""


class BufferPool:
    """Gives out tensors on the CPU whose memory comes back by itself.

    A block is given out again only when every tensor on it, views included, is gone: whoever
    keeps a sample keeps its memory.

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
        """Blocks by their id, the one given back last at the end."""

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """A vector of ``size`` values that are yet to be written."""
        nbytes = size * dtype.itemsize
        block = self._block(nbytes)
        buffer = block.view(_Buffer)
        weakref.finalize(buffer, self._give_back, block).atexit = False
        return torch.from_numpy(buffer)[:nbytes].view(dtype)

    def _block(self, nbytes: int) -> np.ndarray:
        """A spare block of about this size, or a new one."""
        # Threads may give back and take at any time: each step on the dict is atomic.
        for key, block in reversed(list(self._spare.items())):
            fits = nbytes <= block.nbytes and _PARTS * block.nbytes <= (_PARTS + 1) * nbytes
            if fits and self._spare.pop(key, None) is not None:
                return block
        return np.empty(nbytes, dtype=np.uint8)

    def _give_back(self, block: np.ndarray) -> None:
        self._spare[id(block)] = block
        for key in list(self._spare)[:-_SPARE]:
            self._spare.pop(key, None)
