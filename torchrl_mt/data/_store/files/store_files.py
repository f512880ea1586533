"""The files of a store: they take as many bytes as it holds, and saving copies none in memory."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_mt.data._store.files.column_files import Part, SavedColumn, SavedFile, write_part
from torchrl_mt.data._store.files.manifest import (
    HASHES,
    HashedFiles,
    check_hash,
    check_size,
    read_manifest,
    write_manifest,
)
from torchrl_mt.data._store.plain import load_plainly, save_plainly
from torchrl_mt.data._store.steps import Objects

if TYPE_CHECKING:
    from torchrl_mt.data._store.store import EpisodeStore

__all__ = ["StoreFiles", "save_store"]

_STATE = "state.pt"


def save_store(store: EpisodeStore, folder: Path) -> None:
    """Save a store to an empty folder, which is created if it does not exist."""
    folder.mkdir(exist_ok=True)
    files, numbers = HashedFiles(folder), count()

    def write(part: Part | Objects) -> dict[str, Any] | list[Any]:
        if isinstance(part, Objects):
            return part.items
        name = f"{next(numbers):03d}.rows"
        with files.create(name) as file:
            return write_part(part, file, name)

    state = store.parts()
    state["columns"] = {
        path: {name: write(part) for name, part in parts.items()}
        for path, parts in state["columns"].items()
    }
    with files.create(_STATE) as file:
        save_plainly(state, file)
    write_manifest(folder / HASHES, files.sizes_and_hashes)


class StoreFiles:
    """The files that :func:`save_store` wrote.

    Args:
        folder: the folder.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file has another size, the manifest or state is damaged, or the state holds
            objects and nobody trusts it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, read_manifest(folder / HASHES)
        for name, (size, _) in self._files.items():
            check_size(folder / name, size)
        check_hash(folder / _STATE, self._hash(_STATE))
        self.state: dict[str, Any] = load_plainly(folder / _STATE)
        """What :meth:`EpisodeStore.parts` returned, with what :func:`write_part` did of each part."""

    def load(self, store: EpisodeStore, *, mapped: bool = False, verify: bool = False) -> int:
        """Load everything into an empty store.

        Args:
            store: the store.
            mapped: whether to map the files into memory instead of reading them.
            verify: whether to compare the hashes of all files first; reading does so anyway.

        Returns:
            Number of oldest episodes that are left out because the store's budgets are smaller.

        Raises:
            ValueError: if a file is damaged, or not even the newest episode fits.
        """
        if verify:
            for name in self._files:
                check_hash(self._folder / name, self._hash(name))
        columns = {
            path: SavedColumn(
                {name: self._saved(part) for name, part in parts.items()},
                store.memory.device,
                mapped=mapped,
            )
            for path, parts in self.state["columns"].items()
        }
        return store.load(self.state, columns, mapped=mapped)

    def _saved(self, part: Any) -> SavedFile | list[Any]:
        """Find the file of a part; objects are returned as they are."""
        if isinstance(part, list):
            return part
        return SavedFile.of(self._folder, part, self._hash(part["file"]))

    def _hash(self, name: str) -> str:
        _, digest = self._files[name]
        assert digest is not None
        return digest
