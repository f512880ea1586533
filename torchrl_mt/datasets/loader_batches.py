"""Batches of clips in a ``DataLoader``: collated as they were read, and sent as one piece.

A loader's process sends every tensor of a TensorDict by itself, which takes longer than reading a small
batch. One buffer of all tensors is sent at once. What the loader returns is an ordinary TensorDict
either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.data import get_worker_info

from torchrl_mt._hosts.torch import collate_tensordicts_with, shared_bytes
from torchrl_mt.data._store.steps import Path, Steps, pack

__all__ = ["ClipBatch"]

_ALIGNED = 64
_SMALL = 1 << 17
"""Bytes that are faster through a pipe than in shared memory."""

_Place = tuple[int, torch.dtype, torch.Size]
"""First byte of a tensor in the buffer, its dtype and its shape."""


class ClipBatch(Sequence):
    """Clips that were read at once: a sequence of TensorDicts ``[slice_len]``."""

    def __init__(self, clips: TensorDictBase) -> None:
        self.clips = clips

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, i: Any) -> Any:
        return self.clips[i]


class _Parcel:
    """A TensorDict in one buffer; unpickled, it is a TensorDict again."""

    def __init__(self, size: torch.Size, columns: Mapping[Path, Tensor]) -> None:
        end, places = 0, dict[Path, _Place]()
        for path, column in columns.items():
            places[path] = end, column.dtype, column.shape
            end += -(-column.nbytes // _ALIGNED) * _ALIGNED
        data = bytearray(max(end, 1)) if end <= _SMALL else shared_bytes(end)
        for path, part in _parts(data, places).items():
            part.copy_(columns[path])
        self._sent = size, data, places

    def __reduce__(self) -> Any:
        return _unpacked, self._sent


def _unpacked(
    size: torch.Size, data: bytearray | Tensor, places: Mapping[Path, _Place]
) -> TensorDictBase:
    """Return the TensorDict of a parcel."""
    steps = Steps(size.numel(), {**_parts(data, places)})
    return pack(steps, batch_size=size)


def _parts(data: bytearray | Tensor, places: Mapping[Path, _Place]) -> dict[Path, Tensor]:
    """Return the tensors in a buffer."""
    buffer = data if isinstance(data, Tensor) else torch.frombuffer(data, dtype=torch.uint8)
    return {
        path: buffer[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for path, (begin, dtype, shape) in places.items()
    }


def _columns(path: Path, node: Any, size: torch.Size) -> Iterator[tuple[Path, Tensor | None]]:
    """Iterate over the tensors of a node; None for what a parcel cannot hold."""
    is_node = type(node) is TensorDict
    if is_node and node.batch_size == size and node.device is None and not any(node.names):
        for name, value in node.items():
            yield from _columns((*path, name), value, size)
    else:
        plain = type(node) is Tensor and node.layout == torch.strided and node.is_cpu
        yield path, node.detach().flatten(0, len(size) - 1) if plain else None


def _collate(batch: Sequence[Any]) -> Any:
    if isinstance(batch, ClipBatch):
        clips: Any = batch.clips
    else:
        clips = TensorDict.maybe_dense_stack([*batch])
    if get_worker_info() is None or type(clips) is not TensorDict:
        return clips
    columns = dict(_columns((), clips, clips.batch_size))
    if not all(isinstance(column, Tensor) for column in columns.values()):
        return clips
    return _Parcel(clips.batch_size, columns)  # type: ignore[arg-type]


collate_tensordicts_with(_collate)
