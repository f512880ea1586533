"""Private names of tensordict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

# ---- made without checks, and when they are read ------------------------------------------------


def tensordict_of(data: Any) -> Any:
    """The TensorDict in a tensorclass, which shares its entries: no public name gives it."""
    return data._tensordict


def new_tensordict(
    values: dict[str, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """A TensorDict of these very values, unchecked: checks take longer than reading a small sample."""
    return TensorDict._new_unsafe(values, batch_size=batch_size, device=device, nested=False)


def new_stack(nodes: Sequence[Any], device: torch.device | None) -> LazyStackedTensorDict:
    """A lazy stack of TensorDicts without batch size, unchecked."""
    return LazyStackedTensorDict._new_lazy_unsafe(*nodes, batch_size=torch.Size([]), device=device)


class Unread:
    """A stack whose elements are made when somebody first asks for them.

    From then on it is what its other base class says and nothing else.
    """

    __slots__ = ()  # or it could not become the other class

    tree: Any
    """What the elements are made of."""
    make: Callable[[], list[Any]]

    @classmethod
    def of(cls, tree: Any, size: torch.Size, make: Callable[[], list[Any]]) -> Any:
        """A stack of ``size`` elements that ``make`` gives."""
        new: Any = cls._new_lazy_unsafe(batch_size=[])  # type: ignore[attr-defined]
        new.__dict__.update(tree=tree, make=make, _batch_size=size)
        del new.__dict__["tensordicts"]
        return new

    def __getattr__(self, name: str) -> Any:
        if name != "tensordicts":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.read()
        return self.tensordicts

    @property
    def is_unread(self) -> bool:
        """Whether nobody has asked yet; not so of what its methods make of it."""
        return "tensordicts" not in self.__dict__

    def read(self) -> None:
        """Become the other class."""
        if self.is_unread:
            self.__dict__["tensordicts"] = self.make()
            del self.tree, self.make
        self.__class__ = type(self).__bases__[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.read()  # What is copied or sent elsewhere is not of this class.
        return self.__reduce_ex__(protocol)


class UnreadStack(LazyStackedTensorDict, Unread):
    """An unread lazy stack of TensorDicts."""

    __slots__ = ()


class UnreadObjects(NonTensorStack, Unread):
    """An unread stack of Python objects."""

    __slots__ = ()
