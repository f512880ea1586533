"""What TorchRL's episode data format says of steps: where episodes end, and which are padding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torchrl_mt.data.steps import Column, Path, Rows, Steps, name_of

__all__ = ["ended", "names_of", "not_padding", "stacked", "truncated"]

_DONE: Path = ("next", "done")
_TRUNCATED: Path = ("next", "truncated")
_MASK: Path = ("collector", "mask")
_END_KEYS: tuple[Path, ...] = (_DONE, ("next", "terminated"), _TRUNCATED)


def ended(steps: Steps) -> Tensor:
    """Bool ``[N]`` on the CPU: the steps that end their episode."""
    last: Tensor | None = None
    found = [flag for flag in map(steps.columns.get, _END_KEYS) if flag is not None]
    if not found:
        raise ValueError(
            f'data must tell where episodes end: ("next", "done") (or terminated, truncated) is '
            f"missing; the keys are {names_of(steps)}"
        )
    for column in found:
        flag = stacked(column)
        if flag is None:
            raise ValueError("done flags must be tensors, got Python objects")
        flag = flag.reshape(steps.length, -1).bool()
        flag = flag.squeeze(1) if flag.shape[1] == 1 else flag.any(1)
        last = flag if last is None else last | flag
    assert last is not None
    return last.cpu()


def truncated(episode: Steps) -> Steps:
    """The episode with its last step marked truncated."""
    columns = dict(episode.columns)
    marked = False
    for key in (_DONE, _TRUNCATED):
        flag = None if key not in columns else stacked(columns[key])
        if flag is not None:
            flag = flag.clone()
            flag[-1] = True
            columns[key], marked = flag, True
    if not marked:
        raise ValueError(
            'flush() marks the last step of an open episode: its steps need ("next", "truncated") '
            'or ("next", "done")'
        )
    return replace(episode, columns=columns)


def not_padding(steps: Steps, shape: torch.Size) -> Tensor | None:
    """Bool of the given shape: the steps that are no padding; None if there is none."""
    mask = stacked(steps.columns[_MASK]) if _MASK in steps.columns else None
    return None if mask is None or bool(mask.all()) else mask.reshape(shape).cpu().bool()


def stacked(column: Column) -> Tensor | None:
    """A column as one tensor; None if it holds objects."""
    if isinstance(column, Rows):
        return torch.stack(column.items)
    return column if isinstance(column, Tensor) else None


def names_of(steps: Steps) -> str:
    """The entries of some steps as one writes them in code."""
    return ", ".join(map(name_of, sorted(steps.columns)))
