"""Contents of a folder that are replaced as one: the old or the new ones are there, and whole.

However the writer ends, and at whatever moment. Every version is a subfolder of its own; one small
file, replaced atomically, names the one that counts and tells the hash of every file in it. Nothing
else in the folder is touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchrl_mt.data._store.files.hashes import (
    MANIFEST,
    check_hash,
    check_size,
    damaged,
    hash_of,
    read_record,
    record_text,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["POINTER", "commit", "committed"]

POINTER = "checkpoint.json"
"""The file that names the subfolder that counts, and the sizes and hashes of the files in it."""
_VERSION = re.compile(r"checkpoint-[0-9a-f]{32}")


def commit(path: Path, write: Callable[[Path], None]) -> None:
    """Replace what is committed in the folder ``path``.

    Several processes and threads may commit to one folder at once: the last to finish counts.
    Versions that do not count any more, and those of writers that were killed, are deleted as soon
    as nobody else reads or writes in ``path``. Where the file system has no ``flock``, only one
    may be at work at a time.

    Args:
        path: the folder; made if it does not exist.
        write: called with an empty folder to write to. If it fails, nothing has changed.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> commit(path, lambda folder: (folder / "a.txt").write_text("first") and None)
        >>> with committed(path) as folder:
        ...     (folder / "a.txt").read_text()
        'first'
    """
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        _flush(path.parent)
    with _in_use(path) as alone:
        folder = path / f"checkpoint-{uuid.uuid4().hex}"
        try:
            folder.mkdir()
            write(folder)
            files = _flush_all(folder)
            pointer = folder / POINTER
            pointer.write_text(record_text({"folder": folder.name, "files": files}))
            _flush(pointer)
            _flush(path)
            os.replace(pointer, path / POINTER)
        except BaseException:
            if _current(path) != folder.name:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        _flush(path)
        if alone():
            _sweep(path)


@contextmanager
def committed(path: Path, *, verify: bool = True) -> Iterator[Path | None]:
    """The folder with what is committed in ``path``, which stays as long as the context.

    Args:
        path: the folder that was given to :func:`commit`.
        verify: read the files to see whether one is damaged, but for those that a ``hashes.json``
            beside them has the hashes of: who reads them compares these. Sizes are compared anyway.

    Yields:
        the folder; None if nothing was ever committed.

    Raises:
        FileNotFoundError: if there is no folder ``path``, or a file of the checkpoint is missing.
        ValueError: if a file of the checkpoint is damaged.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint: there is no folder {path}")
    with _in_use(path):
        if not (path / POINTER).exists():
            yield None
            return
        name, files = _read_pointer(path)
        for file, (size, _) in files.items():
            check_size(path / name / file, size)
        for file, (_, digest) in files.items() if verify else ():
            if digest is not None:
                check_hash(path / name / file, digest)
        yield path / name


def _read_pointer(path: Path) -> tuple[str, dict[str, tuple[int, str | None]]]:
    """The subfolder that counts, and the size of each file in it and its hash, if that is known."""
    file = path / POINTER
    try:
        record = read_record(file)
    except ValueError:
        record = _without_hashes(file)
    return str(record["folder"]), {name: tuple(noted) for name, noted in record["files"].items()}


def _without_hashes(file: Path) -> Any:
    """The record of an earlier version: it has sizes only, and no hash of its own."""
    with suppress(ValueError, TypeError, AttributeError):
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.keys() == {"folder", "files"}:
            return {**record, "files": {name: (n, None) for name, n in record["files"].items()}}
    raise damaged(file)


def _current(path: Path) -> str | None:
    """The subfolder that counts, if there is one."""
    with suppress(FileNotFoundError, ValueError):
        return _read_pointer(path)[0]
    return None


def _sweep(path: Path) -> None:
    """Delete the versions that do not count."""
    current = _current(path)
    for each in path.iterdir():
        if each.name != current and _VERSION.fullmatch(each.name) and each.is_dir():
            shutil.rmtree(each, ignore_errors=True)


@contextmanager
def _in_use(path: Path) -> Iterator[Callable[[], bool]]:
    """Keep others from deleting versions in ``path``.

    The system gives the lock up when the process ends, however it does.

    Yields:
        what asks whether nobody else uses ``path``, and then keeps others out. It is the last
        thing to do: if there is somebody, versions are not kept any more.
    """
    if fcntl is None:
        yield lambda: True
        return
    folder = os.open(path, os.O_RDONLY)

    def lock(how: int) -> bool:
        try:
            fcntl.flock(folder, how)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    try:
        lock(fcntl.LOCK_SH)
        yield lambda: lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        # A process forked meanwhile has the file open too: closing it here would not unlock it.
        lock(fcntl.LOCK_UN)
        os.close(folder)


def _flush_all(folder: Path) -> dict[str, tuple[int, str | None]]:
    """Flush a folder with all that is in it.

    Returns:
        the size of each file, by its path in the folder, and its hash, or None where a manifest
        beside the file has it: what is large was hashed as it was written.
    """
    found: dict[str, tuple[int, str | None]] = {}
    for where, _, files in os.walk(folder, topdown=False):
        known = read_record(Path(where, MANIFEST))["files"] if MANIFEST in files else {}
        for each in sorted(files):
            file = Path(where, each)
            _flush(file)
            digest = None if each in known else hash_of(file)
            found[file.relative_to(folder).as_posix()] = file.stat().st_size, digest
        _flush(Path(where))
    return found


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file or folder, where the system can do that."""
    if os.name == "nt":
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
