"""Continuity: a step continues another if its entries are the other's ``"next"`` entries, bit for bit.

This is TED's rule for every ``k`` with a ``("next", k)``. Entries that were seen to follow it count: a
changed next entry became the later entry, in at least four of five pairs of steps. Before any entry was
seen to, all count that were not seen to break the rule. If none counts, every step continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.schema import bits
from torchrl_mt.data._store.steps import Column, Path, Rows, Steps, rows_at
from torchrl_mt.data._writing.ted import FLAGS, INIT

__all__ = [
    "Bits",
    "Pairs",
    "Values",
    "bits_at",
    "comparable",
    "counting",
    "differ",
    "learned",
    "states",
]

Bits = np.ndarray | list[np.ndarray]
"""Bits of an entry at ``n`` steps: integers ``[n, w]``, or one array a step."""

Values = Callable[[Path], Bits]
"""Function from an entry to its bits at some steps."""

Pairs = dict[Path, tuple[int, int]]
"""How many pairs of a step and the following one agreed and differed, by entry."""

_TRUST = 4
"""Pairs that must agree for each pair that differs."""


def comparable(steps: Steps, without: Iterable[Path] = ()) -> tuple[Path, ...]:
    """List the entries ``k`` that can be compared with their ``("next", k)``.

    Done flags, ``"is_init"``, the entries ``without`` and Python objects are left out.
    """
    found = []
    for path, column in steps.columns.items():
        key = path[1:]
        if path[0] != "next" or path in without or key in without or key not in steps.columns:
            continue
        if key[-1] in FLAGS or key == INIT:
            continue
        if _has_bits(steps.columns[key]) and _has_bits(column):
            found.append(key)
    return tuple(found)


def learned(
    pairs: Pairs, paths: Iterable[Path], later: Values, earlier: Values, number: int
) -> Pairs:
    """Return ``pairs`` with ``number`` more: bits of the later and of the earlier steps, by entry."""
    new = dict(pairs)
    for path in paths if number else ():
        agreed, differed = new.get(path, (0, 0))
        told = earlier(("next", *path))
        odd = differ(later(path), told)
        # An entry that never changes proves nothing.
        agrees = ~odd if agreed else ~odd & differ(earlier(path), told)
        new[path] = agreed + int(np.sum(agrees)), differed + int(np.sum(odd))
    return new


def counting(pairs: Pairs, paths: Iterable[Path]) -> tuple[tuple[Path, ...], bool]:
    """List the entries that count; also tell whether they were seen to follow TED."""
    seen = {path: pairs.get(path, (0, 0)) for path in paths}
    kept = [path for path, (agreed, differed) in seen.items() if differed * _TRUST <= agreed]
    proven = [path for path in kept if seen[path][0]]
    return tuple(proven or kept), bool(proven)


def states(paths: tuple[Path, ...], bits_of: Values, number: int) -> list[tuple[bytes, ...]]:
    """Return the bytes of all entries at each of ``number`` steps."""
    columns = [[row.tobytes() for row in bits_of(path)] for path in paths]
    return [*zip(*columns, strict=True)] if paths else [()] * number


def differ(a: Bits, b: Bits) -> np.ndarray:
    """Return at which of ``n`` steps bits differ: bool ``[n]``."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape:
        found: np.ndarray = (a != b).any(1)
        return found
    return np.array([x.tobytes() != y.tobytes() for x, y in zip(a, b, strict=True)])


def bits_at(column: Column, at: np.ndarray) -> Bits:
    """Return the bits of a column of tensors at the positions ``at``, int64 ``[n]``."""
    if isinstance(column, Rows):
        return [bits(column.items[i]).cpu().numpy() for i in at.tolist()]
    assert isinstance(column, Tensor)
    if not column.is_cpu:
        column, at = rows_at(column, torch.from_numpy(at)).cpu(), np.arange(len(at))
    array: np.ndarray = bits(column).numpy().reshape(len(column), -1)
    return array.take(at, 0) if array.flags.c_contiguous else array[at]


def _has_bits(column: Column) -> TypeGuard[Tensor | Rows]:
    """Whether a column has strided tensors."""
    tensors = column.items if isinstance(column, Rows) else [column]
    return all(isinstance(t, Tensor) and t.layout == torch.strided for t in tensors)
