"""Growing prompts: each turn's prompt, stored as what it adds to an earlier turn.

A prompt usually begins with an earlier turn's prompt and response, so only the rest is stored. A
conversation then takes memory in proportion to its length, not to its square; so do several in one
episode that alternate. :meth:`Prompts.whole` gives back any prompts that :meth:`Prompts.of` was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_mt.data._store.columns.columns import Change, RaggedColumn, StoredColumn
from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.columns.rows import RowPlan, dense
from torchrl_mt.data._store.files.column_files import Part, SavedColumn
from torchrl_mt.data._store.ring import Blocks, Moves, runs
from torchrl_mt.data._store.schema import PARENT, PROMPT, RESPONSE, Entry
from torchrl_mt.data._store.steps import Column, Objects, Rows, Steps, kinds, step_tensors

__all__ = ["Addition", "PromptColumn", "Prompts", "copy_of_episodes"]


class Addition(NamedTuple):
    """A prompt as what it adds to an earlier turn."""

    back: int
    """Number of steps back to that turn."""
    kept: int
    """Number of leading tokens of that turn (prompt, then response) that it repeats."""
    added: Tensor
    """The other tokens."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of whole episodes, one after the other, as what each adds: a column of ``Steps``."""

    items: list[Addition]

    @staticmethod
    def of(steps: Steps, lengths: Tensor) -> Prompts:
        """Compute what each prompt of whole episodes adds; see :meth:`compared`."""
        prompts, responses = (step_tensors(steps.columns[path]) for path in (PROMPT, RESPONSE))
        parents = steps.columns.get(PARENT)
        if isinstance(parents, Rows) and len({item.shape for item in parents.items}) == 1:
            parents = dense(parents)
        if not isinstance(parents, Tensor) or parents.numel() != steps.length:
            return Prompts.compared(prompts, responses, lengths)
        return Prompts.compared(prompts, responses, lengths, parents.reshape(-1).long().tolist())

    @staticmethod
    def compared(
        prompts: Sequence[Tensor],
        responses: Sequence[Tensor],
        lengths: Tensor,
        parents: Sequence[int] | None = None,
    ) -> Prompts:
        """Compute what each prompt adds to the turn before it, or to its parent if that shares more.

        Wrong parents only make prompts share less.

        Args:
            prompts: ``[T]`` vectors of tokens, of whole episodes one after the other.
            responses: ``[T]`` vectors of tokens.
            lengths: int64 ``[E]``, turns of each episode.
            parents: for each turn, the turn of its episode that it continues; -1 for none.

        Examples:
            >>> prompts = [torch.tensor([1, 2]), torch.tensor([1, 2, 3, 4])]
            >>> responses = [torch.tensor([3]), torch.tensor([5])]
            >>> Prompts.compared(prompts, responses, torch.tensor([2])).items[1]
            Addition(back=1, kept=3, added=tensor([4]))
        """
        items: list[Addition] = []
        for first, stop in pairwise([0, *lengths.cumsum(0).tolist()]):
            for t in range(first, stop):
                base, kept = t, 0
                before = {t - 1} if parents is None else {t - 1, first + parents[t]}
                for j in before:
                    if (
                        first <= j < t
                        and (shared := _shared(prompts[t], prompts[j], responses[j])) > kept
                    ):
                        base, kept = j, shared
                items.append(Addition(t - base, kept, prompts[t][kept:]))
        return Prompts(items)

    def whole(self, responses: Sequence[Tensor]) -> list[Tensor]:
        """Rebuild the prompts of consecutive turns; the first must not refer to an earlier turn.

        Prompts that extend each other are views of one tensor.

        Args:
            responses: one vector of tokens per turn.
        """
        lines: list[list[Tensor]] = []
        """Pieces of each line of tokens; prompts that extend each other end on one line."""
        begins: list[tuple[int, int]] = []
        """For each line, the line that it branches off from, and after how many tokens."""
        sizes: list[int] = []
        ends: list[tuple[int, int]] = []
        """For each prompt, its line, and where it ends there."""
        for (back, kept, added), response in zip(self.items, responses, strict=True):
            line = ends[-back][0] if kept else -1
            if line < 0 or kept < sizes[line]:
                begins.append((line, kept))
                lines.append([])
                sizes.append(kept)
                line = len(lines) - 1
            lines[line] += (added, response)
            ends.append((line, sizes[line] + len(added)))
            sizes[line] += len(added) + len(response)
        whole: list[Tensor] = []
        for (line, kept), pieces in zip(begins, lines, strict=True):
            whole.append(torch.cat([whole[line][:kept], *pieces] if kept else pieces))
        return [whole[line][:end] for line, end in ends]


def copy_of_episodes(steps: Steps, lengths: Tensor) -> Steps:
    """Copy whole episodes, with memory in proportion to what is new in each turn.

    Prompts that extend each other become views of one tensor.

    Args:
        steps: whole episodes, one after the other.
        lengths: int64 ``[E]``, steps of each.
    """
    prompts, responses = steps.columns.get(PROMPT), steps.columns.get(RESPONSE)
    if not (isinstance(prompts, Rows) and isinstance(responses, Rows)):
        return steps.clone()
    (dims, dtype, layout, device), *others = kinds([*prompts.items, *responses.items])
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    readable = layout == torch.strided and device.type != "meta"
    if others or dims != 1 or not (is_integer and readable):
        return steps.clone()
    rest = {path: column for path, column in steps.columns.items() if path != PROMPT}
    copied = replace(steps, columns=rest).clone().columns
    grown = Rows(Prompts.of(steps, lengths).whole(responses.items))
    columns = {path: copied.get(path, grown) for path in steps.columns}
    return replace(steps, columns=columns)


class PromptColumn:
    """Prompts stored as what they add; reading them needs the column of responses."""

    responses: StoredColumn
    """Set by the store."""

    def __init__(self, entry: Entry, capacity: int, memory: Memory) -> None:
        self._added = RaggedColumn(entry, capacity, memory)
        self._links = {
            name: torch.empty(capacity, dtype=torch.int64, device="cpu")
            for name in ("back", "kept", "since")
        }
        """By row: number of rows back to the turn whose tokens it repeats; how many tokens; number of
        rows back to where reading must begin, as no prompt from there on refers to an earlier row.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._added.nbytes + sum(each.nbytes for each in self._links.values())

    def plan(self, change: Change, column: Any) -> Callable[[], None]:
        """Plan to write the :class:`Prompts` of whole episodes."""
        rows = change.written.rows
        back, kept = (
            torch.tensor(x, dtype=torch.int64, device="cpu")
            for x in ([item.back for item in column.items], [item.kept for item in column.items])
        )
        steps = torch.arange(len(kept), device="cpu")
        keeps = torch.where(kept > 0, steps - back, steps)
        reaches = keeps.flip(0).cummin(0).values.flip(0)  # The least of it and all later ones.
        since = steps - torch.where(reaches == steps, steps, 0).cummax(0).values
        store_added = self._added.plan(change, Rows([item.added for item in column.items]))

        def commit() -> None:
            store_added()
            for name, values in (("back", back), ("kept", kept), ("since", since)):
                self._links[name][rows] = values

        return commit

    def read(self, plan: RowPlan) -> Column:
        """Read the rows of ``plan``; prompts of one episode may share memory."""
        rows = plan.rows()
        if not len(rows):
            return self._added.read(plan)
        since = self._links["since"][rows]
        firsts, chain = torch.unique(rows - since, return_inverse=True)
        turns = torch.zeros_like(firsts).scatter_reduce_(0, chain, since + 1, "amax")
        needed = RowPlan(runs(firsts, turns))
        added, responses = self._added.read(needed), self.responses.read(needed)
        columns = (self._links[name][needed.starts].tolist() for name in ("back", "kept"))
        items = [*map(Addition, *columns, step_tensors(added))]
        answers = list(step_tensors(responses))
        prompts: list[Tensor] = []
        ends = turns.cumsum(0)
        for start, stop in zip((ends - turns).tolist(), ends.tolist(), strict=True):
            prompts += Prompts(items[start:stop]).whole(answers[start:stop])
        place = (ends - turns)[chain] + since
        return Rows([prompts[i] for i in place.tolist()])

    def release(self, blocks: Blocks, first: int | None) -> None:
        """Drop the oldest episodes; ``first`` is the oldest row that stays, None if none."""
        self._added.release(blocks, first)

    def laid_out(self, moves: Moves, capacity: int) -> PromptColumn:
        """Return the column for a ring of ``capacity`` rows, with the rows moved."""
        new = copy(self)
        new._added = self._added.laid_out(moves, capacity)
        new._links = {name: moves.laid_out(x, capacity) for name, x in self._links.items()}
        return new

    def parts(self, live: Moves) -> dict[str, Part | Objects]:
        """Return what each prompt adds and repeats."""
        links = {name: Part(live.pieces(values)) for name, values in self._links.items()}
        return {**self._added.parts(live), **links}

    def load(self, saved: SavedColumn, rows: range) -> None:
        """Load these rows."""
        self._added.load(saved, rows)
        self._links = {name: saved.into(name, rows, x) for name, x in self._links.items()}


def _shared(prompt: Tensor, before: Tensor, response: Tensor) -> int:
    """Count the tokens of an earlier turn that a prompt begins with."""
    kept = _agreeing(prompt, before)
    return kept if kept < len(before) else kept + _agreeing(prompt[kept:], response)


def _agreeing(a: Tensor, b: Tensor) -> int:
    """Count the common leading tokens of ``a`` and ``b``; views of the same memory are not read."""
    shortest = min(len(a), len(b))
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return shortest
    a, b = a[:shortest], b[:shortest]
    return shortest if torch.equal(a, b) else int((a != b).int().argmax())
