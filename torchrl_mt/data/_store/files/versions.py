"""Versions of a checkpoint in a folder: readers find the newest complete one, even if a writer dies.

A version is written to ``checkpoint-<id>.tmp``, flushed to the disk, and then renamed to
``checkpoint-<number>``. Renaming is atomic, and the highest number is the newest version. Nothing else
in the folder is touched.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TypeVar

from torchrl_mt.data._store.files.manifest import (
    HASHES,
    check_hash,
    check_size,
    hash_of,
    read_manifest,
    write_manifest,
)

__all__ = ["is_unfinished", "newest", "read_version", "save_version"]

Result = TypeVar("Result")

_FILES = "checkpoint.json"
"""The manifest of a version."""
_VERSION = re.compile(r"checkpoint-([0-9]+)")
_UNFINISHED = re.compile(r"checkpoint-[0-9a-f]{32}\.tmp")
_ABANDONED = 3600.0
"""Seconds without a write after which an unfinished version counts as abandoned."""


def save_version(path: Path, write: Callable[[Path], None]) -> None:
    """Save a new version in the folder ``path``.

    Several processes and threads may save and read at once. A save deletes the versions before its own,
    and unfinished ones in which nothing was written for an hour: those of killed writers.

    Args:
        path: the folder; created if it does not exist.
        write: called with an empty folder to write to. If it fails, nothing has changed.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> save_version(path, lambda folder: (folder / "a.txt").write_text("first") and None)
        >>> read_version(path, lambda folder: (folder / "a.txt").read_text())
        'first'
    """
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        _flush(path.parent)
    new = path / f"checkpoint-{uuid.uuid4().hex}.tmp"
    try:
        new.mkdir()
        write(new)
        _finish(new)
        number = _publish(new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _flush(path)
    _delete_old(path, number)


def read_version(
    path: Path, read: Callable[[Path | None], Result], *, verify: bool = True
) -> Result:
    """Read the newest version in the folder ``path``; return what ``read`` returns.

    Args:
        path: the folder that was given to :func:`save_version`.
        read: called with the version's folder, or None if nothing was ever saved. Called again if it
            fails because a newer version replaced this one meanwhile.
        verify: whether to compare the hashes of files, except those with a ``hashes.json`` beside
            them, which ``read`` compares. Sizes are always compared.

    Raises:
        FileNotFoundError: if the folder or a file is missing.
        ValueError: if a file is damaged.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint: there is no folder {path}.")
    while True:
        found = newest(path)
        try:
            if found is not None:
                _check(found, verify)
            return read(found)
        except Exception:
            if newest(path) == found:
                raise


def newest(path: Path) -> Path | None:
    """Return the newest version in a folder; None if there is none."""
    numbers = _numbers(path)
    return path / f"checkpoint-{max(numbers)}" if numbers else None


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is a version that is being written."""
    return _UNFINISHED.fullmatch(folder.name) is not None


def _numbers(path: Path) -> list[int]:
    """List the numbers of the versions in a folder."""
    found = map(_VERSION.fullmatch, os.listdir(path) if path.is_dir() else [])
    return [int(each[1]) for each in found if each]


def _finish(folder: Path) -> None:
    """Write the manifest of a version and flush everything to the disk."""
    files: dict[str, tuple[int, str | None]] = {}
    for where, _, names in os.walk(folder, topdown=False):
        # Large files were hashed as they were written.
        hashed = read_manifest(Path(where, HASHES)) if HASHES in names else {}
        for each in sorted(names):
            file = Path(where, each)
            _flush(file)
            digest = None if each in hashed else hash_of(file)
            files[file.relative_to(folder).as_posix()] = file.stat().st_size, digest
        _flush(Path(where))
    write_manifest(folder / _FILES, files)
    _flush(folder / _FILES)
    _flush(folder)


def _check(folder: Path, verify: bool) -> None:
    """Refuse a version with a missing or damaged file."""
    files = read_manifest(folder / _FILES)
    for name, (size, _) in files.items():
        check_size(folder / name, size)
    for name, (_, digest) in files.items() if verify else ():
        if digest is not None:
            check_hash(folder / name, digest)


def _publish(new: Path) -> int:
    """Rename a finished version to the next free number; return the number."""
    while True:
        number = max(_numbers(new.parent), default=0) + 1
        place = new.with_name(f"checkpoint-{number}")
        try:
            os.rename(new, place)
        except OSError:
            if not place.exists():  # Otherwise another writer took the number.
                raise
        else:
            return number


def _delete_old(path: Path, number: int) -> None:
    """Delete the versions below ``number``, and unfinished ones that were abandoned."""
    for each in path.iterdir():
        found = _VERSION.fullmatch(each.name)
        if int(found[1]) < number if found else is_unfinished(each) and _is_abandoned(each):
            shutil.rmtree(each, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether nothing in a folder was written for an hour."""
    since = time.time() - _ABANDONED
    try:
        return all(each.stat().st_mtime < since for each in chain([folder], folder.rglob("*")))
    except OSError:  # Its writer has just renamed it.
        return False


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk; does nothing on Windows."""
    if os.name == "nt":
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
