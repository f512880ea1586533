"""Writing entries to rows: all together or not at all.

What stands in the way is found before anything is computed; what fails nevertheless is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import nn

from torchrl_mt.objectives.rows.keys import as_path


def check_writable(rows: TensorDictBase, keys: Sequence[NestedKey]) -> None:
    """Refuse rows to which tensors could not be written under these keys.

    Examples:
        >>> from tensordict import TensorDict
        >>> check_writable(TensorDict({"weights": torch.ones(2)}, [2]), [("weights", "full")])
        Traceback (most recent call last):
        ValueError: rows cannot be given the entry ('weights', 'full'): 'weights' is a Tensor there, ...
    """
    if rows.is_locked:
        raise ValueError(
            "rows must not be locked, for entries are written to them: rows.unlock_()."
        )
    # A shallow copy, which is written to as the rows will be.
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
    """Undo what is done to rows under some keys, and to a module's buffers, if what is inside fails.

    Args:
        rows: What is written to.
        keys: Of the entries that are written.
        transform: A module, or a bound method of one, whose buffers change.
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
    """Every tensordict on the way to an entry, all parts of a stack, and the path's place in it."""
    if isinstance(rows, LazyStackedTensorDict):
        for part in rows.tensordicts:
            yield from _nodes(part, path, depth)
        return
    yield rows, depth
    inner = rows.get(path[depth], None)
    if depth + 1 < len(path) and isinstance(inner, TensorDictBase):
        yield from _nodes(inner, path, depth + 1)
