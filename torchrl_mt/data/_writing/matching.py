"""To which open episode each segment of a batch belongs, and which episodes are given up.

A segment joins an episode of its id that it goes on from, or begins another. A row has one open
episode: it is given up when another is to be open. Episodes with one id are kept apart, as both may go
on: two collectors may count from 0.
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
"""Open episodes that may share an id; the one that has waited longest for a step gives way."""

_Live = dict[int, tuple[int, int]]
"""Open episodes by slot: the row of the last step, and the number of steps."""


@dataclass
class Matches:
    """Where the segments of a batch go."""

    slots: np.ndarray
    """int64 ``[S]``: the slot of each segment's episode."""
    fresh: dict[int, int] = field(default_factory=dict)
    """The slots of the episodes that begin in the batch, and the first segment of each."""
    broken: list[int] = field(default_factory=list)
    """Slots of episodes that nothing goes on from any more."""
    over_budget: list[int] = field(default_factory=list)
    """Slots of episodes that give way to a budget of steps."""
    breaks: list[tuple[int, str]] = field(default_factory=list)
    """Segments that do not go on from the open episode of their id, and why."""


class Matcher:
    """Finds the episodes of a batch whose steps :meth:`OpenSteps.put` has written.

    Args:
        steps: the open steps.
        batch: the batch.
        first: the row of its first step.
        by_rows: whether episodes are told apart by rows.
        paths: the entries to compare.
        continuity: what is known of them.
        max_length: steps that an open episode may have; None for any number.
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
            max_steps: steps that the open episodes may have in all, unless there is one only.
        """
        parts = self.batch.segments
        keys, number = parts.keys, len(parts.keys)
        found = self.open.find(parts)
        # Their segments are looked at one after the other.
        odd = set(self.open.several).intersection(keys) if self.open.several else set()
        if not parts.differ:
            again = [i for i in range(1, number) if keys[i] == keys[i - 1]]
            # After a segment that ends its episode comes the beginning of another.
            found[again] = -1
            odd.update(keys[i] for i in again if not self.batch.ended[i - 1])
        if odd:
            self._find_among_several(found, odd)
        odd |= self._not_going_on(found, odd)
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
        """Find the episodes of segments that agree in all with one of several; they are odd no more."""
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
        """Whether the steps in some rows go on from those in others."""
        return (continuity or self.continuity).judge(
            self.paths,
            lambda path: self.open.bits_at(path, here),
            lambda path: self.open.bits_at(path, there),
        )

    def _not_going_on(self, found: np.ndarray, odd: set[int]) -> set[int]:
        """The ids whose only open episode a segment does not go on from."""
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
        """Find the episodes of segments with these ids, each after the other."""
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
            slot, reason = self._goes_on_from(i, mine)
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
                    self._give_up(mine, result)
            if slot is None:
                slot = next(unused)
                result.fresh[slot] = i
            result.slots[i] = slot
            if not self.batch.ended[i]:
                mine[slot] = (int(self.batch.lasts()[i]) + self.first, length)

    def _give_up(self, mine: _Live, result: Matches) -> None:
        """Let go of episodes of an id, of which a segment goes on from none."""
        while len(mine) >= (1 if self.by_rows else MOST_OF_AN_ID):
            oldest = min(mine, key=lambda slot: mine[slot][0])
            del mine[oldest]
            result.broken.append(oldest)

    def _goes_on_from(self, i: int, mine: _Live) -> tuple[int | None, str | None]:
        """The open episode that segment ``i`` goes on from; why not, if it is none of them."""
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
        """The episodes that give way: those that have waited longest for a step."""
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
