"""Segments: a batch of steps, flat and without padding, cut where steps do not continue.

A segment is a run of steps of one id in time. Only its last step may end the episode, only its first
may begin one, and every other step continues the one before or follows it in its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_mt.data._store.steps import Path, Steps, has_lazy_stack, name_of, unpack
from torchrl_mt.data._writing.continuity import Continuity, Values, bits_at
from torchrl_mt.data._writing.ted import EndFlags, begins, not_padding, stacked

__all__ = [
    "IS_INIT",
    "Batch",
    "Segments",
    "flatten",
    "group_steps",
    "read_ids",
    "segment",
    "segments",
]

IS_INIT = 'its first step has a true "is_init"'
"""Reason why a step does not continue."""

Form = tuple[tuple[Path, torch.Size, torch.dtype], ...]
"""Entries, shapes per step and dtypes of a TensorDict of plain tensors."""


@dataclass
class Segments:
    """Segments that fill a batch, whose steps are grouped by id, one after the other."""

    ids: np.ndarray
    """int64 ``[S]``: id of each segment."""
    starts: np.ndarray
    """int64 ``[S]``: first position of each."""
    stops: np.ndarray
    """int64 ``[S]``: one past the last position of each."""

    @cached_property
    def keys(self) -> list[int]:
        """The ids as a list."""
        return self.ids.tolist()

    @cached_property
    def differ(self) -> bool:
        """Whether all ids differ."""
        return len(set(self.keys)) == len(self.keys)

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 ``[S]``: steps of each segment."""
        return self.stops - self.starts


def group_steps(ids: np.ndarray, rows: np.ndarray | None) -> np.ndarray | None:
    """Group the steps of a batch by id, in time order within each id.

    Args:
        ids: int64 ``[N]``, id of each step, row after row.
        rows: int64 ``[N]``, row of each step; None for a single row.

    Returns:
        int64 ``[N]``, the order of the steps; None if they are already grouped.

    Raises:
        ValueError: if an id is in more than one row.

    Examples:
        >>> group_steps(np.array([7, 4, 7, 4]), None)
        array([1, 3, 0, 2])
    """
    other = ids[1:] != ids[:-1]
    if other.all():
        first = ids.tolist()
    else:
        first = ids[np.concatenate(([0], np.flatnonzero(other) + 1))].tolist()
    alone = len(set(first)) == len(first)
    if rows is not None and not (alone and _runs(rows, other) == len(first)):
        by_id = np.lexsort((rows, ids))
        ids, rows = ids[by_id], rows[by_id]
        twice = ids[1:][(ids[1:] == ids[:-1]) & (rows[1:] != rows[:-1])]
        if len(twice):
            raise ValueError(
                f"each row of a [B, T] batch is one environment and needs ids of its own: id "
                f"{int(twice[0])} is in more than one row."
            )
        return by_id
    return None if alone else np.argsort(ids, kind="stable")


def segments(ids: np.ndarray, linked: np.ndarray) -> Segments:
    """Cut grouped steps into segments.

    Args:
        ids: int64 ``[N]``, id of each grouped step.
        linked: bool ``[N - 1]``: whether the following step continues each step.
    """
    if linked.all():
        return Segments(ids[:1], np.zeros(1, dtype=np.int64), np.array([len(ids)]))
    bounds = np.flatnonzero(~linked) + 1
    starts = np.concatenate(([0], bounds))
    return Segments(ids[starts], starts, np.concatenate((bounds, [len(ids)])))


def _runs(rows: np.ndarray, other: np.ndarray) -> int:
    """Count the runs of steps of one row and one id; ``other`` tells where the id changes."""
    return min(len(rows), 1) + int(np.count_nonzero(other | (rows[1:] != rows[:-1])))


@dataclass(frozen=True)
class Batch:
    """The steps of a batch without padding, and their segments."""

    steps: Steps
    places: np.ndarray | None
    """int64 ``[N]``: position of each step in the flattened batch; None if nothing is left out."""
    order: np.ndarray | None
    """int64 ``[N]``: the steps in the order of the segments; None if already in order."""
    segments: Segments
    ended: np.ndarray
    """Bool ``[S]``: whether the episode ends with the segment."""
    begins: np.ndarray | None
    """Bool ``[S]``: whether the segment's first step has a true ``"is_init"``; None if none has."""
    reasons: dict[int, str]
    """Why segments do not continue the previous one of their id, by position of the segment."""

    def positions(self, i: int) -> np.ndarray:
        """int64: the steps of segment ``i``."""
        start, stop = int(self.segments.starts[i]), int(self.segments.stops[i])
        return np.arange(start, stop) if self.order is None else self.order[start:stop]

    def firsts(self) -> np.ndarray:
        """int64 ``[S]``: the first step of each segment."""
        starts = self.segments.starts
        return starts if self.order is None else self.order[starts]

    def lasts(self) -> np.ndarray:
        """int64 ``[S]``: the last step of each segment."""
        last = self.segments.stops - 1
        return last if self.order is None else self.order[last]


def flatten(data: Any) -> tuple[Steps, Form | None]:
    """Flatten a batch, row after row; also return its form if it is a TensorDict of plain tensors.

    Tensors with consecutive rows in memory are not copied.

    Raises:
        ValueError: if there is no step, or a nested tensor in a ``[B, T]`` batch.
    """
    shape = data.batch_size
    number = shape.numel()
    if not number:
        raise ValueError(f"data must hold at least one step, got batch size {list(shape)}.")
    if type(data) is TensorDict:
        columns: dict[Path, Tensor] = {}
        form: list[tuple[Path, torch.Size, torch.dtype]] = []
        if _plain_columns(data, (), len(shape), columns, form):
            return Steps(number, columns), tuple(form)  # type: ignore[arg-type]
    if len(shape) == 1:
        return unpack(data), None
    if has_lazy_stack(data):
        return Steps.concat([flatten(row)[0] for row in data.unbind(0)]), None
    for key, value in data.items(True, True):
        if isinstance(value, Tensor) and value.is_nested:
            raise ValueError(
                f"{key!r} is a nested tensor, which does not go in a [B, T] batch: give a lazy stack "
                f"of steps (tensordict.lazy_stack), or [N] steps."
            )
    return unpack(data.reshape(-1)), None


def read_ids(steps: Steps, key: Path) -> np.ndarray:
    """Read the id of each step: int64 ``[N]``; ``ValueError`` unless it is one integer per step."""
    ids = stacked(steps.columns[key])
    if ids is not None and ids.dtype == torch.int64 and ids.is_cpu and ids.numel() == steps.length:
        return ids.numpy().reshape(-1)
    if ids is None or ids.is_floating_point() or ids.is_complex() or ids.numel() != steps.length:
        got = "objects" if ids is None else f"{tuple(ids.shape)} {ids.dtype}"
        raise ValueError(f"{name_of(key)} must hold one integer id per step, got {got}.")
    array: np.ndarray = ids.reshape(-1).long().cpu().numpy()
    return array


def segment(
    steps: Steps,
    ids: np.ndarray | None,
    shape: torch.Size,
    flags: EndFlags,
    paths: tuple[Path, ...],
    continuity: Continuity,
    *,
    learn: bool,
) -> Batch:
    """Cut a batch into segments.

    Consecutive steps of one id in a row always continue each other, unless ``"is_init"`` is true.

    Args:
        steps: the flattened batch.
        ids: int64 ``[N]``, id of each step; None takes the row as id.
        shape: ``[N]`` or ``[B, T]``, its batch size.
        flags: the flags that end an episode.
        paths: the entries to compare.
        continuity: what was learned of them; learns from this batch.
        learn: whether to learn from consecutive steps of a row.
    """
    if shape[-1] == 1 and not_padding(steps) is None:
        each = np.arange(steps.length)
        alone = Segments(each if ids is None else ids, each, each + 1)
        if alone.differ:
            return Batch(steps, None, None, alone, flags.ended(steps), begins(steps), {})
    rows = None
    if shape[-1] < steps.length:
        rows = np.repeat(np.arange(steps.length // shape[-1]), shape[-1])
    valid = not_padding(steps)
    places = None if valid is None else valid.nonzero()[0]
    ended, init = flags.ended(steps), begins(steps)
    if places is not None:
        ended, init = ended[places], None if init is None else init[places]
        ids, rows = (None if each is None else each[places] for each in (ids, rows))
        steps = steps.take(torch.from_numpy(places))
    order = None
    if ids is None:
        ids = np.zeros(steps.length, dtype=np.int64) if rows is None else rows
    else:
        order = group_steps(ids, rows)
    if order is not None:
        ids, ended, init = ids[order], ended[order], None if init is None else init[order]
    if not len(ids):
        return Batch(steps, places, None, Segments(ids, ids, ids), ended, None, {})
    linked = (ids[1:] == ids[:-1]) & ~ended[:-1]
    odd: dict[int, str] = {}
    if init is not None:
        odd = dict.fromkeys((np.flatnonzero(linked & init[1:]) + 1).tolist(), IS_INIT)
        linked &= ~init[1:]
    if paths and (learn or order is not None) and linked.any():
        odd |= _broken(steps, linked, order, paths, continuity, learn)
    parts = segments(ids, linked)
    first = parts.starts
    reasons = {} if not odd else {i: odd[at] for i, at in enumerate(first.tolist()) if at in odd}
    begun = None if init is None else init[first]
    return Batch(steps, places, order, parts, ended[parts.stops - 1], begun, reasons)


def _broken(
    steps: Steps,
    linked: np.ndarray,
    order: np.ndarray | None,
    paths: tuple[Path, ...],
    continuity: Continuity,
    learn: bool,
) -> dict[int, str]:
    """Unlink steps that do not continue the step before; return why, by position of the step."""
    links = np.flatnonzero(linked)
    columns = steps.columns

    def values(at: np.ndarray | slice) -> Values:
        return lambda path: bits_at(columns[path], at)

    if order is None:
        before, after = links, links + 1
        if len(links) == len(linked):
            continuity.learn(paths, values(slice(1, None)), values(slice(None, -1)))
        else:
            continuity.learn(paths, values(after), values(before))
        return {}
    before, after = order[links], order[links + 1]
    follows = after == before + 1
    if learn and follows.any():
        continuity.learn(paths, values(after[follows]), values(before[follows]))
    links, before, after = links[~follows], before[~follows], after[~follows]
    if not len(links):
        return {}
    verdict = continuity.judge(paths, values(after), values(before))
    if verdict.goes_on is None:
        return {}
    wrong = np.flatnonzero(~verdict.goes_on)
    linked[links[wrong]] = False
    return {
        at + 1: differs_in(verdict.reason(i))
        for i, at in zip(wrong.tolist(), links[wrong].tolist(), strict=True)
    }


def differs_in(path: Path | None) -> str:
    """Say that an entry differs from the ``"next"`` entry of the step before."""
    assert path is not None
    return f"its {name_of(path)} is not the {name_of(('next', *path))} before it"


def _plain_columns(
    data: TensorDict,
    path: Path,
    dims: int,
    columns: dict[Path, Tensor],
    form: list[tuple[Path, torch.Size, torch.dtype]],
) -> bool:
    """Collect the columns and form of a TensorDict; False if it is not made of strided tensors."""
    for name, value in data.items():
        where = (*path, name)
        if isinstance(value, Tensor):
            if value.is_nested or value.layout is not torch.strided or value.is_meta:
                return False
            if value.requires_grad:
                value = value.detach()
            if value.is_conj() or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            if dims > 1:
                value = value.flatten(0, dims - 1)
            columns[where] = value
            form.append((where, value.shape[1:], value.dtype))
        elif type(value) is not TensorDict or not _plain_columns(value, where, dims, columns, form):
            return False
    return True
