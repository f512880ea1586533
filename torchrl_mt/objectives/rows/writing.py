"""Writing entries to rows: all or none.

Obstacles are found before anything is computed; a failed write is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import nn

from torchrl_mt.objectives.rows.keys import as_path


def check_writable(rows: TensorDictBase, keys: Sequence[NestedKey]) -> None:
    """Refuse rows that cannot take tensors under these keys.

    Examples:
        >>> from tensordict import TensorDict
        >>> check_writable(TensorDict({"weights": torch.ones(2)}, [2]), [("weights", "full")])
        Traceback (most recent call last):
        ValueError: rows cannot be given the entry ('weights', 'full'): 'weights' is a Tensor there, ...
    """
    if rows.is_locked:
        raise ValueError(
            "rows must not be locked, because entries are written to them: call rows.unlock_()."
        )
    # A shallow copy for trial writes.
    trial = rows.copy()
    for key in keys:
        path = as_path(key)
        for node, depth in _nodes(rows, path):
            if node.is_locked:
                raise ValueError(
                    f"rows cannot be given the entry {key!r}: part of what would hold it is locked; "
                    "unlock it, or give a copy that is not, which shares the tensors: rows.copy()."
                )
            there = node.get(path[depth], None)
            is_last = depth == len(path) - 1
            if there is not None and isinstance(there, TensorDictBase) == is_last:
                blocking = path[: depth + 1] if depth else path[0]
                raise ValueError(
                    f"rows cannot be given the entry {key!r}: {blocking!r} is a {type(there).__name__} "
                    "there, which would have to go; rename or drop it, or choose another key with "
                    "set_keys()."
                )
        try:
            trial.set(key, torch.zeros((), device=rows.device).expand(*rows.batch_size))
        except Exception as error:
            raise ValueError(f"rows cannot be given the entry {key!r}: {error}") from error


@contextmanager
def undone_on_failure(
    rows: TensorDictBase, keys: Sequence[NestedKey], transform: object = None
) -> Iterator[None]:
    """Restore entries of rows, and the buffers of a module, if the block raises.

    Args:
        rows: The rows.
        keys: Keys of the entries to restore.
        transform: A module, or a bound method of one, whose buffers to restore.
    """
    entries = [
        (node, path[depth], node.get(path[depth], None))
        for path in map(as_path, keys)
        for node, depth in _nodes(rows, path)
    ]
    module = getattr(transform, "__self__", transform)
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in (module.modules() if isinstance(module, nn.Module) else ())
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    except BaseException:
        for node, name, there in entries:
            if there is None:
                node.pop(name, None)
            elif node.get(name, None) is not there:
                node.set(name, there)
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                setattr(owner, name, buffer.copy_(value))
        raise


def _nodes(
    rows: TensorDictBase, path: tuple[str, ...], depth: int = 0
) -> Iterator[tuple[TensorDictBase, int]]:
    """Yield every tensordict on the path to an entry, in all parts of a stack, with its depth."""
    if isinstance(rows, LazyStackedTensorDict):
        for part in rows.tensordicts:
            yield from _nodes(part, path, depth)
        return
    yield rows, depth
    inner = rows.get(path[depth], None)
    if depth + 1 < len(path) and isinstance(inner, TensorDictBase):
        yield from _nodes(inner, path, depth + 1)
