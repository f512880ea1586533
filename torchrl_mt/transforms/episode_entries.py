"""What is known about an episode (its label, a reference answer), carried to each of its rows.

Every row has the value of its episode's last turn, on which what became of the episode stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

DATA = "data"
"""Where collectors write the item that each episode was reset with."""


def entry_of_rows(
    tensordict: TensorDictBase, key: NestedKey, row_last: Sequence[int]
) -> Tensor | NonTensorStack | None:
    """Read one value for each row: the batch's entry, or else what the episodes' items have under it.

    Args:
        tensordict: ``[ΣT]`` turns.
        key: The entry's key. A string is looked up in the items, too, where the batch has no such
            entry and its ``"data"`` are mappings.
        row_last: The last turn of the episode of each of the ``N`` rows.

    Returns:
        ``[N, ...]`` for a tensor, or ``N`` objects, ``None`` for an item without it; ``None`` if
        neither the batch nor any item has it.

    Examples:
        >>> from tensordict import TensorDict
        >>> turns = TensorDict({"data": NonTensorStack({"label": "a"}, {"label": "b"})}, [2])
        >>> entry_of_rows(turns, "label", [0, 1, 1]).tolist()
        ['a', 'b', 'b']
    """
    value = tensordict.get(key, None)
    if isinstance(value, Tensor):
        return value[torch.as_tensor(row_last, device=value.device)]
    if value is not None:
        objects = _objects(value, len(tensordict))
        return _stack([objects[turn] for turn in row_last])
    items = tensordict.get(DATA, None)
    if items is None or not isinstance(key, str):
        return None
    objects = _objects(items, len(tensordict))
    rows = [objects[turn] for turn in row_last]
    if not any(isinstance(item, Mapping) and key in item for item in rows):
        return None
    return _stack([item.get(key) if isinstance(item, Mapping) else None for item in rows])


def item_keys(tensordict: TensorDictBase) -> list[Any] | None:
    """The keys that items of a batch have; ``None`` if none of them is a mapping.

    Examples:
        >>> from tensordict import TensorDict
        >>> item_keys(TensorDict({"data": NonTensorStack({"label": "a"}, {"hint": "b"})}, [2]))
        ['hint', 'label']
    """
    items = _objects(tensordict.get(DATA, None), len(tensordict))
    mappings = [item for item in items if isinstance(item, Mapping)]
    return sorted({key for item in mappings for key in item}, key=str) if mappings else None


def column_of_none(count: int) -> NonTensorStack:
    """A column of ``count`` times ``None``."""
    return _stack([None] * count)


def _objects(value: Any, count: int) -> list[Any]:
    """The Python objects of a non-tensor entry; nothing where it is a nested TensorDict."""
    if isinstance(value, NonTensorData):
        return [value.data] * count
    return value.tolist() if isinstance(value, NonTensorStack) else [None] * count


def _stack(values: Sequence[Any]) -> NonTensorStack:
    """A column of Python objects."""
    return NonTensorStack(*(NonTensorData(value) for value in values))
