"""Continuity: a step continues another if its entries are the other's next entries, bit for bit.

TED requires it of every ``k`` with a ``("next", k)``, but not every environment follows it. What each
entry does is learned from consecutive steps:

- *exempt*: more than one pair in five differ in it;
- *proven*: otherwise, once its next entry became the later entry with a changed value;
- *unknown*: before that.

A step continues another if no proven entry differs, and if no unknown one differs or some proven one
agrees. Without comparable entries, every step continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.schema import bits
from torchrl_mt.data._store.steps import Column, Path, Rows, Steps, rows_at
from torchrl_mt.data._writing.ted import FLAGS

__all__ = ["Continuity", "Values", "Verdict", "bits_at", "compared"]

_TRUST = 4
"""Pairs that must agree for each pair that differs."""

_ENOUGH = 256
"""After so many agreeing pairs, learning stops until a step does not continue."""

Values = Callable[[Path], "np.ndarray | None"]
"""Function from an entry to its bits at ``n`` steps, ``[n, w]``; None if they cannot be compared."""


@dataclass
class _Record:
    """Counts of step pairs for one entry."""

    agreed: int = 0
    """Pairs in which the next entry became the later one, from the first changed value on."""
    differed: int = 0
    """Consecutive pairs of a row in which it did not."""

    @property
    def exempt(self) -> bool:
        return self.differed * _TRUST > self.agreed

    @property
    def proven(self) -> bool:
        return self.agreed > 0 and not self.exempt


@dataclass
class Verdict:
    """Which of ``n`` steps continue the step before."""

    goes_on: np.ndarray | None = None
    """Bool ``[n]``; None if all do."""
    differing: dict[Path, np.ndarray] = field(default_factory=dict)
    """Which steps differ, bool ``[n]``, by entry; without exempt entries."""

    def reason(self, i: int) -> Path | None:
        """Return an entry in which step ``i`` differs; None if it differs in none."""
        return next((path for path, odd in self.differing.items() if odd[i]), None)


class Continuity:
    """Learns which entries follow TED, and judges whether steps continue others.

    Args:
        records: what :meth:`records` returned, to continue learning.
    """

    def __init__(self, records: Mapping[Path, tuple[int, int]] | None = None) -> None:
        self._records = {path: _Record(*seen) for path, seen in (records or {}).items()}

    def records(self) -> dict[Path, tuple[int, int]]:
        """Return the counts of agreeing and differing pairs, by entry."""
        return {path: (seen.agreed, seen.differed) for path, seen in self._records.items()}

    def knows(self, paths: Iterable[Path]) -> bool:
        """Whether enough pairs were seen for all ``paths``."""
        known = map(self._records.get, paths)
        return all(record is not None and record.agreed >= _ENOUGH for record in known)

    def states(self, paths: Iterable[Path], values: Values) -> list[bytes]:
        """Return each step's bits of all proven entries; none if an entry cannot be compared."""
        known = [path for path in paths if path in self._records and self._records[path].proven]
        found = [values(path) for path in known]
        arrays = [array for array in found if array is not None]
        if len(arrays) < len(found):
            return []
        return [b"".join(row.tobytes() for row in rows) for rows in zip(*arrays, strict=True)]

    def learn(self, paths: Iterable[Path], later: Values, earlier: Values) -> None:
        """Learn from consecutive steps of a row of a batch; arguments as :meth:`judge`."""
        for record, _, odd in self._seen(paths, later, earlier):
            record.differed += 0 if odd is None else int(odd.sum())

    def judge(self, paths: Iterable[Path], later: Values, earlier: Values) -> Verdict:
        """Judge which steps continue the steps before them, and learn from agreeing pairs.

        Args:
            paths: the entries to compare.
            later: values of the steps.
            earlier: values of the steps before them.
        """
        return _verdict(list(self._seen(paths, later, earlier)))

    def _seen(
        self, paths: Iterable[Path], later: Values, earlier: Values
    ) -> Iterator[tuple[_Record, Path, np.ndarray | None]]:
        """Compare each comparable entry; yield its counts and which steps differ (None for none)."""
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
    """List the entries ``k`` that can be compared with their ``("next", k)``.

    Done flags, ``"is_init"``, the entries ``without`` and Python objects are left out.
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
    """Return the bits of a column at some steps: integers ``[n, w]``; None if shapes or dtypes vary."""
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
            column, at = rows_at(column, torch.from_numpy(at)).cpu(), slice(None)
        else:
            column, at = column[at].cpu(), slice(None)
    array: np.ndarray = bits(column).numpy()
    if array.ndim != 2:
        array = array.reshape(len(array), -1)
    return array[at] if isinstance(at, slice) else array.take(at, 0)


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return which rows of two ``[n, w]`` arrays differ: bool ``[n]``."""
    differ: np.ndarray = (a != b).any(1)
    return differ


def _verdict(seen: list[tuple[_Record, Path, np.ndarray | None]]) -> Verdict:
    """Judge steps by where each entry differs."""
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
