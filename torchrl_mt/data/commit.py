"""Contents of a folder that are replaced as one: the old or the new ones are there, and whole.

However the writer ends, and at whatever moment. Every version is a subfolder of its own; one small
file, replaced atomically, names the one that counts. Nothing else in the folder is touched.
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["POINTER", "commit", "committed"]

POINTER = "checkpoint.json"
"""The file that names the subfolder that counts, and the sizes of the files in it."""
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
            sizes = _flush_all(folder)
            pointer = folder / POINTER
            pointer.write_text(json.dumps({"folder": folder.name, "files": sizes}))
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
def committed(path: Path) -> Iterator[Path | None]:
    """The folder with what is committed in ``path``, which stays as long as the context.

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
        name, sizes = _read_pointer(path)
        for file, size in sizes.items():
            found = path / name / file
            if not found.exists():
                raise FileNotFoundError(f"the checkpoint in {path} is damaged: {found} is missing")
            if found.stat().st_size != size:
                raise ValueError(
                    f"the checkpoint in {path} is damaged: {found} must have {size} bytes, it has "
                    f"{found.stat().st_size}"
                )
        yield path / name


def _read_pointer(path: Path) -> tuple[str, dict[str, int]]:
    """The subfolder that counts, and the sizes of the files in it."""
    try:
        record = json.loads((path / POINTER).read_text())
        return str(record["folder"]), dict(record["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / POINTER} does not name a checkpoint: it is damaged") from error


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


def _flush_all(folder: Path) -> dict[str, int]:
    """Flush a folder with all that is in it; the size of each file, by its path in the folder."""
    sizes: dict[str, int] = {}
    for where, _, files in os.walk(folder, topdown=False):
        for each in sorted(files):
            file = Path(where, each)
            _flush(file)
            sizes[file.relative_to(folder).as_posix()] = file.stat().st_size
        _flush(Path(where))
    return sizes


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file or folder, where the system can do that."""
    if os.name == "nt":
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
