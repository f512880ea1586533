"""Versions of a checkpoint in a folder: readers find the newest complete one, even if a writer dies.

A version is written to ``checkpoint-<id>.tmp``, flushed to the disk, and then renamed to
``checkpoint-<number>``. Renaming is atomic, and the highest number is the newest version. Nothing else
in the folder is touched. What is saved while a greater version is written, into its folder, is a part of
that version: plain files, which count when it does.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
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
from torchrl_mt.paths import inside

__all__ = [
    "RUN",
    "has_run",
    "is_part",
    "newest",
    "newest_whole",
    "number_of",
    "read_version",
    "save_version",
]

Result = TypeVar("Result")

RUN = "run.json"
"""A file that only versions of a whole run have."""
_FILES = "checkpoint.json"
"""The manifest of a version."""
_VERSION = re.compile(r"checkpoint-([0-9]+)")
_UNFINISHED = re.compile(r"checkpoint-[0-9a-f]{32}\.tmp")


def save_version(path: Path, write: Callable[[Path], None], *, keep: int = 1) -> None:
    """Save a new version in the folder ``path``.

    One process saves to a folder at a time; any number may read. A save first deletes what a killed one
    left, and at the end older versions. Within a version that is being written (:func:`is_part`),
    ``path`` gets the files themselves.

    Args:
        path: the folder; created if it does not exist.
        write: called with an empty folder to write to. If it fails, nothing has changed.
        keep: number of versions to keep, the new one included. Versions with a missing or cut file do
            not count, and are deleted.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> save_version(path, lambda folder: (folder / "a.txt").write_text("first") and None)
        >>> read_version(path, lambda folder: (folder / "a.txt").read_text())
        'first'
    """
    if is_part(path):
        path.mkdir(parents=True)
        write(path)
        return
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        _flush(path.parent)
    for each in filter(_is_unfinished, [*path.iterdir()]):
        shutil.rmtree(each, ignore_errors=True)
    new = path / f"checkpoint-{uuid.uuid4().hex}.tmp"
    number = max(_numbers(path), default=0) + 1
    try:
        new.mkdir()
        write(new)
        _finish(new)
        os.rename(new, path / f"checkpoint-{number}")
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _flush(path)
    _delete_old(path, number, keep)


def read_version(
    path: Path, read: Callable[[Path | None], Result], *, verify: bool = True
) -> Result:
    """Read the newest version in the folder ``path``; return what ``read`` returns.

    Args:
        path: the folder that was given to :func:`save_version`.
        read: called with the version's folder, or None if nothing was ever saved. Called again if a
            newer version replaced this one meanwhile.
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
            result = read(found)
        except Exception:
            if newest(path) == found:
                raise
        else:
            # Otherwise files that a version may lack could have gone before they were looked for.
            if newest(path) == found:
                return result


def newest(path: Path) -> Path | None:
    """Return the newest version in a folder; None if there is none."""
    return next(_newest_first(path), None)


def has_run(path: Path) -> bool:
    """Whether a folder has a version of a whole run."""
    return any((version / RUN).exists() for version in _newest_first(path))


def newest_whole(path: Path) -> tuple[Path | None, dict[Path, Exception]]:
    """Find the newest version of which every file has the hash that it was written with.

    Args:
        path: the folder that was given to :func:`save_version`; it need not exist.

    Returns:
        The version, None if there is none, and the damaged ones that are newer, with what is wrong
        with each.
    """
    while True:
        damaged: dict[Path, Exception] = {}
        for folder in _newest_first(path):
            try:
                _check(folder, verify=True, hashed=True)
            except (OSError, ValueError) as error:
                if not folder.exists():
                    break  # A save has just deleted it: there are newer ones.
                damaged[folder] = error
            else:
                return folder, damaged
        else:
            return None, damaged


def number_of(version: Path) -> int:
    """Return the number of a version; later versions have higher ones."""
    found = _VERSION.fullmatch(version.name)
    assert found is not None
    return int(found[1])


def is_part(path: Path) -> bool:
    """Whether a path lies in a version that is being written."""
    return any(map(_is_unfinished, path.parents))


def _is_unfinished(folder: Path) -> bool:
    """Whether a folder is a version that is being written."""
    return _UNFINISHED.fullmatch(folder.name) is not None


def _newest_first(path: Path) -> Iterator[Path]:
    """List the versions in a folder."""
    for number in sorted(_numbers(path), reverse=True):
        yield path / f"checkpoint-{number}"


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


def _check(folder: Path, verify: bool, hashed: bool = False) -> None:
    """Refuse a version with a missing or damaged file; ``hashed``: verify also files hashed beside."""
    inside(folder.parent, folder.name)
    files = read_manifest(folder / _FILES)
    for name, (size, _) in files.items():
        check_size(folder / name, size)
    for name, (_, digest) in files.items() if verify else ():
        file = folder / name
        if digest is None and hashed:
            _, digest = read_manifest(file.with_name(HASHES))[file.name]
        if digest is not None:
            check_hash(file, digest)


def _delete_old(path: Path, number: int, keep: int) -> None:
    """Delete the versions below the new one, except the last whole ones."""
    for each in _newest_first(path):
        if number_of(each) < number:
            if keep > 1 and _is_complete(each):
                keep -= 1
            else:
                shutil.rmtree(each, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    """Whether every file of a version is there, with the size that it was written with."""
    try:
        _check(folder, verify=False)
    except (OSError, ValueError):
        return False
    return True


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk; does nothing on Windows."""
    if os.name == "nt":
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
