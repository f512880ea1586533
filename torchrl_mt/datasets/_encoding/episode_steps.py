"""What a user gives as an episode, as columns of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from torchrl_mt.data._store.schema import Form
from torchrl_mt.data._store.steps import (
    Column,
    Objects,
    Path,
    Rows,
    Steps,
    name_of,
    unpack,
)
from torchrl_mt.datasets._encoding.values import lost_meaning

__all__ = ["as_ted", "steps_of"]

_OUTCOMES = {("reward",), ("done",), ("terminated",), ("truncated",)}
"""What TED has under ``"next"``."""
_NOTHING: Mapping[Path, Form] = {}


def steps_of(episode: Any, known: Mapping[Path, Form] = _NOTHING) -> Steps:
    """Convert an episode to columns on the CPU.

    Args:
        episode: a TED TensorDict ``[T]``, or a dict of arrays ``[T, ...]`` or of lists with one value
            per step. Keys are strings or tuples of strings; dicts may be nested. A list of numbers
            becomes a tensor ``[T]``. A list of arrays becomes one tensor if all have one shape, and
            otherwise a tensor per step, as a list of lists of numbers always does. A list of dicts
            becomes a dict of lists if all have the same keys and hold numbers, arrays or such dicts.
            Lists of anything else (strings, messages, None) hold Python objects. Rewards and done flags
            at the root are put under ``"next"``, unless there are some.
        known: forms of the entries of earlier episodes, for what does not show its own: lists of empty
            lists, and of dicts where they are Python objects.

    Raises:
        TypeError: if it is something else, a key is no string, or values would lose their meaning,
            such as the mask of a masked array.
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
        steps = replace(steps, columns=as_ted(steps.columns)).on(torch.device("cpu"))
    elif isinstance(episode, Mapping):
        entries: dict[Path, Any] = {}
        for path, value in _leaves((), episode, known):
            _check_new(path, entries)
            entries[path] = value
        columns = {
            path: _column(path, value, known.get(path)) for path, value in as_ted(entries).items()
        }
        lengths = {path: _length(column) for path, column in columns.items()}
        _check_lengths(lengths)
        steps = Steps(next(iter(lengths.values()), 0), columns)
    else:
        raise TypeError(
            f"episode must be a TensorDict [T], or a dict of arrays or of lists of steps, got "
            f"{type(episode).__name__}."
        )
    if not steps.length or not steps.columns:
        raise ValueError("episode must have at least one step and one entry, got an empty one.")
    return steps


def _leaves(
    path: Path, node: Mapping[Any, Any], known: Mapping[Path, Form]
) -> Iterator[tuple[Path, Any]]:
    """Iterate over the entries of nested dicts."""
    for key, value in node.items():
        names = key if isinstance(key, tuple) else (key,)
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"keys must be strings or tuples of strings, got {key!r}.")
        where = (*path, *names)
        if isinstance(value, (list, tuple)) and not (
            where in known and known[where].kind == "object"
        ):
            value = _dict_of_lists(value) or value
        if isinstance(value, Mapping):
            yield from _leaves(where, value, known)
        else:
            yield where, value


def _dict_of_lists(items: Sequence[Any]) -> dict[str, Any] | None:
    """Convert a list of dicts, as dict observations are; None if they differ or hold anything else."""
    keys = items[0].keys() if items and isinstance(items[0], Mapping) else ()
    if not all(isinstance(item, Mapping) and set(item.keys()) == set(keys) for item in items):
        return None
    lists: dict[str, Any] = {}
    for key in keys:
        values = [item[key] for item in items]
        is_leaf = all(map(_is_number, values)) or all(map(_is_array, values))
        inner = values if is_leaf else _dict_of_lists(values)
        if inner is None or not isinstance(key, str):
            return None
        lists[key] = inner
    return lists or None


def as_ted(entries: Mapping[Path, Any]) -> dict[Path, Any]:
    """Put rewards and done flags at the root under ``"next"``, unless it has some or is an entry."""
    if any(path[0] == "next" and path[1:2] in {*_OUTCOMES, ()} for path in entries):
        return dict(entries)
    return {
        ("next", *path) if path in _OUTCOMES else path: value for path, value in entries.items()
    }


def _check_new(path: Path, known: Mapping[Path, Any]) -> None:
    """Refuse a key that is given twice, or that is both an entry and a dict of entries."""
    for other in known:
        shorter = min(len(path), len(other))
        if path[:shorter] == other[:shorter]:
            raise ValueError(
                f"episode has {name_of(path)} and {name_of(other)}: a key must be given once, and be "
                f"either an entry or a dict of entries."
            )


def _check_lengths(lengths: Mapping[Path, int]) -> None:
    """Refuse entries that differ in length."""
    least, most = min(lengths.values(), default=0), max(lengths.values(), default=0)
    if least == most:
        return
    listed = ", ".join(f"{name_of(path)} has {n}" for path, n in lengths.items())
    advice = "".join(
        f" Of the {most} rows of {name_of(path)}, give the first {least} as {name_of(path)} and the "
        f"last {least} as {name_of(('next', *path))}."
        for path, n in lengths.items()
        if n == most == least + 1 and path[0] not in ("next", "action")
    )
    raise ValueError(f"episode must have one value per step in every entry; {listed}.{advice}")


def _length(column: Column) -> int:
    return len(column) if isinstance(column, Tensor) else len(column.items)


def _column(path: Path, value: Any, form: Form | None) -> Column:
    """Convert one entry of a dict."""
    _check_meaning(path, value)
    if isinstance(value, (Tensor, np.ndarray)):
        if not value.ndim:
            raise ValueError(
                f"{name_of(path)} must have one value per step, got a single number: what holds for "
                f"the whole episode is metadata."
            )
        if isinstance(value, np.ndarray) and value.dtype.kind in "OSUT":
            return Objects(value.tolist())
        return _tensor(path, value)
    if isinstance(value, (list, tuple)):
        return _column_of_items(path, value, form)
    raise TypeError(
        f"{name_of(path)} must be an array or a list with one value per step, got "
        f"{type(value).__name__}: what holds for the whole episode is metadata."
    )


def _column_of_items(path: Path, items: Sequence[Any], form: Form | None) -> Column:
    """Convert a list with one value per step."""
    for item in items:
        _check_meaning(path, item)
    if all(map(_is_number, items)):
        if any(type(item) is int and not -(2**63) <= item < 2**63 for item in items):
            raise ValueError(
                f"{name_of(path)} has integers beyond int64: give floats, or an array of another dtype."
            )
        if all(isinstance(item, (bool, int, float)) for item in items):
            return torch.tensor(items, device="cpu")
        return _tensor(path, np.asarray([np.asarray(item) for item in items]))
    if all(map(_is_array, items)):
        tensors = [_tensor(path, item) for item in items]
        same = len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1
        # One step, or steps without values, do not show whether the others have their shape.
        shown = not tensors[0].ndim or (len(tensors) > 1 and tensors[0].numel())
        return torch.stack(tensors) if same and shown else Rows(tensors)
    are_lists = all(isinstance(item, (list, tuple)) for item in items)
    if are_lists and any(map(len, items)):
        arrays = [_numbers(item) for item in items]
        if all(array is not None for array in arrays):
            known = {array.dtype for array in arrays if len(array)}  # type: ignore[union-attr, arg-type]
            dtype = torch.float32 if len(known) > 1 else known.pop()
            return Rows([array.to(dtype) for array in arrays])  # type: ignore[union-attr]
    elif are_lists and form is not None and len(form.shape) == 1:
        return Rows([torch.empty(0, dtype=form.dtype, device="cpu") for _ in items])
    return Objects(list(items))


def _check_meaning(path: Path, value: Any) -> None:
    """Refuse a value that is more than its numbers."""
    lost = lost_meaning(value)
    if lost is not None:
        raise TypeError(f"{name_of(path)}: {lost}.")


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
        return torch.tensor(item, device="cpu")
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
        raise ValueError(
            f"{name_of(path)} has dtype {array.dtype}, which torch lacks: convert it with .astype."
        ) from error
