"""The schema of a data set: kind, shape and dtype of every entry, fixed by the first episode.

An episode that does not fit is refused before anything is written, with the name of the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchrl_mt.data._store.schema import Form, Schema, bits
from torchrl_mt.data._store.steps import Column, Objects, Path, Rows, Steps, name_of, step_tensors
from torchrl_mt.datasets._encoding.values import dtype_name, dtype_of

__all__ = ["EpisodeSchema", "Field", "agrees"]

_MOST_SHARED = 62
"""Most shared entries: an episode has one bit for each in an int64."""


@dataclass(frozen=True)
class Field(Form):
    """One entry of a data set."""

    shared: bool = False
    """A ``("next", k)`` that equals ``k`` one step later: written once, as ``T + 1`` rows of ``k``."""


@dataclass(frozen=True)
class EpisodeSchema:
    """The entries of every episode of a data set."""

    fields: Mapping[Path, Field]

    @staticmethod
    def of(steps: Steps, *, share_next: bool = True) -> EpisodeSchema:
        """Return the schema that a first episode fixes.

        Args:
            steps: the episode.
            share_next: whether a ``("next", k)`` that agrees with ``k`` is written once.

        Raises:
            ValueError: if an entry changes its dtype or number of dimensions from step to step.
        """
        length = torch.tensor([steps.length], device="cpu")
        fields: dict[Path, Field] = {}
        for path, entry in Schema.of(steps, length, share_next=False).entries.items():
            if entry.kind == "dense" and not (entry.lazy and entry.shape):
                fields[path] = Field("dense", entry.shape, entry.dtype)
            elif entry.kind == "object":
                fields[path] = Field("object")
            else:  # A lazy stack: that its shapes agree in one episode says nothing of others.
                fields[path] = Field("ragged", (-1,) * len(entry.shape), entry.dtype)
        if share_next:
            for path in sorted(fields, key=len):
                source = fields.get(path[1:]) if path[0] == "next" else None
                if source is None or source.shared or not agrees(steps, path):
                    continue
                if sum(field.shared for field in fields.values()) < _MOST_SHARED:
                    fields[path] = replace(fields[path], shared=True)
        return EpisodeSchema(fields)

    @cached_property
    def shared(self) -> tuple[Path, ...]:
        """The entries ``("next", k)`` that are written in the rows of ``k``."""
        return tuple(path for path, field in self.fields.items() if field.shared)

    def conform(self, steps: Steps) -> Steps:
        """Return an episode with every column in the form of its field.

        Raises:
            ValueError: if it does not fit; names the entry.
        """
        missing = self.fields.keys() - steps.columns.keys()
        extra = steps.columns.keys() - self.fields.keys()
        if missing or extra:
            odd = min(missing or extra)
            is_whole = any(odd[: len(path)] == path for path in extra - {odd})
            raise ValueError(
                f"an episode must have the keys of the first one: {name_of(odd)} is "
                f"{'missing' if missing else 'not among them'}."
                + " The dicts of its steps must hold numbers or arrays under the same keys."
                * is_whole
            )
        columns = {
            path: _conformed(path, steps.columns[path], field)
            for path, field in self.fields.items()
        }
        return Steps(steps.length, columns)

    def disagreeing(self, steps: Steps) -> int:
        """Return which shared entries of a conformed episode differ from ``k`` one step later.

        Bit ``i`` of the result stands for ``shared[i]``. Such an episode is written with ``2 T`` rows of
        ``k``: those of ``k``, then those of ``("next", k)``.
        """
        return sum(not agrees(steps, path) and 1 << i for i, path in enumerate(self.shared))

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON data."""
        return {
            "fields": [
                {
                    "key": list(path),
                    "kind": field.kind,
                    "shape": list(field.shape),
                    "dtype": None if field.dtype is None else dtype_name(field.dtype),
                    "shared": field.shared,
                }
                for path, field in self.fields.items()
            ]
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EpisodeSchema:
        """Return the schema that :meth:`to_json` described."""
        return EpisodeSchema(
            {
                tuple(entry["key"]): Field(
                    entry["kind"],
                    tuple(entry["shape"]),
                    None if entry["dtype"] is None else dtype_of(entry["dtype"]),
                    entry["shared"],
                )
                for entry in data["fields"]
            }
        )


def agrees(steps: Steps, path: Path) -> bool:
    """Whether the entry ``path``, a ``("next", k)``, equals ``k`` one step later, bit for bit."""
    here, following = steps.columns[path[1:]], steps.columns[path]
    if not (isinstance(here, Tensor) and isinstance(following, Tensor)):
        return False
    if here.shape != following.shape or here.dtype != following.dtype:
        return False
    return torch.equal(bits(here)[1:], bits(following)[:-1])


def _conformed(path: Path, column: Column, field: Field) -> Column:
    """Convert a column to the form of its field; ``ValueError`` if it does not fit."""
    if field.kind == "object" and isinstance(column, Objects):
        return column
    if field.kind == "dense":
        if isinstance(column, Rows) and all(_fits(item, field) for item in column.items):
            return torch.stack(column.items)
        form = (field.dtype, field.shape)
        if isinstance(column, Tensor) and (column.dtype, column.shape[1:]) == form:
            return column
    elif field.kind == "ragged" and not isinstance(column, Objects):
        items = list(column.unbind(0)) if isinstance(column, Tensor) else column.items
        if all(item.ndim == len(field.shape) and item.dtype == field.dtype for item in items):
            return Rows(items)
    raise ValueError(
        f"{name_of(path)} must be as in the first episode: expected {field}, got {_form(column)}."
        f"{_advice(column, field)}"
    )


def _fits(item: Tensor, field: Field) -> bool:
    return item.shape == field.shape and item.dtype == field.dtype


def _form(column: Column) -> str:
    """Describe a column as :class:`Form` describes an entry."""
    if isinstance(column, Objects):
        return str(Form("object"))
    if isinstance(column, Tensor):
        return str(Form("dense", tuple(column.shape[1:]), column.dtype))
    forms = {(item.ndim, item.dtype) for item in column.items}
    if len(forms) > 1:
        return "tensors of several dtypes or numbers of dimensions"
    ndim, dtype = forms.pop()
    return str(Form("ragged", (-1,) * ndim, dtype))


def _advice(column: Column, field: Field) -> str:
    """Say what to do about an entry that does not fit."""
    if field.dtype is None:
        return (
            " If the first episode has empty lists only, give them as arrays, such as "
            "np.zeros(0, dtype=int). np.array(steps, dtype=object) keeps lists as they are."
        )
    if isinstance(column, Objects):
        return ""
    dtypes = {field.dtype, *(item.dtype for item in step_tensors(column))}
    if torch.bool not in dtypes and len({dtype.is_floating_point for dtype in dtypes}) > 1:
        return " Integers and floats do not mix: give float(value) from the first episode on."
    if field.kind != "dense" or (isinstance(column, Tensor) and column.shape[1:] == field.shape):
        return ""
    return (
        " If its shape may vary, give it as a lazy stack (tensordict.lazy_stack) from the first "
        "episode on."
    )
