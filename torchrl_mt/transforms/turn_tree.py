"""The tree of an episode's turns, and the training rows that follow from it.

A turn's *parent* is the last earlier turn of its episode whose tokens (prompt and response) its prompt
begins with. A turn goes on with the row that ends with its parent. Without a parent, or where another
turn has gone on with that row, it begins a new row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["RowAssignment", "assign_rows", "find_parents"]


class RowAssignment(NamedTuple):
    """The row of every turn."""

    row: list[int]
    """Each turn's row."""
    known: list[int]
    """How many tokens of each turn's prompt its row held before; 0 where the turn begins the row."""
    first: list[int]
    """The turn that begins each row."""
    last: list[int]
    """The turn that ends each row: the row is its prompt and its response."""
    length: list[int]
    """Each row's length, in tokens."""


def assign_rows(
    parents: Sequence[int], prompt_sizes: Sequence[int], response_sizes: Sequence[int]
) -> RowAssignment:
    """Assign turns to rows, so that every response is in exactly one row.

    Args:
        parents: each turn's parent as its place among these turns, -1 for none.
        prompt_sizes: length of each turn's prompt, in tokens.
        response_sizes: length of each turn's response, in tokens.

    Examples:
        >>> assign_rows([-1, 0, 0], [2, 4, 3], [1, 1, 1])
        RowAssignment(row=[0, 0, 1], known=[0, 3, 0], first=[0, 2], last=[1, 2], length=[5, 4])
    """
    rows = RowAssignment([], [], [], [], [])
    for k, (parent, tokens, sampled) in enumerate(
        zip(parents, prompt_sizes, response_sizes, strict=True)
    ):
        row = rows.row[parent] if parent >= 0 else -1
        if row < 0 or rows.last[row] != parent:
            row = len(rows.first)
            rows.first.append(k)
            rows.last.append(k)
            rows.length.append(0)
        rows.row.append(row)
        rows.known.append(rows.length[row])
        rows.last[row], rows.length[row] = k, tokens + sampled
    return rows


def find_parents(
    prompts: Sequence[Tensor],
    responses: Tensor,
    sizes: Sequence[int],
    episode: Sequence[int],
    told: Sequence[int] | None = None,
) -> list[int]:
    """Find every turn's parent by comparing tokens.

    A parent that somebody tells is checked, not believed: one that the tokens contradict is found as if
    it had not been told. -1 is believed, since that can begin a row too many but no wrong one. Of
    prompts that begin in one place in memory, only the response in between is read.

    Args:
        prompts: the ``[ΣT]`` turns' prompts, vectors of integers on one device.
        responses: what was sampled for each of them, end to end.
        sizes: how many tokens that was.
        episode: the episode of each turn; the turns of one lie together, in order.
        told: each turn's parent, if anybody knows them.

    Returns:
        Each turn's parent as its place among all turns, as in ``told``; -1 for none.

    Examples:
        >>> prompts = [torch.tensor(p) for p in ([1, 2], [1, 2, 3, 4], [1], [1, 2, 3, 9])]
        >>> find_parents(prompts, torch.tensor([3, 5, 6, 7]), [1, 1, 1, 1], [0, 0, 0, 0])
        [-1, 0, -1, 0]
    """
    if {prompt.dtype for prompt in prompts} != {responses.dtype}:
        prompts, responses = [prompt.long() for prompt in prompts], responses.long()
    lines, sampled = _lines(prompts), responses.cpu().numpy()
    answers = [sampled[at:end].tobytes() for at, end in pairwise(accumulate(sizes, initial=0))]
    known = [len(prompt) for prompt in prompts]

    def goes_on(turn: int, before: int) -> bool:
        start, end = known[before], known[before] + sizes[before]
        if end > known[turn]:
            return False
        line, other = lines[turn], lines[before]
        # The response first: it is short, and differs wherever turns that began alike went apart.
        return line[start:end].tobytes() == answers[before] and (
            line is other or line[:start].tobytes() == other[:start].tobytes()
        )

    parents: list[int] = []
    first = 0
    for k in range(len(prompts)):
        if k and episode[k] != episode[k - 1]:
            first = k
        if told is not None and (told[k] == -1 or (first <= told[k] < k and goes_on(k, told[k]))):
            parents.append(told[k])
        else:
            earlier = range(k - 1, first - 1, -1)
            parents.append(next((j for j in earlier if goes_on(k, j)), -1))
    return parents


def _lines(prompts: Sequence[Tensor]) -> list[Any]:
    """For each prompt an array in host memory that begins with it.

    Prompts that begin in one place have the same array. What is in host memory is not copied.
    """
    if not all(prompt.is_contiguous() for prompt in prompts):
        prompts = [prompt.contiguous() for prompt in prompts]
    places = [prompt.data_ptr() for prompt in prompts]
    longest: dict[int, Tensor] = {}
    for place, prompt in zip(places, prompts, strict=True):
        if len(prompt) >= len(longest.setdefault(place, prompt)):
            longest[place] = prompt
    if all(prompt.is_cpu for prompt in longest.values()):
        arrays = [prompt.numpy() for prompt in longest.values()]
    else:  # by one transfer
        ends = np.cumsum([len(prompt) for prompt in longest.values()])
        arrays = np.split(torch.cat([*longest.values()]).cpu().numpy(), ends[:-1])
    lines = dict(zip(longest, arrays, strict=True))
    return [lines[place] for place in places]
