"""How many tokens an episode holds: what the budget ``max_tokens`` counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_mt.data.growing import Additions
from torchrl_mt.data.schema import Entry, Schema
from torchrl_mt.data.steps import Path, Steps, step_tensors

__all__ = ["count_tokens", "counted"]


def count_tokens(schema: Schema, steps: Steps, lengths: Tensor) -> Tensor:
    """The tokens of each episode: int64 ``[E]``.

    They are the elements of the entries under ``"tokens"``, of a growing prompt those that each turn
    adds; where there are none, the elements of the largest ragged entry.

    Args:
        schema: what the steps look like.
        steps: whole episodes, one after the other, in the form in which they are stored.
        lengths: int64 ``[E]``, steps of each.
    """
    ends = lengths.cumsum(0) - 1
    none = torch.zeros_like(lengths)
    totals = {
        path: _sizes(steps.columns[path]).cumsum(0)[ends].diff(prepend=none[:1])
        for path in counted(schema)
    }
    if any(map(_is_token, totals)):
        return sum((total for path, total in totals.items() if _is_token(path)), none)
    return torch.stack([none, *totals.values()]).amax(0)


def counted(schema: Schema) -> frozenset[Path]:
    """The entries whose elements count."""

    def counts(path: Path, entry: Entry) -> bool:
        return entry.kind == "ragged" or (entry.kind == "dense" and _is_token(path))

    return frozenset(path for path, entry in schema.entries.items() if counts(path, entry))


def _is_token(path: Path) -> bool:
    return path[0] == "tokens"


def _sizes(column: Any) -> Tensor:
    """Elements that each step of a column is stored with: int64 ``[T]``."""
    if isinstance(column, Additions):
        sizes = [added.numel() for _, added in column.items]
    else:
        sizes = [item.numel() for item in step_tensors(column)]
    return torch.tensor(sizes, dtype=torch.int64, device="cpu")
