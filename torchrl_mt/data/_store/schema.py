"""The schema of stored steps: kind, shape and dtype of every entry.

The first episode fixes it. An episode that does not fit is refused before anything is written, with
the name of the entry. Two things may change and make a new schema: a shape turns out to vary, or a
``("next", k)`` no longer equals ``k`` one step later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.steps import Column, Objects, Path, Rows, Steps, name_of

__all__ = ["PARENT", "PROMPT", "RESPONSE", "Entry", "Form", "Schema", "as_array", "bits"]

PARENT: Path = ("turn", "parent")
PROMPT: Path = ("tokens", "prompt")
RESPONSE: Path = ("tokens", "response")
_IMAGES: Path = ("images", "new")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Kind = Literal["dense", "ragged", "object"]


@dataclass(frozen=True)
class Form:
    """Kind, shape and dtype of one entry."""

    kind: Kind
    """One tensor of a fixed shape per step, one of a varying shape, or a Python object."""
    shape: tuple[int, ...] = ()
    """Shape per step; for a ragged entry, one -1 per dimension."""
    dtype: torch.dtype | None = None
    """None for objects."""

    def __str__(self) -> str:
        if self.kind == "object":
            return "a Python object per step"
        if self.kind == "ragged":
            return f"a {len(self.shape)}-dimensional {self.dtype} tensor per step, of any shape"
        return f"{self.shape} {self.dtype} per step"


@dataclass(frozen=True)
class Entry(Form):
    """One entry of a storage."""

    lazy: bool = False
    """Whether it ever came in a lazy stack, so that its shape may turn out to vary."""
    shared: bool = False
    """A ``("next", k)`` that is read from the rows of ``k``."""


@dataclass(frozen=True)
class Schema:
    """The entries of every stored step."""

    entries: Mapping[Path, Entry]
    root_class: type | None = None

    @cached_property
    def counted(self) -> frozenset[Path]:
        """The entries whose elements may count as tokens."""

        def counts(path: Path, entry: Entry) -> bool:
            if entry.kind == "object":
                return path == ("tokens",)  # It may be a tensorclass.
            return entry.kind == "ragged" or path[0] == "tokens"

        return frozenset(path for path, entry in self.entries.items() if counts(path, entry))

    @cached_property
    def has_turns(self) -> bool:
        """Whether there are prompts and responses, as vectors of integers.

        The tokens of a prompt are then those that it adds to an earlier turn.
        """
        prompt, response = self.entries.get(PROMPT), self.entries.get(RESPONSE)
        if prompt is None or response is None or prompt.dtype is None:
            return False
        if prompt.dtype.is_floating_point or prompt.dtype.is_complex:
            return False
        vectors = len(prompt.shape) == len(response.shape) == 1
        return vectors and response.dtype == prompt.dtype

    @cached_property
    def growing(self) -> bool:
        """Whether prompts, which differ in length, are stored as what each adds to an earlier turn."""
        return self.has_turns and self.entries[PROMPT].kind == "ragged"

    @staticmethod
    def of(steps: Steps, lengths: Tensor, *, share_next: bool) -> Schema:
        """Return the schema of the first episodes.

        Args:
            steps: whole episodes, one after the other.
            lengths: int64 ``[E]``, steps of each.
            share_next: whether a ``("next", k)`` that agrees with ``k`` shares its rows.
        """
        entries = {path: _entry(path, column) for path, column in steps.columns.items()}
        if share_next:
            # Shorter paths first: an entry without rows of its own has none to share.
            for path in sorted(entries, key=len):
                source = entries.get(_source(path))
                if source is None or source.shared:
                    continue
                if _agrees(steps, lengths, path):
                    entries[path] = replace(entries[path], shared=True)
        return Schema(entries, steps.root_class)

    def unshared(self) -> Schema:
        """Return the schema in which all entries have their own rows."""
        return self._with(
            {
                path: replace(entry, shared=False) if entry.shared else entry
                for path, entry in self.entries.items()
            }
        )

    def merge(self, other: Schema) -> Schema:
        """Return the schema of the steps of both: this one, unless an entry changes its kind.

        Args:
            other: schema of more steps; which entries it shares does not matter.

        Raises:
            ValueError: if it does not fit; names the entry.
        """
        mine, others = self.entries.keys(), other.entries.keys()
        for odd, what in ((mine - others, "missing"), (others - mine, "not among them")):
            if odd:
                raise ValueError(
                    f"an episode must have the keys of the first one: {name_of(min(odd))} is "
                    f"{what}.{_cause(odd)}"
                )
        if other.root_class is not self.root_class:
            raise ValueError(
                f"an episode must come in the class of the first one: expected "
                f"{_class_name(self.root_class)}, got {_class_name(other.root_class)}."
            )
        return self._with(
            {path: _merge(path, entry, other.entries[path]) for path, entry in self.entries.items()}
        )

    @cached_property
    def has_objects(self) -> bool:
        """Whether an entry holds Python objects."""
        return any(entry.kind == "object" for entry in self.entries.values())

    @cached_property
    def shared(self) -> tuple[Path, ...]:
        """The ``("next", k)`` entries that are read from the rows of ``k``."""
        return tuple(path for path, entry in self.entries.items() if entry.shared)

    def fits(self, steps: Steps, lengths: Tensor) -> bool:
        """Check quickly whether episodes of dense tensors fit; :meth:`admit` decides if not."""
        columns = steps.columns
        if steps.root_class is not self.root_class or columns.keys() != self.entries.keys():
            return False
        for path, entry in self.entries.items():
            column = columns[path]
            if not isinstance(column, Tensor) or entry.kind != "dense":
                return False
            if column.dtype is not entry.dtype or column.shape[1:] != entry.shape:
                return False
        return all(_agrees(steps, lengths, path) for path in self.shared)

    def admit(self, steps: Steps, lengths: Tensor) -> Schema:
        """Return the schema after more episodes: this one, unless an entry changes its kind.

        Args:
            steps: whole episodes, one after the other.
            lengths: int64 ``[E]``, steps of each.

        Raises:
            ValueError: if they do not fit; names the entry.
        """
        entries = self.merge(Schema.of(steps, lengths, share_next=False)).entries
        return self._with(
            {
                path: replace(entry, shared=False)
                if entry.shared
                and (entries[path[1:]].kind != "dense" or not _agrees(steps, lengths, path))
                else entry
                for path, entry in entries.items()
            }
        )

    def _with(self, entries: dict[Path, Entry]) -> Schema:
        """Return this schema with other entries; itself if they are the same."""
        if all(entry is self.entries[path] for path, entry in entries.items()):
            return self
        return replace(self, entries=entries)


def bits(tensor: Tensor) -> Tensor:
    """View the tensor's memory as integers, which operations copy and compare bit for bit."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def as_array(tensor: Tensor) -> np.ndarray | None:
    """View a CPU tensor as an array, of its bits if NumPy lacks the dtype; None if impossible."""
    if not tensor.is_cpu or tensor.layout != torch.strided:
        return None
    try:
        array: np.ndarray = tensor.numpy()
    except TypeError:
        if tensor.dtype.is_complex:
            return None
        array = bits(tensor).numpy()
    return array


def _source(path: Path) -> Path:
    """Return ``k`` for the path ``("next", k)``; () for another path."""
    return path[1:] if path[0] == "next" else ()


def _compared(steps: Steps, path: Path) -> tuple[Tensor, Tensor] | None:
    """Return the bits of the source of ``path`` and of ``path``; None if they cannot be compared."""
    here, following = steps.columns[_source(path)], steps.columns[path]
    if isinstance(here, Rows) and isinstance(following, Rows):
        if len({(x.shape, x.dtype) for column in (here, following) for x in column.items}) > 1:
            return None
        here, following = torch.stack(here.items), torch.stack(following.items)
    if not (isinstance(here, Tensor) and isinstance(following, Tensor)):
        return None
    if here.shape != following.shape or here.dtype != following.dtype:
        return None
    return bits(here), bits(following)


def _agrees(steps: Steps, lengths: Tensor, path: Path) -> bool:
    """Whether ``path`` equals its source one step later in all episodes, bit for bit."""
    compared = _compared(steps, path)
    if compared is None:
        return False
    here, following = compared
    if lengths.shape[0] == 1:
        return torch.equal(here[1:], following[:-1])
    ends = [stop - 1 for stop in accumulate(lengths.tolist()[:-1])]
    if here.is_cpu:
        differs = here.numpy()[1:] != following.numpy()[:-1]
        differs[ends] = False
        return not differs.any()
    differing = here[1:] != following[:-1]
    differing[ends] = False
    return not bool(differing.any())


def _entry(path: Path, column: Column) -> Entry:
    """Return the entry of a column."""
    if isinstance(column, Objects):
        return Entry("object")
    if isinstance(column, Tensor):
        return Entry("dense", tuple(column.shape[1:]), column.dtype)
    first = column.items[0]
    shapes = {item.shape for item in column.items}
    if len(shapes) == 1 and all(item.dtype == first.dtype for item in column.items):
        return Entry("dense", tuple(first.shape), first.dtype, lazy=True)
    for item in column.items:
        if item.dtype != first.dtype or item.ndim != first.ndim:
            raise ValueError(
                f"{name_of(path)} must keep its dtype and number of dimensions: expected "
                f"{first.dtype} and {first.ndim}, got {item.dtype} and {item.ndim}."
            )
    return Entry("ragged", (-1,) * first.ndim, first.dtype, lazy=True)


def _merge(path: Path, expected: Entry, got: Entry) -> Entry:
    """Merge an entry with that of another episode; ``ValueError`` if they do not fit."""
    same_form = len(expected.shape) == len(got.shape) and expected.dtype == got.dtype
    if expected.kind == "ragged" and got.kind != "object" and same_form:
        return expected
    if expected.kind == "dense" and got.kind != "object" and same_form:
        if expected.shape == got.shape:
            return replace(expected, lazy=True) if got.lazy and not expected.lazy else expected
        if expected.lazy and got.lazy:
            return Entry("ragged", (-1,) * len(expected.shape), expected.dtype, lazy=True)
    if expected.kind == got.kind == "object":
        return expected
    raise ValueError(
        f"{name_of(path)} must be as in the first episode: expected {expected}, got {got}."
    )


def _cause(paths: Iterable[Path]) -> str:
    """Why entries may be in some episodes alone, for an error; may be empty."""
    if _IMAGES not in paths:
        return ""
    return (
        " Batches of collectors with processor= have it, and those of others do not: give all "
        "collectors of a buffer the processor, or none."
    )


def _class_name(cls: type | None) -> str:
    return "TensorDict" if cls is None else cls.__name__
