"""Which row each turn goes on with.

A turn goes on with the longest row of its episode that its prompt starts with, or begins a new one.
Prompts that share memory, as views of one line of tokens do, cost what each adds to the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["RowPlan", "plan_rows"]

_SHORT = 1024
"""Prompts of so many tokens are sooner copied than looked at one by one."""
_BLOCK = 65536
"""Bytes that are compared at a time: what is copied for it stays small."""

_Line: TypeAlias = "bytes | np.ndarray"
"""Tokens as bytes, or as an array of them where the tokens are left where they are."""
_Head: TypeAlias = "tuple[int, _Line, int, bytes]"
"""What a row holds so far, a prompt and its response: the length of both, a line that begins with the
prompt, the length of the prompt, the response. Lengths are in bytes."""


class RowPlan(NamedTuple):
    """Where every turn goes."""

    row: list[int]
    """The turn's row."""
    known: list[int]
    """How many tokens of the turn's prompt its row held before; 0 where the turn starts a row."""
    reward: list[tuple[int, int]]
    """The row and the column on which the turn's reward lies."""
    turn: list[int]
    """The turn's number within its episode."""
    row_turn: list[int]
    """The turn of the batch that starts each row."""
    row_fork: list[int]
    """Each row's number within its episode."""
    row_length: list[int]
    """Each row's length, in tokens."""
    added: Tensor
    """What the prompts add to their rows, end to end: int64, in host memory."""


def plan_rows(
    prompts: Sequence[Tensor], responses: Tensor, sizes: Sequence[int], episode: Sequence[int]
) -> RowPlan:
    """Give every turn the longest row of its episode that its prompt starts with, or a new one.

    Of equally long rows it is the latest. The rewards of turns that sampled nothing lie where
    :class:`~torchrl_mt.transforms.MergeTurns` says.

    Args:
        prompts: the ``[ΣT]`` turns' prompts, vectors of integers on one device.
        responses: what was sampled for each of them, end to end.
        sizes: how many tokens that was.
        episode: the episode of each turn; the turns of one lie together, in order.

    Examples:
        >>> line = torch.tensor([1, 2, 3, 4])
        >>> plan = plan_rows([line[:2], line, line[:1]], torch.tensor([3, 5, 6]), [1, 1, 1], [0, 0, 0])
        >>> plan.row, plan.known, plan.row_length
        ([0, 0, 1], [0, 3, 0], [5, 2])
        >>> plan.added
        tensor([1, 2, 4, 1])
    """
    if {leaf.dtype for leaf in prompts} != {responses.dtype}:
        prompts, responses = [leaf.long() for leaf in prompts], responses.long()
    lengths = [leaf.shape[0] for leaf in prompts]
    lines = _lines(prompts, lengths)
    buffer = responses.cpu().numpy()
    item, answers = buffer.itemsize, buffer.tobytes()
    plan = RowPlan([], [], [], [], [], [], [], responses)
    reward, row_length = plan.reward, plan.row_length
    added: list[Any] = []
    heads: list[_Head] = []  # those of the present episode's rows
    last_sampled: tuple[int, int] | None = None  # where the episode's last sampled token lies
    at = first = base = 0
    for k, (line, tokens, size) in enumerate(zip(lines, lengths, sizes, strict=True)):
        if k == 0 or episode[k] != episode[k - 1]:
            heads, last_sampled, first, base = [], None, k, len(row_length)
        given = tokens * item
        mine, known = -1, -1
        for i in range(len(heads) - 1, -1, -1):
            if known < heads[i][0] <= given and _starts_with(line, heads[i]):
                mine, known = i, heads[i][0]
        end = at + size * item
        head = given + end - at, line, given, answers[at:end]
        if mine < 0:
            mine, known = len(heads), 0
            heads.append(head)
            plan.row_turn.append(k)
            plan.row_fork.append(mine)
            row_length.append(0)
        else:
            heads[mine] = head
        at, row = end, base + mine
        row_length[row] = tokens + size
        if size:
            if last_sampled is None:
                # The rewards of the turns before waited for the episode's first sampled token.
                reward[first:] = [(row, tokens)] * (k - first)
            last_sampled = row, tokens + size - 1
        plan.row.append(row)
        plan.known.append(known // item)
        plan.turn.append(k - first)
        reward.append(last_sampled or (row, tokens - 1))
        added.append(line[known:given])
    new = np.frombuffer(bytearray().join(added), buffer.dtype)
    return plan._replace(added=torch.from_numpy(new).long())


def _starts_with(line: _Line, head: _Head) -> bool:
    """Whether a line starts with what a row holds."""
    length, before, size, sampled = head
    if isinstance(line, bytes) and isinstance(before, bytes):
        same = line.startswith(sampled, size)
        return same and (line is before or line.startswith(before[:size]))
    # The response first: it is short, and differs wherever rows that began alike went apart.
    if bytes(line[size:length]) != sampled:
        return False
    return line is before or _agree(line, before, size)


def _agree(a: _Line, b: _Line, size: int) -> bool:
    """Whether two lines begin with the same ``size`` bytes."""
    ends = [*range(_BLOCK, size, _BLOCK), size] if size > _BLOCK else (size,)
    at = 0
    for end in ends:
        if bytes(a[at:end]) != bytes(b[at:end]):
            return False
        at = end
    return True


def _lines(leaves: Sequence[Tensor], lengths: list[int]) -> list[_Line]:
    """For each vector the longest that begins where it does, in host memory, by one transfer."""
    if not leaves:
        return []
    if not all(leaf.is_contiguous() for leaf in leaves):
        leaves = [leaf.contiguous() for leaf in leaves]
    places = [leaf.data_ptr() for leaf in leaves]
    longest = dict(zip(places, range(len(places)), strict=True))
    if len(longest) < len(places):
        for k, place in enumerate(places):
            if lengths[k] > lengths[longest[place]]:
                longest[place] = k
    lines: dict[int, _Line] = {}
    copied = longest
    if leaves[0].device.type == "cpu":
        copied = {place: k for place, k in longest.items() if lengths[k] <= _SHORT}
        for place in longest.keys() - copied.keys():
            lines[place] = leaves[longest[place]].numpy().view(np.uint8)
    if copied:
        flat = torch.cat([leaves[k] for k in copied.values()]).cpu().numpy()
        text, item, at = flat.tobytes(), flat.itemsize, 0
        for place, k in copied.items():
            end = at + lengths[k] * item
            lines[place], at = text[at:end], end
    return [lines[place] for place in places]
