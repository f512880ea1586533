"""Entries are written to rows all together or not at all.

What stands in the way is found before anything is computed; what fails nevertheless is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import nn


def as_path(key: NestedKey) -> tuple[str, ...]:
    """A key as the names on the way to its entry."""
    return (key,) if isinstance(key, str) else key


def check_distinct(keys: Mapping[str, NestedKey]) -> None:
    """Refuse keys, by name, of which two are the same or one lies below the other.

    Examples:
        >>> check_distinct({"kl": "kl", "weight": ("kl", "full")})
        Traceback (most recent call last):
        ValueError: kl and weight must have keys of which none lies in the other, got ...
    """
    for (one, a), (other, b) in combinations(keys.items(), 2):
        if all(x == y for x, y in zip(as_path(a), as_path(b), strict=False)):
            raise ValueError(
                f"{one} and {other} must have keys of which none lies in the other, got {a!r} and "
                f"{b!r}."
            )


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
    # On a shallow copy, which is written to as the rows will be.
    trial = rows.copy()
    for key in keys:
        path = as_path(key)
        if any(node.is_locked for node, _ in _places(rows, path)):
            raise ValueError(
                f"rows cannot be given the entry {key!r}: part of what would hold it is locked; "
                "unlock it, or give a copy that is not, which shares the tensors: rows.copy()."
            )
        for depth in range(1, len(path) + 1):
            there = rows.get(path[:depth], None)
            leaf = there is None or not isinstance(there, TensorDictBase)
            if there is not None and leaf != (depth == len(path)):
                blocking = path[0] if depth == 1 else path[:depth]
                what = type(there).__name__
                raise ValueError(
                    f"rows cannot be given the entry {key!r}: {blocking!r} is a {what} there, which "
                    "would have to go; rename or drop it, or choose another key with set_keys()."
                )
        try:
            trial.set(key, torch.zeros((), device=rows.device).expand(*rows.batch_size))
        except Exception as error:
            raise ValueError(f"rows cannot be given the entry {key!r}: {error}") from error


@contextmanager
def restored_on_failure(rows: TensorDictBase, keys: Sequence[NestedKey]) -> Iterator[None]:
    """Take back what was written to rows under these keys if what is inside fails."""
    before = [
        (node, name, node.get(name, None))
        for key in keys
        for node, name in _places(rows, as_path(key))
    ]
    try:
        yield
    except BaseException:
        for node, name, there in before:
            if there is None:
                node.pop(name, None)
            elif node.get(name, None) is not there:
                node.set(name, there)
        raise


def _places(rows: TensorDictBase, path: tuple[str, ...]) -> Iterator[tuple[TensorDictBase, str]]:
    """Every tensordict on the way to an entry, all parts of a stack, and the name that follows in it."""
    if isinstance(rows, LazyStackedTensorDict):
        for part in rows.tensordicts:
            yield from _places(part, path)
        return
    yield rows, path[0]
    inner = rows.get(path[0], None)
    if len(path) > 1 and isinstance(inner, TensorDictBase):
        yield from _places(inner, path[1:])


@contextmanager
def unchanged_on_failure(call: object) -> Iterator[None]:
    """Give a module, or the one of a bound method, its buffers again if what is inside fails."""
    module = getattr(call, "__self__", call)
    saved = [
        (owner, name, buffer, buffer.clone())
        for owner in (module.modules() if isinstance(module, nn.Module) else ())
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for owner, name, buffer, value in saved:
                setattr(owner, name, buffer.copy_(value))
        raise
