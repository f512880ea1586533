"""Saving to disk in one file that is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

__all__ = ["FileCheckpointer", "load_state", "save_state"]

_FILE = "state.pt"


def save_state(state: Any, path: str | Path) -> None:
    """Write ``state`` to a file in the folder ``path``; an older one stays until this is done."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (_FILE + ".tmp")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / _FILE)


def load_state(path: str | Path) -> Any:
    """Read what :func:`save_state` wrote.

    The file may hold any Python object: load only files that you trust.
    """
    return torch.load(Path(path) / _FILE, map_location="cpu", weights_only=False)


class FileCheckpointer(StorageCheckpointerBase):
    """Saves a storage's ``state_dict`` in one file."""

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Save ``storage`` in the folder ``path``."""
        save_state(storage.state_dict(), path)

    def loads(self, storage: Any, path: str | Path) -> None:
        """Load ``storage`` from the folder ``path``."""
        storage.load_state_dict(load_state(path))

    def register_save_hook(self, hook: Any) -> None:
        """Not supported: hooks reshape flat steps, and episodes are saved whole."""
        raise NotImplementedError("an EpisodeStorage is saved as it is and takes no save hooks")

    def register_load_hook(self, hook: Any) -> None:
        """Not supported: hooks reshape flat steps, and episodes are saved whole."""
        raise NotImplementedError("an EpisodeStorage is saved as it is and takes no load hooks")
