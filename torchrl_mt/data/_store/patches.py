"""Patches: new values for stored steps, from TorchRL's ``update_if_present``.

A patch is checked completely before it is written. Entries that share rows cannot be patched, as
changing one would change the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_mt.data._store.columns.columns import DenseColumn, RecordColumn
from torchrl_mt.data._store.columns.rows import plan_rows
from torchrl_mt.data._store.steps import name_of, path_of

if TYPE_CHECKING:
    from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["PatchedEntry", "check_patch", "write_patch"]


class PatchedEntry:
    """A stored entry that may be patched, in the form that ``update_if_present`` expects.

    Args:
        storage: the storage.
        key: the entry.

    Raises:
        KeyError: if it is not stored.
        ValueError: if it shares rows with another entry, or has no fixed shape.
    """

    def __init__(self, storage: EpisodeStorage, key: NestedKey) -> None:
        path, schema = path_of(key), storage.schema
        entry = None if schema is None else schema.entries.get(path)
        if schema is None or entry is None:
            known = [] if schema is None else [*map(name_of, schema.entries)]
            raise KeyError(f"{name_of(path)} is not stored; the entries are {', '.join(known)}.")
        following = schema.entries.get(("next", *path))
        if entry.shared or (following is not None and following.shared):
            raise ValueError(
                f"{name_of(path)} shares its rows with another entry, which a patch would change, "
                f"too: make the storage with EpisodeStorage(share_next=False)."
            )
        column = storage._store.columns[path]
        if not isinstance(column, (DenseColumn, RecordColumn)):
            raise ValueError(
                f"only entries of one shape can be patched: {name_of(path)} is {entry}."
            )
        self._storage = storage
        self.name = name_of(path)
        self.data = column.data
        self.shape = torch.Size([storage.max_size, *entry.shape])
        self.device = storage.device

    def __getitem__(self, handles: Any) -> Tensor:
        """Read the values of steps by handle."""
        (handles,) = handles if isinstance(handles, tuple) else (handles,)
        return self.data[self._storage.rows_of(handles).to(self.device)]

    def values(self, given: Any, steps: int) -> Tensor:
        """Check new values for ``steps`` steps; return them on the storage's device."""
        values = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
        shape = (steps, *self.shape[1:])
        if values.dtype != self.data.dtype or values.numel() != torch.Size(shape).numel():
            raise ValueError(
                f"patch of {self.name} must be {shape} {self.data.dtype}, got "
                f"{tuple(values.shape)} {values.dtype}."
            )
        return values.detach().to(self.device).reshape(shape)


def check_patch(
    storage: EpisodeStorage, index: Tensor, patch: Mapping[NestedKey, Any]
) -> dict[NestedKey, Tensor]:
    """Check a patch; return its values, ready to write."""
    steps = index.numel()
    return {key: PatchedEntry(storage, key).values(given, steps) for key, given in patch.items()}


def write_patch(storage: EpisodeStorage, index: Tensor, patch: Mapping[NestedKey, Tensor]) -> None:
    """Write new values of stored steps; if a step has several, the last counts.

    Args:
        storage: the storage.
        index: int64 ``[n]``, handles.
        patch: what :func:`check_patch` returned for these steps.
    """
    rows = storage.rows_of(index)
    last = {row: i for i, row in enumerate(rows.tolist())}
    kept = torch.tensor([*last.values()], dtype=torch.int64, device="cpu")
    plans = [
        plan_rows(PatchedEntry(storage, key).data, rows[kept], values[kept.to(values.device)])
        for key, values in patch.items()
    ]
    for write in plans:
        write()
