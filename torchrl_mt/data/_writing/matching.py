"""Matching: which open episode each segment of a batch continues, and which episodes are given up.

A segment joins an open episode of its id that it continues, or begins another. Several episodes of one
id may be open, as two collectors may both count from 0. A row (without ids) has one open episode,
which is given up when another begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from torchrl_mt.data._store.steps import Path
from torchrl_mt.data._writing.continuity import Continuity, Verdict
from torchrl_mt.data._writing.open_steps import OpenSteps
from torchrl_mt.data._writing.segments import IS_INIT, Batch, differs_in

__all__ = ["MOST_OF_AN_ID", "Matcher", "Matches"]

MOST_OF_AN_ID = 32
"""Most open episodes of one id; beyond it, the one that waited longest for a step is given up."""

_Live = dict[int, tuple[int, int]]
"""Row of the last step and number of steps of open episodes, by slot."""


@dataclass
class Matches:
    """The episodes of a batch's segments."""

    slots: np.ndarray
    """int64 ``[S]``: slot of each segment's episode."""
    fresh: dict[int, int] = field(default_factory=dict)
    """First segment of each episode that begins in the batch, by slot."""
    broken: list[int] = field(default_factory=list)
    """Slots of episodes that are given up since no segment continues them."""
    over_budget: list[int] = field(default_factory=list)
    """Slots of episodes that are given up for a budget of steps."""
    breaks: list[tuple[int, str]] = field(default_factory=list)
    """Segments that do not continue the open episode of their id, and why."""


class Matcher:
    """Matches the segments of a batch that :meth:`OpenSteps.put` has written to episodes.

    Args:
        steps: the open steps.
        batch: the batch.
        first: row of its first step.
        by_rows: whether rows identify episodes, rather than ids.
        paths: the entries to compare.
        continuity: what was learned of them.
        max_length: most steps of an open episode; None for no limit.
    """

    def __init__(
        self,
        steps: OpenSteps,
        batch: Batch,
        first: int,
        *,
        by_rows: bool,
        paths: tuple[Path, ...],
        continuity: Continuity,
        max_length: int | None,
    ) -> None:
        self.open = steps
        self.batch = batch
        self.by_rows = by_rows
        self.paths = paths
        self.continuity = continuity
        self.max_length = max_length
        self.first = first
        self.first_rows = batch.firsts() + first
        self.sizes = batch.segments.sizes

    def match(self, max_steps: int) -> Matches:
        """Find the episode of each segment.

        Args:
            max_steps: most steps of all open episodes together; a single one may have more.
        """
        parts = self.batch.segments
        keys, number = parts.keys, len(parts.keys)
        found = self.open.find(parts)
        # Ids whose segments must be matched one after the other.
        odd = set(self.open.several).intersection(keys) if self.open.several else set()
        if not parts.differ:
            again = [i for i in range(1, number) if keys[i] == keys[i - 1]]
            # After a segment that ends its episode, the next one of its id begins another.
            found[again] = -1
            odd.update(keys[i] for i in again if not self.batch.ended[i - 1])
        if odd:
            self._find_among_several(found, odd)
        odd |= self._not_continuing(found, odd)
        result = Matches(found)
        single = np.array([key not in odd for key in keys]) if odd else np.True_
        steps = self.open.num_steps + int(parts.stops[-1])
        if self.max_length is not None and steps > self.max_length and self.open.slots:
            lengths = self.open.length[found] + self.sizes
            long = (found >= 0) & (lengths > self.max_length) & single
            result.over_budget += found[long].tolist()
            found[long] = -1
        new = np.flatnonzero((found < 0) & single)
        unused = iter(self.open.new_slots(number if odd else len(new)))
        if len(new):
            result.fresh = dict(zip(islice(unused, len(new)), new.tolist(), strict=True))
            found[new] = [*result.fresh]
        if odd:
            self._one_by_one(odd, result, unused)
        if steps > max_steps:
            result.over_budget += self._over_budget(max_steps, result)
        return result

    def _find_among_several(self, found: np.ndarray, odd: set[int]) -> None:
        """Match segments that agree in all entries with one of several episodes of their id.

        Their ids are removed from ``odd``.
        """
        begins = self.batch.begins
        if not self.paths or not self.batch.segments.differ:
            return
        left: dict[int, list[int]] = {}
        for i, key in enumerate(self.batch.segments.keys):
            if key in odd and (begins is None or not begins[i]):
                slots = self.open.with_id(key)
                left[i] = sorted(slots, key=lambda slot: int(self.open.last[slot]))
        while left:
            at = np.fromiter(left, dtype=np.int64)
            slots = [candidates.pop() for candidates in left.values()]
            verdict = self._judge(self.first_rows[at], self.open.last[slots])
            agrees = np.ones(len(at), dtype=bool)
            for differs in verdict.differing.values():
                agrees &= ~differs
            for i, slot, it_agrees in zip(at.tolist(), slots, agrees.tolist(), strict=True):
                if it_agrees:
                    found[i] = slot
                    odd.discard(self.batch.segments.keys[i])
                if it_agrees or not left[i]:
                    del left[i]

    def _judge(
        self, here: np.ndarray, there: np.ndarray, continuity: Continuity | None = None
    ) -> Verdict:
        """Judge whether the steps in rows ``here`` continue those in rows ``there``."""
        return (continuity or self.continuity).judge(
            self.paths,
            lambda path: self.open.bits_at(path, here),
            lambda path: self.open.bits_at(path, there),
        )

    def _not_continuing(self, found: np.ndarray, odd: set[int]) -> set[int]:
        """Find the ids with a segment that does not continue their only open episode."""
        at = np.flatnonzero(found >= 0)
        if not len(at):
            return set()
        keys, begins = self.batch.segments.keys, self.batch.begins
        if odd:
            at = np.array([i for i in at.tolist() if keys[i] not in odd], dtype=np.int64)
        wrong: list[int] = []
        if begins is not None:
            wrong, at = at[begins[at]].tolist(), at[~begins[at]]
        if self.paths and len(at):
            verdict = self._judge(self.first_rows[at], self.open.last[found[at]])
            if verdict.goes_on is not None:
                wrong += at[~verdict.goes_on].tolist()
        return {keys[i] for i in wrong}

    def _one_by_one(self, odd: set[int], result: Matches, unused: Iterator[int]) -> None:
        """Match the segments of the ids ``odd``, one after the other."""
        live: dict[int, _Live] = {
            key: {
                slot: (int(self.open.last[slot]), int(self.open.length[slot]))
                for slot in self.open.with_id(key)
            }
            for key in odd
        }
        for i, key in enumerate(self.batch.segments.keys):
            if key not in odd:
                continue
            mine, length = live[key], int(self.sizes[i])
            slot, reason = self._find_one(i, mine)
            if slot is not None:
                before = mine.pop(slot)[1]
                if self.max_length is not None and before + length > self.max_length:
                    result.over_budget.append(slot)
                    slot = None
                else:
                    length += before
            if reason is not None:
                result.breaks.append((i, reason))
                if not self.batch.ended[i]:
                    self._close_oldest(mine, result)
            if slot is None:
                slot = next(unused)
                result.fresh[slot] = i
            result.slots[i] = slot
            if not self.batch.ended[i]:
                mine[slot] = (int(self.batch.lasts()[i]) + self.first, length)

    def _close_oldest(self, mine: _Live, result: Matches) -> None:
        """Give up the oldest episodes of an id until one more may be open."""
        while len(mine) >= (1 if self.by_rows else MOST_OF_AN_ID):
            oldest = min(mine, key=lambda slot: mine[slot][0])
            del mine[oldest]
            result.broken.append(oldest)

    def _find_one(self, i: int, mine: _Live) -> tuple[int | None, str | None]:
        """Find the open episode that segment ``i`` continues; if none, say why."""
        if not mine:
            return None, None
        if self.batch.begins is not None and self.batch.begins[i]:
            return None, IS_INIT
        slots = sorted(mine, key=lambda slot: -mine[slot][0])
        if not self.paths:
            return slots[0], None
        here = np.full(len(slots), self.first_rows[i])
        there = np.array([mine[slot][0] for slot in slots], dtype=np.int64)
        verdict = self._judge(here, there, Continuity(self.continuity.records()))
        differing = np.zeros(len(slots), dtype=np.int64)
        for odd in verdict.differing.values():
            differing += odd
        fits = np.arange(len(slots)) if verdict.goes_on is None else np.flatnonzero(verdict.goes_on)
        if not len(fits):
            return None, self.batch.reasons.get(i) or differs_in(verdict.reason(0))
        best = int(fits[np.argmin(differing[fits])])
        self._judge(here[:1], there[best : best + 1])
        return slots[best], None

    def _over_budget(self, max_steps: int, result: Matches) -> list[int]:
        """Choose the episodes to give up for the budget: those that waited longest for a step."""
        lengths = {slot: int(self.open.length[slot]) for slot in self.open.slots.values()}
        waited = {slot: int(self.open.batch[slot]) for slot in lengths}
        begun = {slot: int(self.open.first[slot]) for slot in lengths}
        for i, slot in enumerate(result.slots.tolist()):
            lengths[slot] = lengths.get(slot, 0) + int(self.sizes[i])
            waited[slot] = self.open.batches + 1
            begun.setdefault(slot, int(self.first_rows[i]))
        for slot in {*result.slots[self.batch.ended].tolist(), *result.broken, *result.over_budget}:
            lengths.pop(slot, None)
        gone: list[int] = []
        total = sum(lengths.values())
        for slot in sorted(lengths, key=lambda slot: (waited[slot], begun[slot])):
            if total <= max_steps or len(gone) + 1 == len(lengths):
                break
            gone.append(slot)
            total -= lengths[slot]
        return gone
