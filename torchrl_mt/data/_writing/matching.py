"""Matching: which open episode each segment of a batch continues, and which episodes are given up.

A segment joins the open episode of its id that it continues, or begins another. Several episodes of one
id may be open, as two collectors may both count from 0. A row (without ids) has one open episode, which
is given up when another begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchrl_mt.data._store.steps import Path, name_of
from torchrl_mt.data._writing.continuity import bits_at, differ, states
from torchrl_mt.data._writing.open_steps import OpenSteps
from torchrl_mt.data._writing.segments import Batch

__all__ = ["MOST_OF_AN_ID", "Matches", "match", "renumbered"]

MOST_OF_AN_ID = 32
"""Most open episodes of one id; beyond it, the one that waited longest for a step is given up."""


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
    links: list[tuple[int, int]] = field(default_factory=list)
    """Rows of the first step of each segment that continues an episode, and of the step before."""


def match(
    opened: OpenSteps,
    batch: Batch,
    paths: tuple[Path, ...],
    *,
    proven: bool,
    by_rows: bool,
    max_length: int | None,
    max_steps: int,
) -> Matches:
    """Find the episode of each segment of the batch that :meth:`OpenSteps.put` has written.

    Args:
        opened: the open steps.
        batch: the batch.
        paths: the entries that count.
        proven: whether they were seen to follow TED. If not, a segment also continues an episode if an
            entry that changed in the episode's last step agrees.
        by_rows: whether rows identify episodes, rather than ids.
        max_length: most steps of an open episode; None for no limit.
        max_steps: most steps of all open episodes together; a single one may have more.
    """
    parts = batch.segments
    found = opened.newest(parts.keys)
    found[batch.anew] = -1
    if _all_go_on(opened, batch, paths, found, max_length):
        old, new = np.flatnonzero(found >= 0), np.flatnonzero(found < 0)
        rows, before = parts.starts[old] + opened.tail, opened.last[found[old]]
        found[new] = slots = opened.new_slots(len(new))
        result = Matches(found, dict(zip(slots, new.tolist(), strict=True)))
        result.links = [*zip(rows.tolist(), before.tolist(), strict=True)]
    else:
        most = 1 if by_rows else MOST_OF_AN_ID
        result = _one_by_one(opened, batch, paths, proven, most, max_length)
    if opened.num_steps + batch.steps.length > max_steps:
        result.over_budget += _over_budget(opened, batch, result, max_steps)
    return result


def renumbered(
    opened: OpenSteps, batch: Batch, found: Matches | None, paths: tuple[Path, ...]
) -> str | None:
    """Say which id begins where an open episode of another id left off; None if none does.

    Args:
        opened: the open steps before the batch.
        batch: the batch.
        found: the episodes of its segments; None if all begin and end here.
        paths: the entries that count.
    """
    keys = batch.segments.keys
    fresh = [*range(len(keys))] if found is None else [*found.fresh.values()]
    fresh = [i for i in fresh if not batch.begins[i]]
    if not fresh or not opened.slots:
        return None
    # The step before is in the last batch: older ones may equal it by chance.
    others = opened.is_open & (opened.batch == opened.batches)
    if found is not None:
        others[found.slots] = False
    left = np.flatnonzero(others)
    if not len(left):
        return None
    first, last = opened.first[left], opened.last[left]
    at, columns = batch.segments.starts[fresh], batch.steps.columns
    begun = states(paths, lambda path: opened.bits_at(path, first), len(left))
    ends = states(paths, lambda path: opened.bits_at(("next", *path), last), len(left))
    here = states(paths, lambda path: bits_at(columns[path], at), len(fresh))
    # An open episode that is as it began is also as others that begin.
    places = {e: slot for e, b, slot in zip(ends, begun, left.tolist(), strict=True) if e != b}
    for i, state in zip(fresh, here, strict=True):
        if state in places:
            before = opened.labels[places[state]]
            return f"episode {keys[i]} goes on where the open episode {before} left off"
    return None


def _all_go_on(
    opened: OpenSteps,
    batch: Batch,
    paths: tuple[Path, ...],
    found: np.ndarray,
    max_length: int | None,
) -> bool:
    """Whether the first segment of each id continues its only open episode, if there is one.

    Every later one must begin an episode, as the one before has ended.
    """
    parts = batch.segments
    if len({*parts.keys}) + batch.anew.sum() < len(parts.keys) or opened.any_id_twice:
        return False
    at = np.flatnonzero(found >= 0)
    slots, rows = found[at], parts.starts[at] + opened.tail
    if max_length is not None and (opened.length[slots] + parts.sizes[at] > max_length).any():
        return False
    last = opened.last[slots]
    return not batch.begins[at].any() and not any(
        differ(opened.bits_at(path, rows), opened.bits_at(("next", *path), last)).any()
        for path in paths
    )


def _one_by_one(
    opened: OpenSteps,
    batch: Batch,
    paths: tuple[Path, ...],
    proven: bool,
    most: int,
    max_length: int | None,
) -> Matches:
    """Match one segment after the other; ``most`` episodes of an id may be open."""
    parts, number = batch.segments, len(batch.segments.keys)
    firsts, lasts = parts.starts + opened.tail, parts.stops - 1 + opened.tail
    # The open episodes of each id, the one with the last step last.
    open_of = {
        key: sorted(opened.by_id.get(key, ()), key=lambda slot: int(opened.last[slot]))
        for key in {*parts.keys}
    }
    known = [slot for slots in open_of.values() for slot in slots]
    at_last = dict(zip(known, opened.last[known].tolist(), strict=True))
    length = {slot: int(opened.length[slot]) for slot in known}
    # By row: entries of first steps, and of last steps with what came of them.
    starts = states(paths, lambda path: opened.bits_at(path, firsts), number)
    rows = np.concatenate((opened.last[known], lasts))
    here = states(paths, lambda path: opened.bits_at(path, rows), len(rows))
    then = states(paths, lambda path: opened.bits_at(("next", *path), rows), len(rows))
    begun, ends = (dict(zip(rows.tolist(), each, strict=True)) for each in (here, then))

    def agrees(i: int, row: int) -> bool:
        return any(x == y != z for x, y, z in zip(starts[i], ends[row], begun[row], strict=True))

    result, unused = Matches(np.empty(number, dtype=np.int64)), iter(opened.new_slots(number))
    for i, (key, size) in enumerate(zip(parts.keys, parts.sizes.tolist(), strict=True)):
        mine, ended = open_of[key], bool(batch.ended[i])
        slot = None
        if not batch.begins[i]:
            fit = [each for each in mine if ends[at_last[each]] == starts[i]]
            if not fit and not proven:
                fit = [each for each in mine if agrees(i, at_last[each])]
            slot = fit[-1] if fit else None
        if slot is not None:
            mine.remove(slot)
            result.links.append((int(firsts[i]), at_last[slot]))
            if max_length is not None and length[slot] + size > max_length:
                result.over_budget.append(slot)
                slot = None
        elif mine:
            reason = 'its first step has a true "is_init"'
            if not batch.begins[i]:
                pairs = zip(paths, starts[i], ends[at_last[mine[-1]]], strict=True)
                path = next(path for path, here, there in pairs if here != there)
                reason = f"its {name_of(path)} is not the {name_of(('next', *path))} before it"
            result.breaks.append((i, reason))
            if not ended and len(mine) >= most:
                result.broken.append(mine.pop(0))
        if slot is None:
            slot = next(unused)
            result.fresh[slot], length[slot] = i, 0
        result.slots[i], at_last[slot] = slot, int(lasts[i])
        length[slot] += size
        if not ended:
            mine.append(slot)
    return result


def _over_budget(opened: OpenSteps, batch: Batch, found: Matches, max_steps: int) -> list[int]:
    """Choose the episodes to give up for the budget: those that waited longest for a step."""
    parts = batch.segments
    lengths = {slot: int(opened.length[slot]) for slot in opened.slots.values()}
    waited = {slot: int(opened.batch[slot]) for slot in lengths}
    begun = {slot: int(opened.first[slot]) for slot in lengths}
    for i, slot in enumerate(found.slots.tolist()):
        lengths[slot] = lengths.get(slot, 0) + int(parts.sizes[i])
        waited[slot] = opened.batches + 1
        begun.setdefault(slot, int(parts.starts[i]) + opened.tail)
    for slot in {*found.slots[batch.ended].tolist(), *found.broken, *found.over_budget}:
        lengths.pop(slot, None)
    gone: list[int] = []
    total = sum(lengths.values())
    for slot in sorted(lengths, key=lambda slot: (waited[slot], begun[slot])):
        if total <= max_steps or len(gone) + 1 == len(lengths):
            break
        gone.append(slot)
        total -= lengths[slot]
    return gone
