"""Checkpoints of storages and buffers, which are saved and loaded whole or not at all.

A buffer is saved as it is at one moment, with its storage, sampler, writer, transforms, generator
and prefetched batches, even while other threads write to it and sample from it.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar
from zipfile import is_zipfile

import torch
from tensordict import is_tensor_collection
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from torchrl_mt._hosts.torchrl import (
    buffer_held,
    forget,
    prefetched_batches,
    prefetched_batches_saved_by,
)
from torchrl_mt.data._store.files.manifest import HASHES
from torchrl_mt.data._store.files.store_files import StoreFiles, save_store
from torchrl_mt.data._store.files.versions import (
    has_run,
    is_part,
    newest,
    read_version,
    save_version,
)
from torchrl_mt.data._store.plain import (
    is_trusted,
    load_plainly,
    plain_steps,
    save_plainly,
    steps_from,
    trusting,
)
from torchrl_mt.data._store.steps import pack, unpack

__all__ = [
    "FileCheckpointer",
    "SavesState",
    "batches_saved_plainly",
    "check_pickles",
    "read_storage",
    "save_as_one",
]

_logger = logging.getLogger("torchrl_mt")

Result = TypeVar("Result")

_STATE = "state.pt"
_STORAGE = "storage"
"""Folder of a storage's files in a checkpoint: TorchRL's name."""
_BATCHES = "prefetch.pt"
_TRANSFORM = "transform.pt"
_MADE_BY = "made_by.json"
"""File with the class of the saved sampler and the number of saved episodes."""


class SavesState:
    """Mixin that saves a ``state_dict`` to a file, for samplers and writers."""

    def dumps(self, path: Any) -> None:
        """Save the state in the folder ``path``; an older file is replaced at the end."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / (_STATE + ".tmp")
        with open(partial, "wb") as file:
            save_plainly(self.state_dict(), file)  # type: ignore[attr-defined]
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / _STATE)

    def loads(self, path: Any, *, trust: bool = False) -> None:
        """Load the state from the folder ``path``.

        Args:
            path: the folder.
            trust: whether to read any Python object from it, which may run code.
        """
        with trusting(trust):
            state = load_plainly(Path(path) / _STATE)
        self.load_state_dict(state)  # type: ignore[attr-defined]


class FileCheckpointer(StorageCheckpointerBase):
    """Saves a storage in files, column by column, without a copy in memory.

    Loading finds any damaged file.
    """

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Save ``storage`` in the folder ``path``."""
        path = Path(path).absolute()
        _check_made(path)

        def write(folder: Path) -> None:
            with storage.lock:
                save_store(storage._store, folder)

        if is_part(path):  # A whole buffer or run is being saved.
            write(path)
        else:
            _save(path, lambda version: write(version / _STORAGE))

    def loads(self, storage: Any, path: str | Path) -> None:
        """Load ``storage`` from the folder ``path``; if that fails, change nothing.

        If its budgets are exceeded, the newest whole episodes are kept, and a warning says so.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if a file is damaged, the folder has no checkpoint of a storage of this kind,
                or not even the newest episode fits.
        """
        _check_made(Path(path))
        read_storage(path, lambda folder: storage._restore(StoreFiles(folder).load))

    def register_save_hook(self, hook: Any) -> None:
        """Not supported: hooks reshape flat steps, and episodes are saved whole."""
        raise NotImplementedError("an EpisodeStorage is saved as it is and takes no save hooks.")

    def register_load_hook(self, hook: Any) -> None:
        """Not supported: hooks reshape flat steps, and episodes are saved whole."""
        raise NotImplementedError("an EpisodeStorage is saved as it is and takes no load hooks.")


def read_storage(
    path: str | Path, read: Callable[[Path], Result], *, verify: bool = True
) -> Result:
    """Read the files of a storage from its own checkpoint or that of a buffer.

    Args:
        path: the folder that was given to ``dumps``.
        read: called with the folder of the files; its result is returned. See
            :func:`~torchrl_mt.data._store.files.versions.read_version`.
        verify: see there.

    Raises:
        FileNotFoundError: if there is no such folder, or a file is missing.
        ValueError: if it is no such checkpoint, or a file is damaged.
    """
    path = Path(path).absolute()
    if (path / HASHES).exists():
        return read(path)

    def find(version: Path | None) -> Result:
        folder = (version or path) / _STORAGE
        if (folder / HASHES).exists():
            return read(folder)
        if version is None and newest(folder) is not None:  # TorchRL's layout
            return read_storage(folder, read, verify=verify)
        raise ValueError(f"no checkpoint of an EpisodeStorage: {_contents(version or path)}")

    return read_version(path, find, verify=verify)


def save_as_one(buffer: Any, storage: Any) -> None:
    """Make a ``ReplayBuffer`` save and load whole or not at all, as long as it has this storage.

    Args:
        buffer: what is attached to the storage; anything but a ``ReplayBuffer`` is left as it is.
        storage: an :class:`~torchrl_mt.data.EpisodeStorage`.
    """
    if isinstance(buffer, ReplayBuffer):
        for name in ("dumps", "loads", "state_dict", "load_state_dict"):
            setattr(buffer, name, _AsOne(buffer, storage, name))


class _AsOne:
    """Replaces a method of one buffer, to save or load all of it or nothing."""

    def __init__(self, buffer: ReplayBuffer, storage: Any, name: str) -> None:
        self.buffer = buffer
        self.storage = storage
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.buffer.storage is self.storage:
            return getattr(self, f"_{self.name}")(*args, **kwargs)
        return self.method(*args, **kwargs)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the buffer's class."""
        return getattr(type(self.buffer), self.name)(self.buffer, *args, **kwargs)

    def _dumps(self, path: str | Path) -> None:
        def write(folder: Path) -> None:
            with self.held():
                with _plain_batches(self.buffer):
                    self.method(folder)
                (folder / _MADE_BY).write_text(json.dumps(self.made_by()), encoding="utf-8")
                if state := self.buffer.transform.state_dict():
                    # TorchRL's file holds the devices of tensors, which may not exist elsewhere.
                    (folder / "transform.t").unlink()
                    with open(folder / _TRANSFORM, "wb") as out:
                        save_plainly(state, out)

        _save(Path(path).absolute(), write)

    def _loads(self, path: str | Path, *, trust: bool = False) -> None:
        path = Path(path).absolute()

        def read(version: Path | None) -> None:
            folder = version or path
            if not (folder / "buffer_metadata.json").exists():
                raise FileNotFoundError(f"no checkpoint of a replay buffer: {_contents(path)}")
            check_pickles(folder)
            file = folder / _MADE_BY
            made_by = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            with self.loading(made_by), _plain_batches(self.buffer):
                self.method(folder)
                if (folder / _TRANSFORM).exists():
                    self.buffer.transform.load_state_dict(load_plainly(folder / _TRANSFORM))

        with trusting(trust):
            read_version(path, read)

    def _state_dict(self) -> Any:
        with self.held():
            state = self.method()
            # Modules return their own tensors.
            state["_transforms"] = deepcopy(state["_transforms"])
            return state | {"_made_by": self.made_by()}

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self.loading(state_dict.get("_made_by", {})):
            self.method(state_dict)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the buffer and its storage against writing and sampling.

        The storage's lock is taken last, as the buffer does: batches being prefetched wait for it.
        """
        with buffer_held(self.buffer), self.storage.lock:
            yield

    @contextmanager
    def loading(self, made_by: dict[str, Any]) -> Iterator[None]:
        """Lock the buffer, and restore it if the body fails.

        A sampler's state that does not fit is left out, and so are its prefetched batches.
        """
        with self.held(), self.undone_on_error(), self.fitting(made_by):
            yield

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore the buffer if the body fails."""
        buffer, batches = self.buffer, prefetched_batches(self.buffer)
        sampler, transform = buffer.sampler, buffer.transform
        queue = list(batches)
        states = [deepcopy(part.state_dict()) for part in (sampler, transform)]
        before = [(part, dict(vars(part))) for part in (buffer, sampler, buffer.writer)]
        generator = self.storage._rng
        try:
            with self.storage._undone_on_error():
                yield
        except BaseException:
            for part, attributes in before:
                for name in vars(part).keys() - attributes.keys():
                    delattr(part, name)
                vars(part).update(attributes)
            batches.clear()
            batches.extend(queue)
            self.storage._rng = generator
            for part, state in zip((sampler, transform), states, strict=True):
                part.load_state_dict(state)
            raise

    def made_by(self) -> dict[str, Any]:
        """Describe the sampler and storage whose state is saved, for :meth:`fitting`."""
        sampler = type(self.buffer.sampler).__qualname__
        return {"sampler": sampler, "episodes": self.storage.num_episodes}

    @contextmanager
    def fitting(self, made_by: dict[str, Any]) -> Iterator[None]:
        """Leave out the sampler's state and its prefetched batches if they do not fit.

        Args:
            made_by: what :meth:`made_by` returned; {} for TorchRL's own checkpoints.
        """
        sampler, name = self.buffer.sampler, self.name
        given = getattr(sampler, name)
        left_out = False

        def load(state: Any) -> None:
            nonlocal left_out
            reason = self._misfit(made_by)
            if reason is None:
                given(state)
                return
            left_out = True
            forget(sampler)
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
            prefetched_batches(self.buffer).clear()

    def _misfit(self, made_by: dict[str, Any]) -> str | None:
        """Say why a saved sampler's state does not fit; None if it does."""
        cls = type(self.buffer.sampler)
        if made_by.get("sampler", cls.__qualname__) != cls.__qualname__:
            return f"it is of a {made_by['sampler']}"
        fewer = self.storage.num_episodes < made_by.get("episodes", 0)
        if fewer and cls.__module__.startswith("torchrl."):
            return "it counts steps by their age, and the oldest were left out"
        return None


def _save(path: Path, write: Callable[[Path], None]) -> None:
    """Save a new version, which replaces the last one; refuse to replace the checkpoints of a run."""
    if has_run(path):
        raise ValueError(
            f"path must be a folder of its own, but {path} has the checkpoints of a run, which this "
            "would delete: give another folder, or save the buffer as a part of the run."
        )
    save_version(path, write)


@contextmanager
def batches_saved_plainly(part: Any) -> Iterator[None]:
    """Let a ``ReplayBuffer`` save prefetched batches as plain data, and read no others if untrusted."""
    if not isinstance(part, ReplayBuffer) or isinstance(part.loads, _AsOne):
        yield
    else:
        with _plain_batches(part):
            yield


def check_pickles(folder: Path) -> None:
    """Refuse the pickles that tensordict and TorchRL would read, also in archives, unless trusted."""
    for where, _, names in () if is_trusted() else os.walk(folder, followlinks=True):
        for file in (Path(where, name) for name in names):
            archive = file.suffix not in (".pt", ".t", ".rows") and is_zipfile(file)
            if archive or file.name in ("other.pickle", "pickle.pkl"):
                raise ValueError(
                    f"{file} is a pickle, which may run code: give trust=True if you trust whoever "
                    f"wrote it."
                )


def _save_batches(folder: Path, state: Any) -> None:
    """Save the prefetched batches of a buffer."""
    with open(folder / _BATCHES, "wb") as file:
        save_plainly(_plain_batch(state), file)


def _load_batches(folder: Path) -> Any:
    """Read the prefetched batches of a buffer; None, with a warning, if their device is not here."""
    if (folder / _BATCHES).exists():
        try:
            return _batch_from(load_plainly(folder / _BATCHES, device=None))
        except RuntimeError as error:
            _logger.warning("prefetched batches are left out: %s", error)
            return None
    if not (file := folder / "prefetch.pkl").exists():
        return None
    with open(file, "rb") as pickled:  # TorchRL's; it has no classes where there are no batches.
        return (pickle.Unpickler if is_trusted() else _NoClasses)(pickled).load()


def _plain_batches(buffer: ReplayBuffer) -> Any:
    return prefetched_batches_saved_by(buffer, _save_batches, _load_batches)


class _NoClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"the prefetched batches are pickles with {module}.{name}, which may run code: give "
            f"trust=True if you trust whoever wrote them."
        )


def _plain_batch(value: Any) -> tuple[str, Any]:
    """Convert a batch and what comes with it to plain data, marked with what it was."""
    if is_tensor_collection(value):
        steps = plain_steps(unpack(value.reshape(-1)))
        device = None if value.device is None else str(value.device)
        return "steps", (steps, value.batch_size, device)
    if type(value) is dict:
        return "dict", {key: _plain_batch(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return "tuple" if type(value) is tuple else "list", [*map(_plain_batch, value)]
    return "value", value


def _batch_from(plain: tuple[str, Any]) -> Any:
    """Undo :func:`_plain_batch`."""
    kind, value = plain
    if kind == "steps":
        steps, batch_size, device = value
        device = None if device is None else torch.device(device)
        return pack(steps_from(steps), device, batch_size=batch_size)
    if kind == "dict":
        return {key: _batch_from(each) for key, each in value.items()}
    if kind == "value":
        return value
    return (tuple if kind == "tuple" else list)(map(_batch_from, value))


def _check_made(path: Path) -> None:
    """Refuse to save or load only the storage of a whole buffer's checkpoint.

    This happens if a buffer with ``delayed_init=True`` is saved or loaded before it has its storage.
    """
    if path.name == _STORAGE and newest(path.parent) is not None:
        raise RuntimeError(
            f"{path.parent} holds a checkpoint that is saved and loaded as one, and a buffer with "
            f"delayed_init=True had not been made yet: it is now, call this again."
        )


def _contents(path: Path) -> str:
    """List what a folder holds, for an error."""
    if not path.is_dir():
        return f"there is no folder {path}."
    found = sorted(each.name for each in path.iterdir())
    if not found:
        return f"{path} is empty."
    listed = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
    return f"{path} holds {listed}; load what the same kind of buffer or storage saved."
