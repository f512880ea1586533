"""TorchRL's episode data format (TED): which steps begin and end episodes, and which are padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.steps import Column, Path, Rows, Steps, name_of
from torchrl_mt.devices import on_cpu

__all__ = [
    "FLAGS",
    "INIT",
    "EndFlags",
    "begins",
    "copied_to_cpu",
    "names_of",
    "not_padding",
    "stacked",
]

FLAGS = ("done", "terminated", "truncated")
"""Names of done flags. At the root of a step they are false, as an ended episode takes no step."""

_END_KEYS: tuple[Path, ...] = tuple(("next", flag) for flag in FLAGS)
_MASK: Path = ("collector", "mask")
INIT: Path = ("is_init",)


@dataclass(frozen=True)
class EndFlags:
    """The flags that end an episode."""

    keys: tuple[Path, ...] = ()
    """Where they are; () for those of done, terminated and truncated under ``"next"`` that exist."""
    done_on_any: bool = True
    """For one flag per agent: whether any true flag ends the episode, rather than all."""

    def told_by(self) -> tuple[Path, ...]:
        """List the columns that may tell which steps begin and end episodes, and which are padding."""
        return (*(self.keys or _END_KEYS), _MASK, INIT)

    def ended(self, steps: Steps) -> np.ndarray:
        """Return which steps end their episode: bool ``[N]``."""
        found = [steps.columns[key] for key in self.keys or _END_KEYS if key in steps.columns]
        missing = [key for key in self.keys if key not in steps.columns]
        if missing or not found:
            wanted = "(or terminated, truncated) "
            name = name_of(missing[0]) if missing else '("next", "done")'
            raise ValueError(
                f"data must tell where episodes end: {name} {'' if missing else wanted}is "
                f"missing; the keys are {names_of(steps)}."
            )
        flags: list[Tensor] = []
        for column in found:
            if (flag := stacked(column)) is None:
                raise ValueError("done flags must be tensors, got Python objects.")
            flags.append(flag)
        # Flags of one width belong to the same agents.
        by_agents: dict[int, np.ndarray] = {}
        for flag in on_cpu(*flags):
            values = _array(flag, steps.length)
            width = values.shape[1]
            by_agents[width] = values | by_agents.get(width, False)
        last, reduce = np.zeros(steps.length, dtype=bool), np.any if self.done_on_any else np.all
        for width, values in by_agents.items():
            last |= values[:, 0] if width == 1 else reduce(values, 1)
        return last

    def truncate(self, steps: Steps, at: Sequence[int]) -> Steps:
        """Mark the steps at the positions ``at`` as truncated; the given steps do not change."""
        columns = dict(steps.columns)
        marked = self.marks(steps)
        if not marked:
            raise ValueError(
                'flush() marks the last step of an open episode: its steps need ("next", "truncated") '
                'or ("next", "done").'
            )
        for key in marked:
            flag = stacked(columns[key])
            assert flag is not None
            flag = flag.clone()
            flag[list(at)] = True
            columns[key] = flag
        return replace(steps, columns=columns)

    def marks(self, steps: Steps) -> list[Path]:
        """List the flags to set at the last step of a truncated episode."""
        keys: dict[Path, None] = {}
        for key in self.keys or _END_KEYS:
            if key[-1] != "terminated":
                keys[key] = None
            if key[-1] in FLAGS:
                keys.update(dict.fromkeys((*key[:-1], flag) for flag in ("done", "truncated")))
        found = [key for key in keys if key in steps.columns]
        return [key for key in found if stacked(steps.columns[key]) is not None]


def copied_to_cpu(steps: Steps, keys: Iterable[Path]) -> Steps:
    """Copy columns on another device to the CPU, as one; the given steps do not change."""
    found = {key: steps.columns.get(key) for key in keys}
    away = {k: x for k, x in found.items() if isinstance(x, Tensor) and not x.is_cpu}
    copies = dict(zip(away, on_cpu(*away.values()), strict=True))
    return replace(steps, columns={**steps.columns, **copies}) if copies else steps


def begins(steps: Steps) -> np.ndarray:
    """Return which steps have a true ``"is_init"``: bool ``[N]``."""
    column = steps.columns.get(INIT)
    flag = None if column is None else stacked(column)
    if flag is None or flag.shape[0] != steps.length or not flag.numel():
        return np.zeros(steps.length, dtype=bool)
    found: np.ndarray = np.any(_array(flag, steps.length), axis=1)
    return found


def not_padding(steps: Steps) -> np.ndarray | None:
    """Return which steps are not padding: bool ``[N]``; None if there is no padding."""
    mask = stacked(steps.columns[_MASK]) if _MASK in steps.columns else None
    if mask is None or bool(mask.all()):
        return None
    return _array(mask, steps.length)[:, 0]


def stacked(column: Column) -> Tensor | None:
    """Stack a column to one tensor; None if it holds objects."""
    if isinstance(column, Rows):
        return torch.stack(column.items)
    return column if isinstance(column, Tensor) else None


def names_of(steps: Steps) -> str:
    """List the entries of steps as one writes them in code."""
    return ", ".join(map(name_of, sorted(steps.columns)))


def _array(flag: Tensor, length: int) -> np.ndarray:
    """Convert a flag to a bool array ``[N, *]``."""
    if flag.dtype != torch.bool or not flag.is_cpu:
        flag = flag.bool().cpu()
    array: np.ndarray = flag.numpy()
    return array.reshape(length, -1)
