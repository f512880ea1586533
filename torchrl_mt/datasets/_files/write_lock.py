"""One writer at a time, and files that appear whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Not POSIX: nothing keeps a second writer out.
    fcntl: Any = None  # type: ignore[no-redef]

__all__ = ["WriteLock", "delete_unfinished", "replace", "unfinished_path"]


class WriteLock:
    """Keeps other writers out of a data set, until it is released or the process ends.

    Args:
        path: the data set; the lock is the file ``.<name>.lock`` beside it.

    Raises:
        BlockingIOError: if another writer has it.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path.with_name(f".{path.name}.lock")
        self._file: int | None = None
        while fcntl is not None and self._file is None:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise BlockingIOError(
                    f"another writer has {path} open: close it first, or write elsewhere."
                ) from None
            except OSError:  # A file system without locks.
                os.close(file)
                return
            # The holder before may have deleted the file that was locked here.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(self._path)):
                    self._file = file
            if self._file is None:
                os.close(file)

    def release(self) -> None:
        """Let other writers in."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            # A forked process may have the file open, too.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None


def unfinished_path(path: Path) -> Path:
    """Return a name beside ``path`` for what is being written: ``.<name>.<id>.unfinished``."""
    path = path.absolute()
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")


def replace(new: Path, path: Path) -> None:
    """Put a file or folder in the place of another.

    It is atomic unless a folder is replaced by something else, or the other way round: if the process is
    killed just then, what was there is beside ``path`` as ``.<name>.<id>.replaced``.
    """
    path = path.absolute()
    if not path.is_dir() and not (path.exists() and new.is_dir()):
        os.replace(new, path)
        return
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.replaced")
    os.rename(path, aside)
    os.rename(new, path)
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()


def delete_unfinished(path: Path) -> None:
    """Delete what killed writers of ``path`` left beside it; the caller has the lock."""
    path = path.absolute()
    name = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{32}\.unfinished")
    for each in path.parent.iterdir():
        if name.fullmatch(each.name):
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)
