"""The growing prompt: each turn's prompt, kept as what it adds to the turn before.

A prompt usually begins with the turn before, its prompt and its response: only what follows is
stored, so that a conversation takes memory in proportion to its length, not to its square. One that
begins otherwise shares as much as it can. ``expand`` gives back what ``additions`` took apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torchrl_mt.data._store.columns.columns import Change, RaggedColumn, StoredColumn
from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.columns.rows import RowPlan
from torchrl_mt.data._store.files.column_files import Part, SavedColumn
from torchrl_mt.data._store.ring import Blocks, Moves, runs
from torchrl_mt.data._store.schema import PROMPT, RESPONSE, Entry
from torchrl_mt.data._store.steps import Column, Objects, Rows, Steps, kinds, step_tensors

__all__ = ["Additions", "PromptColumn", "additions", "copy_of_episodes", "expand"]


@dataclass(frozen=True)
class Additions:
    """One prompt per step, each given by what it adds."""

    items: list[tuple[int, Tensor]]
    """How many tokens of the step before (prompt, then response) it begins with; the rest of it."""


def additions(prompts: Sequence[Tensor], responses: Sequence[Tensor], lengths: Tensor) -> Additions:
    """What each prompt adds to the turn before.

    Args:
        prompts: ``[T]`` vectors of tokens, of whole episodes one after the other.
        responses: ``[T]`` vectors of tokens.
        lengths: int64 ``[E]``, turns of each episode.

    Examples:
        >>> prompts = [torch.tensor([1, 2]), torch.tensor([1, 2, 3, 4])]
        >>> responses = [torch.tensor([3]), torch.tensor([5])]
        >>> additions(prompts, responses, torch.tensor([2])).items
        [(0, tensor([1, 2])), (3, tensor([4]))]
    """
    first = {0, *accumulate(lengths.tolist())}
    items: list[tuple[int, Tensor]] = []
    for t, prompt in enumerate(prompts):
        kept = 0
        if t not in first:
            before = prompts[t - 1]
            kept = _agreeing(prompt, before)
            if kept == len(before):
                kept += _agreeing(prompt[kept:], responses[t - 1])
        items.append((kept, prompt[kept:]))
    return Additions(items)


def expand(additions: Additions, responses: Sequence[Tensor]) -> list[Tensor]:
    """The prompts of consecutive turns, of which the first keeps nothing.

    Prompts that extend each other are views of one tensor.

    Args:
        additions: what each of them adds.
        responses: as many vectors of tokens.
    """
    prompts: list[Tensor] = []
    pieces: list[Tensor] = []
    ends: list[int] = []
    tokens = 0
    for (kept, added), response in zip(additions.items, responses, strict=True):
        if kept < tokens:
            flat = torch.cat(pieces)
            prompts += [flat[:end] for end in ends]
            pieces, ends, tokens = [flat[:kept]], [], kept
        tokens += len(added)
        ends.append(tokens)
        tokens += len(response)
        pieces += (added, response)
    flat = torch.cat(pieces[:-1])
    return prompts + [flat[:end] for end in ends]


def copy_of_episodes(steps: Steps, lengths: Tensor) -> Steps:
    """A copy of whole episodes that shares no tensor's memory with them.

    It takes memory in proportion to what is new in each turn: prompts that extend each other are views
    of one tensor, whether or not they were.

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
    grown: list[Tensor] = []
    for start, stop in pairwise([0, *lengths.cumsum(0).tolist()]):
        grown += _copied(prompts.items[start:stop], responses.items[start:stop])
    columns = {path: copied.get(path, Rows(grown)) for path in steps.columns}
    return replace(steps, columns=columns)


def _copied(prompts: list[Tensor], responses: list[Tensor]) -> list[Tensor]:
    """Copies of an episode's prompts."""
    # Of those that are views of one tensor from one place on, the longest has the others in it.
    places = [(prompt.data_ptr(), prompt.stride()) for prompt in prompts]
    longest: dict[Any, int] = {}
    for t, place in enumerate(places):
        if len(prompts[t]) >= len(prompts[longest.setdefault(place, t)]):
            longest[place] = t
    turns = list(longest.values())
    answers = [responses[t] for t in turns]
    added = additions(
        [prompts[t] for t in turns], answers, torch.tensor([len(turns)], device="cpu")
    )
    copies = dict(zip(longest, expand(added, answers), strict=True))
    return [copies[place][: len(prompt)] for place, prompt in zip(places, prompts, strict=True)]


class PromptColumn:
    """Prompts kept as what they add; the responses between them are those of another column."""

    responses: StoredColumn
    """Set by the store."""

    def __init__(self, entry: Entry, capacity: int, memory: Memory) -> None:
        self._added = RaggedColumn(entry, capacity, memory)
        self._kept = torch.empty(capacity, dtype=torch.int64, device="cpu")
        self._since = torch.empty(capacity, dtype=torch.int64, device="cpu")
        """How many rows before this one a prompt last kept nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._added.nbytes + 16 * self._kept.shape[0]

    def plan(self, change: Change, column: Any) -> Callable[[], None]:
        """What stores the :class:`Additions` of whole episodes."""
        rows = change.written.rows
        kept = torch.tensor([kept for kept, _ in column.items], dtype=torch.int64, device="cpu")
        steps = torch.arange(len(kept), device="cpu")
        since = steps - torch.where(kept == 0, steps, 0).cummax(0).values
        store_added = self._added.plan(change, Rows([added for _, added in column.items]))

        def commit() -> None:
            store_added()
            self._kept[rows] = kept
            self._since[rows] = since

        return commit

    def read(self, plan: RowPlan) -> Column:
        """The rows of ``plan``; prompts of one episode may share memory."""
        rows = plan.rows()
        if not len(rows):
            return self._added.read(plan)
        since = self._since[rows]
        firsts, chain = torch.unique(rows - since, return_inverse=True)
        turns = torch.zeros_like(firsts).scatter_reduce_(0, chain, since + 1, "amax")
        needed = RowPlan(runs(firsts, turns))
        added, responses = self._added.read(needed), self.responses.read(needed)
        items = list(zip(self._kept[needed.starts].tolist(), step_tensors(added), strict=True))
        answers = list(step_tensors(responses))
        prompts: list[Tensor] = []
        ends = turns.cumsum(0)
        for start, stop in zip((ends - turns).tolist(), ends.tolist(), strict=True):
            prompts += expand(Additions(items[start:stop]), answers[start:stop])
        place = (ends - turns)[chain] + since
        return Rows([prompts[i] for i in place.tolist()])

    def release(self, blocks: Blocks, first: int | None) -> None:
        """Let go of the oldest episodes; ``first`` is the oldest row that stays, None if none."""
        self._added.release(blocks, first)

    def laid_out(self, moves: Moves, capacity: int) -> PromptColumn:
        """The column for a ring of ``capacity`` rows to which the rows have moved."""
        new = copy(self)
        new._added = self._added.laid_out(moves, capacity)
        new._kept = moves.laid_out(self._kept, capacity)
        new._since = moves.laid_out(self._since, capacity)
        return new

    def parts(self, live: Moves) -> dict[str, Part | Objects]:
        """What each prompt adds and keeps."""
        kept, since = (Part(live.pieces(rows)) for rows in (self._kept, self._since))
        return {**self._added.parts(live), "kept": kept, "since": since}

    def load(self, saved: SavedColumn, rows: range) -> None:
        """Hold these rows."""
        self._added.load(saved, rows)
        self._kept = saved.into("kept", rows, self._kept)
        self._since = saved.into("since", rows, self._since)


def _agreeing(a: Tensor, b: Tensor) -> int:
    """How many tokens ``a`` and ``b`` begin with in common."""
    shortest = min(len(a), len(b))
    a, b = a[:shortest], b[:shortest]
    return shortest if torch.equal(a, b) else int((a != b).int().argmax())
