"""Private names of tensordict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

# ---- TensorDicts built without checks, or when first read ---------------------------------------


def tensordict_of(data: Any) -> Any:
    """Return the TensorDict inside a tensorclass; no public name returns it."""
    return data._tensordict


def new_tensordict(
    values: dict[str, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """Build a TensorDict without checks, which take longer than reading a small sample."""
    return TensorDict._new_unsafe(values, batch_size=batch_size, device=device, nested=False)


def new_stack(nodes: Sequence[Any], device: torch.device | None) -> LazyStackedTensorDict:
    """Build a lazy stack of TensorDicts of batch size ``[]`` without checks."""
    return LazyStackedTensorDict._new_lazy_unsafe(*nodes, batch_size=torch.Size([]), device=device)


class Unread:
    """Mixin of a stack whose elements are built on first access.

    The object then becomes an instance of its other base class alone. Several threads may look into it
    at once: each step leaves an object that others can read.
    """

    __slots__ = ()  # Otherwise ``__class__`` could not be assigned.

    @classmethod
    def of(cls, tree: Any, size: torch.Size, make: Callable[[], list[Any]]) -> Any:
        """Create a stack of batch size ``size`` whose elements ``make`` builds from ``tree``."""
        new: Any = cls._new_lazy_unsafe(batch_size=[])  # type: ignore[attr-defined]
        new.__dict__.update(unread=(tree, make), _batch_size=size)
        del new.__dict__["tensordicts"]
        return new

    def __getattr__(self, name: str) -> Any:
        if name != "tensordicts":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        Unread.read(self)
        return self.tensordicts

    def read(self) -> None:
        """Build the elements and become the other base class."""
        unread = self.__dict__.get("unread")
        if unread is not None and "tensordicts" not in self.__dict__:
            # All threads get the elements of the one that is first.
            self.__dict__.setdefault("tensordicts", unread[1]())
        self.__dict__.pop("unread", None)
        kind = type(self)
        if issubclass(kind, Unread):
            self.__class__ = kind.__bases__[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        Unread.read(self)  # Copies and pickles are of the other class.
        return self.__reduce_ex__(protocol)


def unread_tree(data: Any) -> Any:
    """Return what an unread stack's elements are built from; None once they are built."""
    unread = data.__dict__.get("unread") if isinstance(data, Unread) else None
    return None if unread is None or "tensordicts" in data.__dict__ else unread[0]


class UnreadStack(LazyStackedTensorDict, Unread):
    """An unread lazy stack of TensorDicts; ``get(key, as_list=True)`` leaves it unread."""

    __slots__ = ()

    def _get_tuple(self, key: tuple[str, ...], default: Any, **kwargs: Any) -> Any:
        tree = unread_tree(self)
        if tree is not None and kwargs.get("as_list") and len(key) == 1:
            column = tree.get(key[0])
            if isinstance(getattr(column, "items", None), list):
                return list(column.items)
        return super()._get_tuple(key, default, **kwargs)


class UnreadObjects(NonTensorStack, Unread):
    """An unread stack of Python objects; ``tolist()`` leaves it unread."""

    __slots__ = ()

    def tolist(self, **options: Any) -> list[Any]:
        """List the objects."""
        column = None if options else unread_tree(self)
        return super().tolist(**options) if column is None else list(column.items)
