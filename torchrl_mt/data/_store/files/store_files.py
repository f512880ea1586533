"""A store in the files of a folder, column by column: as many bytes as the store holds, and no copy
of them in memory.

The folder holds the old or the new files as a whole when a writer is killed: they have names of
their own, and one small file, replaced atomically, names those that count.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from torchrl_mt.data._store.files.column_files import FileParts, Form, MappedParts, Part, write_part
from torchrl_mt.data._store.files.hashes import (
    MANIFEST,
    HashedFile,
    check_hash,
    check_size,
    read_record,
    record_text,
)
from torchrl_mt.data._store.steps import Objects

if TYPE_CHECKING:
    from torchrl_mt.data._store.store import EpisodeStore

__all__ = ["StoreFiles", "save_store"]

_OURS = re.compile(r"(state|[0-9]{3,})-[0-9a-f]{32}\.(pt|rows)")


def save_store(store: EpisodeStore, folder: Path) -> None:
    """Save everything stored in a folder; what was saved there stays until this is done."""
    folder.mkdir(parents=True, exist_ok=True)
    tag, numbers = uuid.uuid4().hex, count()
    files: dict[str, tuple[int, str]] = {}

    def write(part: Part | Objects) -> Form | Objects:
        if isinstance(part, Objects):
            return part
        name = f"{next(numbers):03d}-{tag}.rows"
        with HashedFile.create(folder / name) as file:
            form = write_part(part, file, name)
        files[name] = file.size, file.hash
        return form

    try:
        state, name = store.parts(), f"state-{tag}.pt"
        state["columns"] = {
            path: {name: write(part) for name, part in parts.items()}
            for path, parts in state["columns"].items()
        }
        with HashedFile.create(folder / name) as file:
            torch.save(state, cast(IO[bytes], file))
        files[name] = file.size, file.hash
        partial = folder / f"{MANIFEST}.tmp"
        partial.write_text(record_text({"state": name, "files": files}), encoding="utf-8")
        os.replace(partial, folder / MANIFEST)
    except BaseException:
        if tag not in _names_that_count(folder):
            _delete(folder, lambda name: tag in name)
        raise
    _delete(folder, lambda name: tag not in name)


class StoreFiles:
    """What :func:`save_store` saved in a folder.

    Args:
        folder: the folder.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if one is damaged; of a large one, only its size is looked at.
    """

    def __init__(self, folder: Path) -> None:
        record = read_record(folder / MANIFEST)
        self._folder = folder
        self._hashes = {name: digest for name, (_, digest) in record["files"].items()}
        for name, (size, _) in record["files"].items():
            check_size(folder / name, size)
        state = folder / record["state"]
        check_hash(state, self._hashes[state.name])
        self.state: dict[str, Any] = torch.load(state, map_location="cpu", weights_only=False)
        """As :meth:`EpisodeStore.parts` gives it, with a :class:`Form` in place of a part."""

    def load(self, store: EpisodeStore, *, mapped: bool = False, verify: bool = False) -> int:
        """Load everything into a store that holds nothing yet.

        Args:
            store: the store.
            mapped: map the files into memory, and do not read them.
            verify: read the files that are mapped once, to see whether one is damaged.

        Returns:
            how many of the oldest episodes are left out, since the store's budgets are smaller.

        Raises:
            ValueError: if a file is damaged, or not even the newest episode fits.
        """
        kind = MappedParts if mapped else FileParts
        columns = {
            path: kind(parts, self._folder, self._hashes, store.memory.device)
            for path, parts in self.state["columns"].items()
        }
        for column in columns.values() if verify else ():
            column.check()
        return store.load(self.state, columns, mapped=mapped)


def _names_that_count(folder: Path) -> str:
    """The record of the files that count, as text."""
    with suppress(OSError, ValueError):
        return (folder / MANIFEST).read_text(encoding="utf-8")
    return ""


def _delete(folder: Path, which: Any) -> None:
    """Delete files that a save left."""
    for each in folder.iterdir():
        if (_OURS.fullmatch(each.name) or each.name == "state.pt") and which(each.name):
            with suppress(OSError):
                each.unlink()
