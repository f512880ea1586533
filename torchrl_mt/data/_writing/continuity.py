"""Whether a step goes on from another: its entries are the other's next entries, bit for bit.

TED says so of every ``k`` with a ``("next", k)``, but not every environment holds to it. Which entries
do is learned: one is *proven* once its next entry was seen to become the later entry with another value,
*exempt* once steps that a row of a batch gives one after the other differ in it, more than one in five
of them, and *unknown* before. A step goes on if no proven entry differs, and no unknown one does unless
a proven one agrees. Where nothing can be compared, every step goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.schema import bits
from torchrl_mt.data._store.steps import Column, Path, Rows, Steps
from torchrl_mt.data._writing.ted import FLAGS

__all__ = ["Continuity", "Values", "Verdict", "bits_at", "compared"]

_TRUST = 4
"""How many pairs must agree for each that does not."""

_ENOUGH = 256
"""Pairs that agree, after which no more are looked at until something does not go on."""

Values = Callable[[Path], "np.ndarray | None"]
"""The bits of an entry at ``n`` steps, ``[n, w]``; None where they cannot be compared."""


@dataclass
class _Record:
    """What was seen of an entry."""

    agreed: int = 0
    """Pairs in which the next entry became the later one, once that was seen with another value."""
    differed: int = 0
    """Pairs that follow each other in a row in which it did not."""

    @property
    def exempt(self) -> bool:
        return self.differed * _TRUST > self.agreed

    @property
    def proven(self) -> bool:
        return self.agreed > 0 and not self.exempt


@dataclass
class Verdict:
    """Which of ``n`` steps go on from the step before."""

    goes_on: np.ndarray | None = None
    """Bool ``[n]``; None if all do."""
    differing: dict[Path, np.ndarray] = field(default_factory=dict)
    """Bool ``[n]`` of the entries that count: the steps that differ in them."""

    def reason(self, i: int) -> Path | None:
        """An entry in which step ``i`` differs."""
        return next((path for path, odd in self.differing.items() if odd[i]), None)


class Continuity:
    """What was learned of the entries of some steps.

    Args:
        records: what :meth:`records` gave.
    """

    def __init__(self, records: Mapping[Path, tuple[int, int]] | None = None) -> None:
        self._records = {path: _Record(*seen) for path, seen in (records or {}).items()}

    def records(self) -> dict[Path, tuple[int, int]]:
        """What was learned, as numbers."""
        return {path: (seen.agreed, seen.differed) for path, seen in self._records.items()}

    def knows(self, paths: Iterable[Path]) -> bool:
        """Whether enough was seen of some entries."""
        known = map(self._records.get, paths)
        return all(record is not None and record.agreed >= _ENOUGH for record in known)

    def learn(self, paths: Iterable[Path], later: Values, earlier: Values) -> None:
        """Learn from steps that one row of a batch gave one after the other; see :meth:`judge`."""
        for record, _, odd in self._seen(paths, later, earlier):
            record.differed += 0 if odd is None else int(odd.sum())

    def judge(self, paths: Iterable[Path], later: Values, earlier: Values) -> Verdict:
        """Tell which steps go on from the steps before them, and learn from those that do.

        Args:
            paths: the entries to compare.
            later: the steps.
            earlier: the steps before them.
        """
        return _verdict(list(self._seen(paths, later, earlier)))

    def _seen(
        self, paths: Iterable[Path], later: Values, earlier: Values
    ) -> Iterator[tuple[_Record, Path, np.ndarray | None]]:
        """What is known of each entry that can be compared, and where it differs: None for nowhere."""
        for path in paths:
            now, told = later(path), earlier(("next", *path))
            if now is None or told is None or now.shape != told.shape or now.dtype != told.dtype:
                continue
            record = self._records.setdefault(path, _Record())
            odd = None if np.array_equal(now, told) else _differ(now, told)
            if record.agreed:
                record.agreed += len(now) - (0 if odd is None else int(odd.sum()))
            else:
                before = earlier(path)
                if before is not None and before.shape == now.shape:
                    changed = _differ(now, before)
                    record.agreed += int((changed if odd is None else changed & ~odd).sum())
            yield record, path, odd


def compared(steps: Steps, without: Iterable[Path] = ()) -> tuple[Path, ...]:
    """The entries ``k`` of some steps that have a ``("next", k)`` to be compared with.

    Done flags are left out, and so are Python objects and tensors whose shape varies.
    """
    found = []
    for path, column in steps.columns.items():
        key = path[1:]
        if path[0] != "next" or path in without or key in without or key not in steps.columns:
            continue
        if key[-1] in FLAGS or key == ("is_init",):
            continue
        here = steps.columns[key]
        if isinstance(here, Tensor) and isinstance(column, Tensor):
            if here.shape == column.shape and here.dtype == column.dtype:
                found.append(key)
        elif isinstance(here, Rows) and isinstance(column, Rows):
            found.append(key)
    return tuple(found)


def bits_at(column: Column | None, at: np.ndarray | slice) -> np.ndarray | None:
    """The bits of a column at some steps: integers ``[n, w]``; None if they are not all alike."""
    if isinstance(column, Rows):
        items = (
            column.items[at] if isinstance(at, slice) else [column.items[i] for i in at.tolist()]
        )
        if len({(item.shape, item.dtype, item.device) for item in items}) != 1:
            return None
        column, at = torch.stack(items), slice(None)
    if not isinstance(column, Tensor) or column.layout != torch.strided or column.is_meta:
        return None
    if not column.is_cpu:
        if not isinstance(at, slice):
            at_device = torch.from_numpy(at).to(column.device)
            column, at = column.index_select(0, at_device).cpu(), slice(None)
        else:
            column, at = column[at].cpu(), slice(None)
    array: np.ndarray = bits(column).numpy()
    if array.ndim != 2:
        array = array.reshape(len(array), -1)
    return array[at] if isinstance(at, slice) else array.take(at, 0)


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Bool ``[n]``: where two ``[n, w]`` arrays differ."""
    differ: np.ndarray = (a != b).any(1)
    return differ


def _verdict(seen: list[tuple[_Record, Path, np.ndarray | None]]) -> Verdict:
    """What the differences say once they are learned from."""
    wrong: np.ndarray | None = None
    doubted: np.ndarray | None = None
    assured: np.ndarray | bool = False
    verdict = Verdict()
    for record, path, odd in seen:
        if record.exempt:
            continue
        if record.proven:
            assured = True if odd is None else assured | ~odd
        if odd is None:
            continue
        verdict.differing[path] = odd
        if record.proven:
            wrong = odd if wrong is None else wrong | odd
        else:
            doubted = odd if doubted is None else doubted | odd
    if doubted is not None:
        doubted = doubted & ~np.asarray(assured)
        wrong = doubted if wrong is None else wrong | doubted
    if wrong is not None:
        verdict.goes_on = ~wrong
    return verdict
