"""Segments: a batch of steps, flat and without padding, cut where an episode may end or begin.

A segment is a run of steps of one id in one row. Only its last step may end the episode, only its first
may begin one, and every other step continues the one before.
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
from torchrl_mt.data._writing.ted import EndFlags, begins, copied_to_cpu, not_padding, stacked

__all__ = ["Batch", "Form", "Segments", "flatten", "segment"]

Form = tuple[tuple[Path, torch.Size, torch.dtype], ...]
"""Entries, shapes per step and dtypes of a TensorDict of plain tensors."""


@dataclass
class Segments:
    """Segments that fill a batch, one after the other."""

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


@dataclass(frozen=True)
class Batch:
    """The steps of a batch without padding, and their segments."""

    steps: Steps
    places: np.ndarray | None
    """int64 ``[N]``: position of each step in the flattened batch; None if nothing is left out."""
    segments: Segments
    ended: np.ndarray
    """Bool ``[S]``: whether the episode ends with the segment."""
    begins: np.ndarray
    """Bool ``[S]``: whether the segment's first step has a true ``"is_init"``."""

    @cached_property
    def anew(self) -> np.ndarray:
        """Bool ``[S]``: whether the segment follows one of its id that ended, so begins an episode."""
        found, ids = np.zeros(len(self.ended), dtype=bool), self.segments.ids
        found[1:] = (ids[1:] == ids[:-1]) & self.ended[:-1]
        return found

    def pairs(self, most: int) -> np.ndarray:
        """int64: the first ``most`` steps that the following one continues."""
        inner = np.ones(self.steps.length, dtype=bool)
        inner[self.segments.stops - 1] = False
        return np.flatnonzero(inner)[:most]


def segment(steps: Steps, id_key: Path | None, shape: torch.Size, flags: EndFlags) -> Batch:
    """Cut a batch into segments.

    Args:
        steps: the flattened batch.
        id_key: the column of ids; None takes the row as id.
        shape: ``[N]`` or ``[B, T]``, its batch size.
        flags: the flags that end an episode.

    Raises:
        ValueError: if ids are not one integer per step, or one is in more than one row.
    """
    rows = np.arange(steps.length) // shape[-1]
    told = copied_to_cpu(steps, (*flags.told_by(), *([] if id_key is None else [id_key])))
    ids = rows if id_key is None else read_ids(told, id_key)
    ended, init = flags.ended(told), begins(told)
    valid, places = not_padding(told), None
    if valid is not None:
        places = valid.nonzero()[0]
        rows, ids, ended, init = rows[places], ids[places], ended[places], init[places]
        steps = steps.take(torch.from_numpy(places))
    cut = (ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1]) | ended[:-1] | init[1:]
    bounds = np.flatnonzero(cut) + 1
    starts = np.concatenate(([0], bounds)) if len(ids) else bounds
    stops = np.concatenate((bounds, [len(ids)])) if len(ids) else bounds
    parts = Segments(ids[starts], starts, stops)
    if not parts.differ:
        row_of: dict[int, int] = {}
        for key, row in zip(parts.keys, rows[starts].tolist(), strict=True):
            if row_of.setdefault(key, row) != row:
                raise ValueError(
                    f"each row of a [B, T] batch is one environment and needs ids of its own: id "
                    f"{key} is in more than one row."
                )
    return Batch(steps, places, parts, ended[stops - 1], init[starts])


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
