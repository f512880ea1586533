"""Beginnings: which episodes begin in their middle, as under ids that a collector numbers anew.

Where steps have ``"is_init"``, an episode begins with a true one. Elsewhere it began under another id if
its first step goes on from the last one of an open episode whose id no longer comes.
"""

from __future__ import annotations

from torchrl_mt.data._store.steps import Path
from torchrl_mt.data._writing.continuity import Continuity, bits_at
from torchrl_mt.data._writing.matching import Matches
from torchrl_mt.data._writing.open_steps import OpenSteps
from torchrl_mt.data._writing.segments import Batch
from torchrl_mt.data._writing.ted import INIT

__all__ = ["Beginnings"]


class Beginnings:
    """Finds ids that begin in the middle of an episode."""

    def __init__(self) -> None:
        self._has_init = False
        """Whether a step had a true "is_init"."""
        self.gave_up = False
        """Whether an open episode was given up: the rest of it is no sign."""

    def sign_of_new_ids(
        self,
        batch: Batch,
        found: Matches | None,
        opened: OpenSteps,
        paths: tuple[Path, ...],
        continuity: Continuity,
    ) -> str | None:
        """Say how a batch shows that an id begins in the middle of an episode; None if it does not.

        Args:
            batch: the batch.
            found: the episodes of its segments; None if all begin and end here.
            opened: the open steps before the batch.
            paths: the entries to compare.
            continuity: what was learned of them.
        """
        keys, fresh, going_on = batch.segments.keys, [*range(len(batch.segments.keys))], set[int]()
        if found is not None:
            fresh, going_on = [*found.fresh.values()], set(found.slots.tolist())
            self.gave_up |= bool(found.broken or found.over_budget)
        if batch.begins is not None:
            self._has_init, fresh = True, [i for i in fresh if not batch.begins[i]]
        # The step before is in the last batch: older ones may equal it by chance.
        left = [s for s in opened.slots.values() if opened.batch[s] == opened.batches]
        if fresh and (left := [*{*left} - going_on]):
            last, first, at = opened.last[left], opened.first[left], batch.firsts()[fresh]
            ends = continuity.states(paths, lambda path: opened.bits_at(("next", *path), last))
            starts = continuity.states(paths, lambda path: opened.bits_at(path, first))
            here = continuity.states(paths, lambda path: bits_at(batch.steps.columns[path], at))
            # An open episode that is as it began is also as others that begin.
            places = {e: slot for e, s, slot in zip(ends, starts, left, strict=False) if e != s}
            for i, state in zip(fresh, here, strict=False):
                if state in places:
                    before = opened.labels[places[state]]
                    return f"episode {keys[i]} goes on where the open episode {before} left off"
        if fresh and self._has_init and not self.gave_up and INIT in batch.steps.columns:
            return f'episode {keys[fresh[0]]} begins without a true "is_init"'
        return None
