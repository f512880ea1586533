"""Steps as flat columns: the form of data between TensorDicts and the storage.

``pack(unpack(data))`` has the entries of ``data``, for TensorDicts, lazy stacks and tensorclasses.
Nodes are not kept: sub-TensorDicts come back with batch size ``[T]``, and empty ones are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from tensordict.utils import NestedKey, is_non_tensor, unravel_key
from torch import Tensor

from torchrl_mt._hosts.tensordict import (
    UnreadObjects,
    UnreadStack,
    new_stack,
    new_tensordict,
    tensordict_of,
    unread_tree,
)
from torchrl_mt.devices import sent

__all__ = [
    "Column",
    "Objects",
    "Path",
    "Rows",
    "Steps",
    "copied",
    "has_lazy_stack",
    "kinds",
    "name_of",
    "own",
    "pack",
    "path_of",
    "rows_at",
    "select",
    "step_tensors",
    "unpack",
]

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that torch cannot index, and those of the same bits."""

_Entry = TypeVar("_Entry")

Path = tuple[str, ...]
"""Key of an entry of a nested TensorDict, as a tuple of names."""


@dataclass(frozen=True)
class Rows:
    """One tensor per step; their shapes may differ."""

    items: list[Tensor]


@dataclass(frozen=True)
class Objects:
    """One Python object per step."""

    items: list[Any]


Column = Tensor | Rows | Objects
"""One entry of ``T`` steps: a ``[T, *shape]`` tensor, or one item per step."""


@dataclass(frozen=True)
class Steps:
    """``length`` steps, one column per entry."""

    length: int
    columns: dict[Path, Column]
    root_class: type | None = None
    """The tensorclass that the steps came in, if any."""

    def __getitem__(self, part: slice) -> Steps:
        """Return the steps of a slice, as views."""
        start, stop, _ = part.indices(self.length)
        if (start, stop) == (0, self.length):
            return self
        columns = {path: _part(column, start, stop) for path, column in self.columns.items()}
        return replace(self, length=stop - start, columns=columns)

    def take(self, order: Tensor) -> Steps:
        """Copy the steps at the positions ``order``, int64 ``[N]``."""
        places = order.tolist()

        def taken(column: Column) -> Column:
            if isinstance(column, Tensor):
                return rows_at(column, order)
            return type(column)([column.items[i] for i in places])

        columns = {path: taken(column) for path, column in self.columns.items()}
        return replace(self, length=len(places), columns=columns)

    def on(self, device: torch.device) -> Steps:
        """Return the steps with every tensor on ``device``; tensors among objects are copied."""
        if all(_is_on(column, device) for column in self.columns.values()):
            return self
        columns = {path: _moved(path, column, device) for path, column in self.columns.items()}
        return replace(self, columns=columns)

    def check_values(self) -> None:
        """Refuse sparse and meta tensors (``ValueError``)."""
        for path, column in self.columns.items():
            if not isinstance(column, Objects):
                _check_values(path, column)

    def clone(self) -> Steps:
        """Copy all tensors; for objects see :func:`own`."""
        columns = {path: copied(column) for path, column in self.columns.items()}
        return replace(self, columns=columns)

    @staticmethod
    def concat(parts: Sequence[Steps]) -> Steps:
        """Concatenate steps; ``ValueError`` if their keys, shapes or dtypes do not fit."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        for part in parts[1:]:
            if part.columns.keys() != first.columns.keys():
                odd = sorted(part.columns.keys() ^ first.columns.keys())
                raise ValueError(
                    f"every step must have the same keys; {', '.join(map(name_of, odd))} are in "
                    f"some steps only."
                )
        columns = {
            path: _concat(path, [part.columns[path] for part in parts]) for path in first.columns
        }
        return replace(first, length=sum(part.length for part in parts), columns=columns)


def unpack(data: Any) -> Steps:
    """Convert a TensorDict to columns.

    Tensors are not copied. A tensorclass below the root stays whole, as an object.

    Args:
        data: TensorDict, lazy stack of TensorDicts or tensorclass of batch size ``[T]``.

    Returns:
        The columns, detached.

    Raises:
        TypeError: if ``data`` is something else.
        ValueError: if the steps of a lazy stack have different keys or kinds of values.

    Examples:
        >>> from tensordict import TensorDict
        >>> steps = unpack(TensorDict({"a": torch.zeros(2, 3), "next": {"b": torch.ones(2)}}, [2]))
        >>> sorted(steps.columns)
        [('a',), ('next', 'b')]
    """
    if not is_tensor_collection(data) or is_non_tensor(data):
        raise TypeError(f"data must be a TensorDict or a tensorclass, got {type(data).__name__}.")
    columns: dict[Path, Column] = {}
    root_class = None
    if is_tensorclass(data):
        root_class = type(data)
        data = tensordict_of(data)
    tree = unread_tree(data)
    if tree is not None:
        _unpack_tree((), tree, columns)
    elif isinstance(data, LazyStackedTensorDict):
        _unpack_rows((), list(data.unbind(0)), columns)
    else:
        _unpack_batch((), data, columns)
    return Steps(length=data.batch_size[0], columns=columns, root_class=root_class)


def pack(
    steps: Steps,
    device: torch.device | None = None,
    *,
    batch_size: torch.Size | None = None,
    unread: bool = False,
) -> Any:
    """Convert columns to a TensorDict: the inverse of :func:`unpack`.

    A node with a column of :class:`Rows` becomes a ``LazyStackedTensorDict`` of its steps, so that
    ``td.get(key, as_list=True)`` returns the list of their tensors. Every other node is a TensorDict.

    Args:
        steps: the columns.
        device: the device that the TensorDicts declare.
        batch_size: shape of the ``T`` steps; None for ``[T]``.
        unread: whether to build slow parts (lazy stacks, objects) only when they are first accessed.
            :func:`unpack` of a part that never was returns the same columns.

    Returns:
        A TensorDict of that batch size, or the tensorclass that the steps came in.
    """
    tree: dict[str, Any] = {}
    for path, column in steps.columns.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = column
    if batch_size is None or len(batch_size) == 1:
        data = _pack_node(tree, torch.Size([steps.length]), device, unread)
    elif all(isinstance(column, Tensor) for column in steps.columns.values()):
        data = _pack_node(tree, batch_size, device, unread)
    else:
        data = _pack_node(tree, torch.Size([steps.length]), device, unread).reshape(batch_size)
    if steps.root_class is not None:
        return steps.root_class.from_tensordict(data)  # type: ignore[attr-defined]
    return data


def name_of(path: Path) -> str:
    """Format a path as one writes it in code.

    Examples:
        >>> name_of(("a",)), name_of(("next", "b"))
        ("'a'", "('next', 'b')")
    """
    return repr(path[0] if len(path) == 1 else path)


def path_of(key: NestedKey) -> Path:
    """Convert a key to a tuple of names."""
    if not isinstance(key, str):
        key = unravel_key(key)
    return (key,) if isinstance(key, str) else key


def select(
    entries: Mapping[Path, _Entry], keys: Iterable[NestedKey], name: str
) -> dict[Path, _Entry]:
    """Return the entries at or below some keys.

    Args:
        entries: what to choose from.
        keys: a key of a nested TensorDict selects all in it.
        name: what the user calls the keys.

    Raises:
        KeyError: if there is no entry at or below a key.
    """
    chosen: dict[Path, _Entry] = {}
    for path in map(path_of, keys):
        found = {p: entry for p, entry in entries.items() if p[: len(path)] == path}
        if not found:
            known = ", ".join(map(name_of, entries))
            raise KeyError(
                f"{name} names {name_of(path)}, which is not among the entries: {known}."
            )
        chosen |= found
    return chosen


def copied(column: Column) -> Column:
    """Copy the tensors of a column; for objects see :func:`own`."""
    if isinstance(column, Tensor):
        return column.clone()
    if isinstance(column, Rows):
        return Rows(_copies(column.items))
    return Objects([own(item) for item in column.items])


def own(item: Any, device: torch.device | None = None) -> Any:
    """Copy a tensor or tensorclass, to ``device`` if given; return other objects as they are.

    Python objects inside a tensorclass are not copied either.
    """
    if not isinstance(item, Tensor):
        if not is_tensor_collection(item):
            return item
        if not any(isinstance(value, Tensor) for value in item.values(True, True)):
            return item
    copy = item.detach().clone()
    return copy if device is None else copy.to(device)


def rows_at(values: Tensor, order: Tensor) -> Tensor:
    """Copy the rows at the positions ``order``, int64 ``[N]``, whatever the dtype."""
    same = values.view(_SIGNED.get(values.dtype, values.dtype))
    return same.index_select(0, sent(order, values.device)).view(values.dtype)


def step_tensors(column: Any) -> Sequence[Tensor]:
    """Return one tensor per step of a column of tensors."""
    return column.items if isinstance(column, Rows) else column.unbind(0)


def has_lazy_stack(data: Any) -> bool:
    """Whether a node of ``data`` is a lazy stack."""
    if is_tensorclass(data) and not is_non_tensor(data):
        data = tensordict_of(data)
    if isinstance(data, LazyStackedTensorDict):
        return True
    if is_non_tensor(data):
        return False
    return any(has_lazy_stack(value) for value in data.values() if is_tensor_collection(value))


def _unpack_batch(path: Path, data: TensorDictBase, columns: dict[Path, Column]) -> None:
    """Unpack a node whose entries have the batch dimension."""
    for name, value in data.items():
        where = (*path, name)
        if isinstance(value, Tensor):
            value = _plain(value)
            columns[where] = Rows(list(value.unbind(0))) if value.is_nested else value
        elif (tree := unread_tree(value)) is not None:
            _unpack_tree(where, tree, columns)
        elif isinstance(value, NonTensorStack):
            columns[where] = Objects(value.tolist())
        elif is_non_tensor(value):
            columns[where] = Objects([value.data] * data.batch_size[0])
        elif is_tensorclass(value):
            columns[where] = Objects(list(value.unbind(0)))
        elif isinstance(value, LazyStackedTensorDict):
            _unpack_rows(where, list(value.unbind(0)), columns)
        else:
            _unpack_batch(where, value, columns)


def _unpack_rows(path: Path, nodes: list[Any], columns: dict[Path, Column]) -> None:
    """Unpack a node given as one TensorDict per step."""
    if not nodes:
        return
    if is_tensorclass(nodes[0]):
        columns[path] = Objects(nodes)
        return
    keys = set(nodes[0].keys())
    for node in nodes[1:]:
        if node.keys() != keys and set(node.keys()) != keys:
            odd = sorted(".".join((*path, str(name))) for name in set(node.keys()) ^ keys)
            raise ValueError(
                f"every step must have the same keys; {odd} are in some steps only: "
                f"give the others a value too (None for Python objects)."
            )
    for name in list(nodes[0].keys()):
        where = (*path, name)
        values = [node.get(name) for node in nodes]
        if all(isinstance(value, Tensor) for value in values):
            columns[where] = Rows([_plain(value) for value in values])
        elif all(is_non_tensor(value) for value in values):
            columns[where] = Objects(
                [v.tolist() if isinstance(v, NonTensorStack) else v.data for v in values]
            )
        elif all(is_tensorclass(value) for value in values):
            columns[where] = Objects(values)
        elif all(isinstance(value, TensorDictBase) for value in values):
            _unpack_rows(where, values, columns)
        else:
            kinds = sorted({type(value).__name__ for value in values})
            raise ValueError(f"{name_of(where)} must be of one kind in every step, got {kinds}.")


def _unpack_tree(path: Path, tree: Any, columns: dict[Path, Column]) -> None:
    """Collect the columns of a tree of columns."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            _unpack_tree((*path, name), value, columns)
    else:
        columns[path] = tree


def _pack_node(
    tree: dict[str, Any], size: torch.Size, device: torch.device | None, unread: bool = False
) -> TensorDictBase:
    """Build a TensorDict, or a lazy stack if a column of the node itself is :class:`Rows`.

    ``size`` must be ``[T]``, unless all columns are tensors.
    """
    if Rows in map(type, tree.values()):
        if unread and size[0]:
            return UnreadStack.of(tree, size, lambda: _pack_node(tree, size, device).tensordicts)
        names = tuple(tree)
        items = [_items(value, size, device) for value in tree.values()]
        scalar = torch.Size([])
        nodes = [
            new_tensordict(dict(zip(names, step, strict=True)), scalar, device)
            for step in zip(*items, strict=True)
        ]
        return new_stack(nodes, device)
    flat, values = len(size) == 1, dict[str, Any]()
    for name, value in tree.items():
        if isinstance(value, Tensor):
            values[name] = value if flat else value.view(size + value.shape[1:])
        elif isinstance(value, dict):
            values[name] = _pack_node(value, size, device, unread)
        else:
            values[name] = _whole(value, size, device, unread)
    return new_tensordict(values, size, device)


def _whole(
    column: Objects, size: torch.Size, device: torch.device | None, unread: bool = False
) -> Any:
    """Convert a column of objects to one value with the batch dimension."""
    items = column.items
    if not items:
        return NonTensorData(None, batch_size=[0], device=device)
    if all(is_tensorclass(item) for item in items) and not is_non_tensor(items[0]):
        return lazy_stack(items)
    if unread:
        return UnreadObjects.of(
            column, size, lambda: [NonTensorData(item, device=device) for item in items]
        )
    return NonTensorStack(*[NonTensorData(item, device=device) for item in items])


def _items(value: Any, size: torch.Size, device: torch.device | None) -> Sequence[Any]:
    """Convert an entry of a node to one value per step."""
    if isinstance(value, dict):
        return _pack_node(value, size, device).unbind(0)
    if isinstance(value, Objects):
        return [
            item if is_tensorclass(item) else NonTensorData(item, device=device)
            for item in value.items
        ]
    return value.items if isinstance(value, Rows) else value.unbind(0)


def _part(column: Column, start: int, stop: int) -> Column:
    """Slice a column."""
    if isinstance(column, Tensor):
        return column[start:stop]
    return type(column)(column.items[start:stop])


def _is_on(column: Column, device: torch.device) -> bool:
    """Whether a column is a dense tensor on ``device``."""
    if not isinstance(column, Tensor) or column.layout is not torch.strided:
        return False
    return column.is_cpu if device.type == "cpu" else column.device == device


def _moved(path: Path, column: Column, device: torch.device) -> Column:
    """Move a column to ``device``."""
    if isinstance(column, Objects):
        return Objects([own(item, device) for item in column.items])
    if _is_on(column, device):
        return column
    _check_values(path, column)
    if isinstance(column, Rows):
        return Rows(_copies(column.items, device))
    return sent(column, device)


def _check_values(path: Path, column: Tensor | Rows) -> None:
    """Refuse sparse and meta tensors."""
    for tensor in column.items if isinstance(column, Rows) else [column]:
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ValueError(
                f"{name_of(path)} must be a dense tensor with values, got layout {tensor.layout} "
                f"on device {tensor.device}: convert it before it is stored."
            )


def kinds(items: Sequence[Tensor]) -> set[tuple[Any, ...]]:
    """Return the distinct (dimensions, dtype, layout, device) of tensors."""
    return {(item.ndim, item.dtype, item.layout, item.device) for item in items}


def _copies(items: list[Tensor], device: torch.device | None = None) -> list[Tensor]:
    """Copy tensors, to ``device`` if given; those of one kind at once, as parts of one tensor."""
    found = {kind[1:] for kind in kinds(items)}
    vectors = all(item.ndim == 1 for item in items)
    # Copies that stay must not hold each other's memory if they are large.
    if len(found) == 1 and items[0].layout == torch.strided and (vectors or device is not None):
        flat = torch.cat([item.reshape(-1) for item in items])
        flat = flat if device is None else sent(flat, device)
        parts = flat.split([item.numel() for item in items])
        return [part.view(item.shape) for part, item in zip(parts, items, strict=True)]
    return [item.clone() if device is None else item.to(device) for item in items]


def _plain(tensor: Tensor) -> Tensor:
    """Detach a tensor and resolve a pending conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg()


def _concat(path: Path, parts: list[Column]) -> Column:
    """Concatenate columns."""
    if all(isinstance(part, Objects) for part in parts):
        return Objects([item for part in parts for item in part.items])  # type: ignore[union-attr]
    if any(isinstance(part, Objects) for part in parts):
        raise ValueError(
            f"{name_of(path)} must be of one kind in every step, got tensors and objects."
        )
    if all(isinstance(part, Tensor) for part in parts):
        first = parts[0]
        for part in parts[1:]:
            if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:  # type: ignore[union-attr]
                raise ValueError(
                    f"{name_of(path)} must keep its shape and dtype: expected "
                    f"{_signature(first)}, got {_signature(part)}; variable lengths go in a "
                    f"lazy stack of steps."
                )
        return torch.cat(parts)  # type: ignore[arg-type]
    return Rows([item for part in parts for item in step_tensors(part)])


def _signature(column: Any) -> str:
    """Format the shape per step and dtype of a dense column."""
    return f"{tuple(column.shape[1:])} {column.dtype}"
