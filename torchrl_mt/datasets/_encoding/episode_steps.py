"""What a user gives as an episode, as columns of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from torchrl_mt.data._store.steps import (
    Column,
    Objects,
    Path,
    Rows,
    Steps,
    name_of,
    path_of,
    unpack,
)

__all__ = ["steps_of"]


def steps_of(episode: Any) -> Steps:
    """Convert an episode to columns on the CPU.

    Args:
        episode: a TED TensorDict ``[T]``, or a dict of arrays ``[T, ...]`` or of lists with one value
            per step. Keys are strings or tuples of strings; dicts may be nested. A list of numbers
            becomes a tensor ``[T]``. A list of arrays becomes one tensor if all have one shape, and
            otherwise a tensor per step, as a list of lists of numbers always does. Lists of anything
            else (strings, messages, None) hold Python objects.

    Raises:
        TypeError: if it is something else.
        ValueError: if it is empty or its entries differ in length.

    Examples:
        >>> steps = steps_of({"action": [[0.5], [1.5]], "next": {"reward": np.zeros((2, 1))}})
        >>> steps.length, sorted(steps.columns)
        (2, [('action',), ('next', 'reward')])
    """
    if is_tensor_collection(episode):
        if episode.ndim != 1:
            raise ValueError(
                f"episode must have a batch size of [T], got {list(episode.batch_size)}: write the "
                f"episodes of a batch one by one."
            )
        steps = unpack(episode)
        steps.check_values()
        steps = steps.on(torch.device("cpu"))
    elif isinstance(episode, Mapping):
        columns: dict[Path, Column] = {}
        for path, value in _leaves((), episode):
            _check_new(path, columns)
            columns[path] = _column(path, value)
        lengths = {path: _length(column) for path, column in columns.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name_of(path)} has {n}" for path, n in lengths.items())
            raise ValueError(f"episode must have one value per step in every entry; {listed}.")
        steps = Steps(next(iter(lengths.values()), 0), columns)
    else:
        raise TypeError(
            f"episode must be a TensorDict [T], or a dict of arrays or of lists of steps, got "
            f"{type(episode).__name__}."
        )
    if not steps.length or not steps.columns:
        raise ValueError("episode must have at least one step and one entry, got an empty one.")
    return steps


def _leaves(path: Path, node: Mapping[Any, Any]) -> Iterator[tuple[Path, Any]]:
    """Iterate over the entries of nested dicts."""
    for key, value in node.items():
        where = (*path, *path_of(key))
        if isinstance(value, Mapping):
            yield from _leaves(where, value)
        else:
            yield where, value


def _check_new(path: Path, known: Mapping[Path, Column]) -> None:
    """Refuse a key that is given twice, or that is both an entry and a dict of entries."""
    for other in known:
        shorter = min(len(path), len(other))
        if path[:shorter] == other[:shorter]:
            raise ValueError(
                f"episode has {name_of(path)} and {name_of(other)}: a key must be given once, and be "
                f"either an entry or a dict of entries."
            )


def _length(column: Column) -> int:
    return len(column) if isinstance(column, Tensor) else len(column.items)


def _column(path: Path, value: Any) -> Column:
    """Convert one entry of a dict."""
    if isinstance(value, (Tensor, np.ndarray)):
        if not value.ndim:
            raise ValueError(
                f"{name_of(path)} must have one value per step, got a single number: what holds for "
                f"the whole episode is metadata."
            )
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
            return Objects(value.tolist())
        return _tensor(path, value)
    if isinstance(value, (list, tuple)):
        return _column_of_items(path, value)
    raise TypeError(
        f"{name_of(path)} must be an array or a list with one value per step, got "
        f"{type(value).__name__}: what holds for the whole episode is metadata."
    )


def _column_of_items(path: Path, items: Sequence[Any]) -> Column:
    """Convert a list with one value per step."""
    if all(map(_is_number, items)):
        if all(isinstance(item, (bool, int, float)) for item in items):
            return torch.tensor(items)
        return _tensor(path, np.asarray([np.asarray(item) for item in items]))
    if all(map(_is_array, items)):
        tensors = [_tensor(path, item) for item in items]
        same = len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1
        # One step does not show whether the others have its shape.
        stacked = same and (len(tensors) > 1 or not tensors[0].ndim)
        return torch.stack(tensors) if stacked else Rows(tensors)
    if all(isinstance(item, (list, tuple)) for item in items) and any(map(len, items)):
        arrays = [_numbers(item) for item in items]
        if all(array is not None for array in arrays):
            known = {array.dtype for array in arrays if len(array)}  # type: ignore[union-attr, arg-type]
            dtype = torch.float32 if len(known) > 1 else known.pop()
            return Rows([array.to(dtype) for array in arrays])  # type: ignore[union-attr]
    return Objects(list(items))


def _is_number(item: Any) -> bool:
    if isinstance(item, (Tensor, np.ndarray)):
        return not item.ndim and not isinstance(item, Tensor)
    return isinstance(item, (bool, int, float, np.number, np.bool_))


def _is_array(item: Any) -> bool:
    """Whether an item is a tensor, an array or an image."""
    if isinstance(item, (Tensor, np.ndarray)):
        return isinstance(item, Tensor) or item.dtype.kind in "biufc"
    return hasattr(item, "__array_interface__") and not isinstance(item, np.generic)


def _numbers(item: Sequence[Any]) -> Tensor | None:
    """Convert nested lists of numbers of one shape; None if they are something else."""
    flat: list[Any] = list(item)
    while flat and all(isinstance(each, (list, tuple)) for each in flat):
        flat = [number for each in flat for number in each]
    if not all(isinstance(each, (bool, int, float)) for each in flat):
        return None
    try:
        return torch.tensor(item)
    except ValueError:  # They differ in length.
        return None


def _tensor(path: Path, value: Any) -> Tensor:
    """Convert an array, image or tensor."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            raise ValueError(
                f"{name_of(path)} must be a dense tensor with values, got layout {value.layout} on "
                f"device {value.device}."
            )
        return value.detach().cpu().resolve_conj().resolve_neg()
    array = np.asarray(value)
    native = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
    try:
        return torch.from_numpy(np.ascontiguousarray(native).reshape(array.shape))
    except TypeError as error:
        raise ValueError(f"{name_of(path)} has dtype {array.dtype}, which torch lacks.") from error
