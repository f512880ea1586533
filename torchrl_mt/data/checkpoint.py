"""Saving to disk what is there whole or not at all, and loading it whole or not at all.

A buffer is saved as it is at one moment, with its storage, sampler, writer, transforms, generator
and prefetched batches, while other threads write to it and sample from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from torchrl_mt.data.commit import POINTER, commit, committed
from torchrl_mt.data.hashes import MANIFEST
from torchrl_mt.data.store_files import StoreFiles, save_store

__all__ = ["FileCheckpointer", "load_state", "save_as_one", "save_state"]

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
    """Saves a storage in files, column by column: it takes no memory, and no more disk than is held.

    A changed bit in any of them is found when it is loaded.
    """

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Save ``storage`` in the folder ``path``."""
        _check_made(path)
        with storage.lock:
            save_store(storage._store, Path(path))

    def loads(self, storage: Any, path: str | Path) -> None:
        """Load ``storage`` from the folder ``path``; nothing, if that fails.

        Of more than its budgets allow, the newest whole episodes are kept, and a warning says so.

        Raises:
            FileNotFoundError: if there is no such folder, or a file is missing.
            ValueError: if a file is damaged, the folder has something else, or not even the newest
                episode fits.
        """
        path = Path(path)
        _check_made(path)
        if (path / MANIFEST).exists():
            storage._restore(StoreFiles(path).load)
        elif (path / _FILE).exists():  # of an earlier version
            storage._restore(lambda store: store.load_state_dict(load_state(path)))
        else:
            raise _no_checkpoint(path, "an EpisodeStorage")

    def register_save_hook(self, hook: Any) -> None:
        """Not supported: hooks reshape flat steps, and episodes are saved whole."""
        raise NotImplementedError("an EpisodeStorage is saved as it is and takes no save hooks")

    def register_load_hook(self, hook: Any) -> None:
        """Not supported: hooks reshape flat steps, and episodes are saved whole."""
        raise NotImplementedError("an EpisodeStorage is saved as it is and takes no load hooks")


def save_as_one(buffer: Any, storage: Any) -> None:
    """Have a buffer saved and loaded as one, as long as it keeps this storage.

    Args:
        buffer: what is attached to the storage; nothing is done unless it is a ``ReplayBuffer``.
        storage: an :class:`~torchrl_mt.data.EpisodeStorage`.
    """
    if isinstance(buffer, ReplayBuffer):
        for method in (_Dumps, _Loads, _StateDict, _LoadStateDict):
            setattr(buffer, method.replaced, method(buffer, storage))


class _Method:
    """Takes the place of a method of one buffer."""

    replaced: str

    def __init__(self, buffer: ReplayBuffer, storage: Any) -> None:
        self.buffer = buffer
        self.storage = storage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.buffer._storage is self.storage:
            return self.as_one(*args, **kwargs)
        return self.method(*args, **kwargs)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        """The method as the buffer's class has it."""
        return getattr(type(self.buffer), self.replaced)(self.buffer, *args, **kwargs)

    def as_one(self, *args: Any, **kwargs: Any) -> Any:
        """The method, for a whole buffer or none."""
        raise NotImplementedError

    @contextmanager
    def still(self) -> Iterator[None]:
        """Keep every thread from writing to the buffer, sampling from it, or to its storage.

        Locks are taken in the order in which the buffer itself takes them to write and sample: the
        storage's last, as batches being prefetched wait for it.
        """
        buffer = self.buffer
        with buffer._futures_lock:
            buffer.synchronize()
            with buffer._replay_lock, self.storage.lock:
                yield

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Put the buffer back as it is now if the body fails."""
        buffer = self.buffer
        sampler, transform = buffer._sampler, buffer._transform
        queue = list(buffer._prefetch_queue)
        states = [deepcopy(part.state_dict()) for part in (sampler, transform)]
        before = [(part, dict(vars(part))) for part in (buffer, sampler, buffer._writer)]
        try:
            with self.storage._undone_on_error():
                yield
        except BaseException:
            for part, attributes in before:
                for name in vars(part).keys() - attributes.keys():
                    delattr(part, name)
                vars(part).update(attributes)
            buffer._prefetch_queue.clear()
            buffer._prefetch_queue.extend(queue)
            self.storage._rng = buffer._rng
            for part, state in zip((sampler, transform), states, strict=True):
                part.load_state_dict(state)
            raise


class _Dumps(_Method):
    """Saves the buffer in a folder, whole or not at all."""

    replaced = "dumps"

    def as_one(self, path: str | Path) -> None:
        def write(folder: Path) -> None:
            with self.still():
                self.method(folder)

        commit(Path(path).absolute(), write)


class _Loads(_Method):
    """Loads the buffer from a folder, whole or not at all."""

    replaced = "loads"

    def as_one(self, path: str | Path) -> None:
        path = Path(path).absolute()
        with committed(path) as folder:
            if folder is None and not (path / "buffer_metadata.json").exists():
                raise FileNotFoundError(f"no checkpoint: nothing was saved in {path}")
            with self.still(), self.undone_on_error():
                self.method(folder or path)


class _StateDict(_Method):
    """Everything that the buffer holds, at one moment."""

    replaced = "state_dict"

    def as_one(self) -> Any:
        with self.still():
            state = self.method()
            state["_transforms"] = deepcopy(state["_transforms"])  # Modules give what they hold.
            return state


class _LoadStateDict(_Method):
    """Loads what ``state_dict`` gave, whole or not at all."""

    replaced = "load_state_dict"

    def as_one(self, state_dict: dict[str, Any]) -> None:
        with self.still(), self.undone_on_error():
            self.method(state_dict)


def _check_made(path: str | Path) -> None:
    """Refuse to take the storage's part of a checkpoint that is saved and loaded as one.

    The first call of a buffer with ``delayed_init=True``, before it has its storage, ends here.
    """
    path = Path(path)
    if path.name == "storage" and (path.parent / POINTER).exists():
        raise RuntimeError(
            f"{path.parent} holds a checkpoint that is saved and loaded as one, and a buffer with "
            f"delayed_init=True had not been made yet: it is now, call this again"
        )


def _no_checkpoint(path: Path, of: str) -> Exception:
    """The error that a folder has no checkpoint, or another one."""
    if not path.is_dir():
        return FileNotFoundError(f"no checkpoint of {of}: there is no folder {path}")
    found = sorted(each.name for each in path.iterdir())
    if not found:
        return FileNotFoundError(f"no checkpoint of {of}: {path} is empty")
    listed = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
    return ValueError(
        f"no checkpoint of {of}: {path} holds {listed}; load what the same kind of buffer or "
        f"storage saved"
    )
