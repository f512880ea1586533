"""Files and folders that a folder's own files name, which lie in it, and files that appear whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePath
from uuid import uuid4

__all__ = ["inside", "replace_file"]


def inside(folder: Path, name: str | PurePath, *, to_write: bool = False) -> Path:
    """Return ``folder / name``, a file or folder that lies in ``folder``; it need not exist.

    Links may lead from one place of the folder to another, and from a snapshot of the Hugging Face hub
    to its blobs. The folder itself is the caller's, and may be a link.

    Args:
        folder: the folder.
        name: what a file in it says.
        to_write: whether to refuse every link: what is written or removed through one lies elsewhere.

    Raises:
        ValueError: if it lies elsewhere, or is neither a file nor a folder (a pipe would block).

    Examples:
        >>> inside(Path("/data"), "a/b.npy")
        PosixPath('/data/a/b.npy')
        >>> inside(Path("/data"), "../home")
        Traceback (most recent call last):
            ...
        ValueError: /data names '../home', which lies outside: it is damaged or not to be trusted.
    """
    path, parts = folder, PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts or "\0" in str(name):
        raise ValueError(
            f"{folder} names {str(name)!r}, which lies outside: it is damaged or not to be trusted."
        )
    kind = stat.S_IFREG
    for part in parts:
        path = path / part
        try:
            kind = stat.S_IFMT(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return folder.joinpath(*parts)
        if kind == stat.S_IFLNK and (to_write or not _leads_inside(folder, path)):
            raise ValueError(
                f"{path} is a link{' out of its folder' * (not to_write)}, which is not followed: put "
                f"a copy of the files in its place."
            )
    if kind == stat.S_IFLNK:
        kind = stat.S_IFMT(os.stat(path).st_mode) if path.exists() else stat.S_IFREG
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise ValueError(f"{path} is neither a file nor a folder: remove it.")
    return path


def replace_file(path: Path, content: bytes) -> Path:
    """Write a file; an error leaves what was there. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _leads_inside(folder: Path, link: Path) -> bool:
    """Whether a link in a folder leads into it, or into the blobs that belong to it."""
    root, target = folder.resolve(), link.resolve()
    snapshot = next(
        (each for each in (root, *root.parents) if each.parent.name == "snapshots"), None
    )
    blobs = [] if snapshot is None else [snapshot.parent.parent / "blobs"]
    return any(target.is_relative_to(each) for each in (root, *blobs))
