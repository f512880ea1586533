"""The tree of an episode's turns, and its training rows.

A turn's *parent* is the longest earlier turn of its episode whose prompt and response are a prefix of
this turn's prompt, the later one of equals. A turn extends the row that ends with its parent. If it has
no parent, or another turn has already extended that row, it begins a new row.
"""

from __future__ import annotations

from bisect import bisect, insort
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
    """Row of each turn."""
    known: list[int]
    """Tokens of each turn's prompt that were in its row before; 0 if the turn begins the row."""
    first: list[int]
    """First turn of each row."""
    last: list[int]
    """Last turn of each row: the row is this turn's prompt and response."""
    length: list[int]
    """Length of each row, in tokens."""


def assign_rows(
    parents: Sequence[int], prompt_sizes: Sequence[int], response_sizes: Sequence[int]
) -> RowAssignment:
    """Assign turns to rows, so that every response is in exactly one row.

    Args:
        parents: index of each turn's parent, -1 for none.
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
    claimed: Sequence[int] | None = None,
    *,
    images: bool = False,
) -> list[int]:
    """Find every turn's parent by comparing tokens.

    A claim of -1 is trusted: at worst it begins an extra row. Other claims count if turns show images,
    and only where the tokens agree. For prompts that share memory, only the response in between is
    compared.

    Args:
        prompts: prompts of ``[ΣT]`` turns, integer vectors on one device.
        responses: sampled tokens of all turns, concatenated.
        sizes: number of sampled tokens of each turn.
        episode: episode of each turn; turns of an episode are contiguous and in order.
        claimed: claimed parent of each turn, as in the result; ``None`` for no claims.
        images: whether turns show images, which their tokens do not tell apart.

    Returns:
        Index of each turn's parent among all turns; -1 for none.

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

    def extends(turn: int, before: int) -> bool:
        start, end = known[before], known[before] + sizes[before]
        if end > known[turn]:
            return False
        line, other = lines[turn], lines[before]
        # The response first: it is short, and turns that share a beginning differ there.
        return line[start:end].tobytes() == answers[before] and (
            line is other or line[:start].tobytes() == other[:start].tobytes()
        )

    parents: list[int] = []
    first = 0
    ends: list[tuple[int, int]] = []  # length and index of the episode's turns so far, in order
    for k in range(len(prompts)):
        if k and episode[k] != episode[k - 1]:
            first, ends = k, []
        claim = None if claimed is None else claimed[k]
        if claim == -1 or (
            images and claim is not None and first <= claim < k and extends(k, claim)
        ):
            parents.append(claim)
        else:
            fitting = range(bisect(ends, (known[k], k)) - 1, -1, -1)  # the longest first
            parents.append(next((ends[i][1] for i in fitting if extends(k, ends[i][1])), -1))
        insort(ends, (known[k] + sizes[k], k))
    return parents


def _lines(prompts: Sequence[Tensor]) -> list[Any]:
    """For each prompt, an array in host memory that begins with it.

    Prompts that start at the same address share an array. Host tensors are not copied.
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
