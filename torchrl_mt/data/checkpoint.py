"""Saving to disk what is there whole or not at all, and loading it whole or not at all.

A buffer is saved as it is at one moment, with its storage, sampler, writer, transforms, generator
and prefetched batches, while other threads write to it and sample from it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from torchrl_mt.data._store.files.atomic_folder import POINTER, commit, committed
from torchrl_mt.data._store.files.hashes import MANIFEST
from torchrl_mt.data._store.files.store_files import StoreFiles, save_store

__all__ = ["FileCheckpointer", "load_state", "save_as_one", "save_state", "storage_folder"]

_logger = logging.getLogger("torchrl_mt")

_FILE = "state.pt"
_MADE_BY = "made_by.json"
"""The file that tells what sampler's state is saved, and how many episodes."""


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
            FileNotFoundError: if a file is missing.
            ValueError: if a file is damaged, the folder has no checkpoint of a storage of this kind,
                or not even the newest episode fits.
        """
        path = Path(path)
        _check_made(path)
        if (path / MANIFEST).exists():
            storage._restore(StoreFiles(path).load)
        elif (path / _FILE).exists():  # of an earlier version
            storage._restore(lambda store: store.load_state_dict(load_state(path)))
        else:
            raise ValueError(f"no checkpoint of an EpisodeStorage: {_contents(path)}")

    def register_save_hook(self, hook: Any) -> None:
        """Not supported: hooks reshape flat steps, and episodes are saved whole."""
        raise NotImplementedError("an EpisodeStorage is saved as it is and takes no save hooks")

    def register_load_hook(self, hook: Any) -> None:
        """Not supported: hooks reshape flat steps, and episodes are saved whole."""
        raise NotImplementedError("an EpisodeStorage is saved as it is and takes no load hooks")


@contextmanager
def storage_folder(path: str | Path, *, verify: bool) -> Iterator[Path]:
    """The folder with the files of a storage, of a buffer's checkpoint or of the storage's own.

    Args:
        path: what ``dumps`` was given.
        verify: see :func:`~torchrl_mt.data._store.files.atomic_folder.committed`.

    Raises:
        FileNotFoundError: if there is no such folder, or a file is missing.
        ValueError: if it is no such checkpoint, or a file is damaged.
    """
    path = Path(path).absolute()
    if (path / MANIFEST).exists():
        yield path
        return
    with committed(path, verify=verify) as found:
        folder = (found or path) / "storage"
        if (folder / _FILE).exists():
            raise ValueError(
                f"the checkpoint in {path} is of an earlier version, whose files cannot be mapped: "
                f"load it with loads, and save it again"
            )
        if not (folder / MANIFEST).exists():
            raise ValueError(f"no checkpoint of an EpisodeStorage: {_contents(found or path)}")
        yield folder


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

    def made_by(self) -> dict[str, Any]:
        """What a state is told to be of, for :meth:`fitting`."""
        sampler = type(self.buffer._sampler).__qualname__
        return {"sampler": sampler, "episodes": self.storage.num_episodes}

    @contextmanager
    def fitting(self, made_by: dict[str, Any], name: str) -> Iterator[None]:
        """Leave out the sampler's state, and batches that it prefetched, if it does not fit.

        Args:
            made_by: what the state is of; an earlier version did not tell.
            name: the sampler's method that loads the state.
        """
        sampler = self.buffer._sampler
        given = getattr(sampler, name)
        left_out = False

        def load(state: Any) -> None:
            nonlocal left_out
            reason = self._misfit(made_by)
            if reason is None:
                given(state)
                return
            left_out = True
            sampler._empty()
            _logger.warning(
                "the saved sampler's state is left out, and %s begins anew: %s",
                type(sampler).__name__,
                reason,
            )

        setattr(sampler, name, load)
        try:
            yield
        finally:
            delattr(sampler, name)
        if left_out:
            self.buffer._prefetch_queue.clear()

    def _misfit(self, made_by: dict[str, Any]) -> str | None:
        """Why a saved sampler's state does not fit; None if it does."""
        cls = type(self.buffer._sampler)
        if made_by.get("sampler", cls.__qualname__) != cls.__qualname__:
            return f"it is of a {made_by['sampler']}"
        fewer = self.storage.num_episodes < made_by.get("episodes", 0)
        if fewer and cls.__module__.startswith("torchrl."):
            return "it counts steps by their age, and the oldest were left out"
        return None


class _Dumps(_Method):
    """Saves the buffer in a folder, whole or not at all."""

    replaced = "dumps"

    def as_one(self, path: str | Path) -> None:
        def write(folder: Path) -> None:
            with self.still():
                self.method(folder)
                (folder / _MADE_BY).write_text(json.dumps(self.made_by()), encoding="utf-8")
                state = copy(self.buffer._transform.state_dict())
                if any(isinstance(v, Tensor) and not v.is_cpu for v in state.values()):
                    # TorchRL reads it back to the devices that it came from, here or not.
                    for name, value in state.items():
                        state[name] = value.cpu() if isinstance(value, Tensor) else value
                    torch.save(state, folder / "transform.t")

        commit(Path(path).absolute(), write)


class _Loads(_Method):
    """Loads the buffer from a folder, whole or not at all."""

    replaced = "loads"

    def as_one(self, path: str | Path) -> None:
        path = Path(path).absolute()
        with committed(path) as found:
            folder = found or path
            if not (folder / "buffer_metadata.json").exists():
                raise FileNotFoundError(f"no checkpoint of a replay buffer: {_contents(path)}")
            told = folder / _MADE_BY
            made_by = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
            with self.still(), self.undone_on_error(), self.here(), self.fitting(made_by, "loads"):
                self.method(folder)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Leave out prefetched batches that are on a device that is not here."""
        buffer = self.buffer
        given = buffer._load_prefetch_state

        def load(path: Path) -> Any:
            try:
                return given(path)
            except RuntimeError as error:
                _logger.warning("prefetched batches are left out: %s", error)
                return None

        buffer._load_prefetch_state = load
        try:
            yield
        finally:
            del buffer._load_prefetch_state


class _StateDict(_Method):
    """Everything that the buffer holds, at one moment."""

    replaced = "state_dict"

    def as_one(self) -> Any:
        with self.still():
            state = self.method()
            state["_transforms"] = deepcopy(state["_transforms"])  # Modules give what they hold.
            return state | {"_made_by": self.made_by()}


class _LoadStateDict(_Method):
    """Loads what ``state_dict`` gave, whole or not at all."""

    replaced = "load_state_dict"

    def as_one(self, state_dict: dict[str, Any]) -> None:
        made_by = state_dict.get("_made_by", {})
        with self.still(), self.undone_on_error(), self.fitting(made_by, "load_state_dict"):
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


def _contents(path: Path) -> str:
    """What a folder holds, for an error."""
    if not path.is_dir():
        return f"there is no folder {path}"
    found = sorted(each.name for each in path.iterdir())
    if not found:
        return f"{path} is empty"
    listed = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
    return f"{path} holds {listed}; load what the same kind of buffer or storage saved"
