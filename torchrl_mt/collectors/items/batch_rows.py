"""The rows of a ``DataLoader``'s batch, equal to the items that were batched.

Numbers come back as tensors without dimensions, as ``default_collate`` made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tensordict import is_tensor_collection
from torch.utils.data import default_collate

__all__ = ["length_of", "rows_of_batch"]


def rows_of_batch(batch: Any, *, collate_fn: Any = None) -> Iterator[Any]:
    """Split a batch into its rows.

    Args:
        batch: a list of items; a mapping of columns (tensors, lists, nested mappings); or anything with
            a length whose ``batch[i]`` is a row (a tensor, a TensorDict).
        collate_fn: the function that made the batch. Lists that torch's ``default_collate`` made of
            sequences are lists of columns.

    Returns:
        An iterator over the rows; dicts if the batch is a mapping.

    Raises:
        TypeError: if the batch is none of the above.
        ValueError: if its columns differ in length.

    Examples:
        >>> list(rows_of_batch({"task": ["a", "b"], "level": [1, 2]}))
        [{'task': 'a', 'level': 1}, {'task': 'b', 'level': 2}]
    """
    by_default = collate_fn is default_collate
    sizes = dict(_sizes(batch, "batch", by_default))
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the columns of a DataLoader's batch must have the same length, got {sizes}: return a list "
            "of items from collate_fn, or columns with an entry for every item."
        )
    return (_row(batch, i, by_default) for i in range(next(iter(sizes.values()), 0)))


def _sizes(batch: Any, name: str, by_default: bool) -> Iterator[tuple[str, int]]:
    if _is_columns(batch):
        for key, column in batch.items():
            yield from _sizes(column, f"{name}[{key!r}]", by_default)
    elif by_default and _is_transposed(batch):
        for i, column in enumerate(batch):
            yield from _sizes(column, f"{name}[{i}]", by_default)
    elif (
        isinstance(batch, (str, bytes))
        or not hasattr(batch, "__getitem__")
        or (size := length_of(batch)) is None
    ):
        raise TypeError(
            "a DataLoader's batch must be a list of items, a mapping of columns, a tensor or a "
            f"TensorDict; {name} is of type {type(batch).__name__} and has no rows: change "
            "collate_fn, or set batch_size=None if every batch is one item."
        )
    elif name == "batch" and isinstance(batch, tuple) and not by_default:
        raise TypeError(
            "a DataLoader's batch must be a list of items or a mapping of columns; got a tuple, which "
            "may be either: return list(...) or a dict from collate_fn."
        )
    else:
        yield name, size


def _row(batch: Any, i: int, by_default: bool) -> Any:
    if _is_columns(batch):
        return {key: _row(column, i, by_default) for key, column in batch.items()}
    if by_default and _is_transposed(batch):
        columns = [_row(column, i, by_default) for column in batch]
        return type(batch)(*columns) if hasattr(batch, "_fields") else columns
    return batch[i]


def _is_columns(batch: Any) -> bool:
    """Whether this is a mapping of columns; a TensorDict has rows itself."""
    return isinstance(batch, Mapping) and not is_tensor_collection(batch)


def _is_transposed(batch: Any) -> bool:
    """Whether ``default_collate`` made this list of columns out of sequences."""
    return isinstance(batch, (list, tuple)) and not (
        batch and isinstance(batch[0], (str, bytes)) and not hasattr(batch, "_fields")
    )


def length_of(data: Any) -> int | None:
    """Length of the data; ``None`` if it has none."""
    if not hasattr(type(data), "__len__"):
        return None
    try:
        return len(data)
    except TypeError:  # Such as a DataLoader over data without a length, or a tensor's number.
        return None
