"""Number of tokens of an episode, as the budget ``max_tokens`` counts them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from torchrl_mt.data._store.columns.prompt_column import Prompts
from torchrl_mt.data._store.schema import Schema
from torchrl_mt.data._store.steps import Objects, Steps, step_tensors

__all__ = ["count_tokens"]


def count_tokens(schema: Schema, steps: Steps, lengths: Tensor) -> Tensor:
    """Count the tokens of each episode: int64 ``[E]``.

    Tokens are the elements of the entries under ``"tokens"`` (which may be a tensorclass); of a growing
    prompt, only those that each turn adds. Without such entries, they are the elements of the largest
    ragged entry.

    Args:
        schema: the schema of the steps.
        steps: whole episodes, one after the other, in the form in which they are stored.
        lengths: int64 ``[E]``, steps of each.
    """
    none = torch.zeros_like(lengths)
    if not schema.counted:
        return none
    counted = {path: steps.columns[path] for path in schema.counted}
    ends = lengths.cumsum(0) - 1
    totals = {
        path: _sizes(column).cumsum(0)[ends].diff(prepend=none[:1])
        for path, column in counted.items()
        if not isinstance(column, Objects) or any(map(is_tensor_collection, column.items))
    }
    if not totals:
        return none
    named = [total for path, total in totals.items() if path[0] == "tokens"]
    if named:
        return sum(named, none)
    return torch.stack([none, *totals.values()]).amax(0)


def _sizes(column: Any) -> Tensor:
    """Count the stored elements of each step: int64 ``[T]``."""
    if isinstance(column, Objects):
        sizes = [_elements(item) for item in column.items]
    elif isinstance(column, Prompts):
        sizes = [item.added.numel() for item in column.items]
    else:
        sizes = [item.numel() for item in step_tensors(column)]
    return torch.tensor(sizes, dtype=torch.int64, device="cpu")


def _elements(item: Any) -> int:
    """Count the elements of a tensorclass; 0 for another object."""
    if not is_tensor_collection(item):
        return 0
    return sum(value.numel() for value in item.values(True, True) if isinstance(value, Tensor))
