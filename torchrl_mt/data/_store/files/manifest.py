"""Manifests: sizes and hashes of files, to find damaged ones. A manifest has a hash of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_mt.paths import inside

__all__ = [
    "CHUNK",
    "HASHES",
    "HashedFiles",
    "check_hash",
    "check_size",
    "damaged",
    "hash_of",
    "hashing",
    "read_manifest",
    "write_manifest",
]

CHUNK = 4 << 20
"""Bytes that are copied or hashed at a time."""
HASHES = "hashes.json"
"""Name of the manifest of files that were hashed as they were written; it lies beside them."""


def hashing() -> Any:
    """Create a hash object: ``update(data)``, then ``hexdigest()``."""
    return hashlib.blake2b(digest_size=20)


class HashedFiles:
    """Creates files in a folder and hashes them as they are written.

    Args:
        folder: the folder.

    Examples:
        >>> import tempfile
        >>> files = HashedFiles(Path(tempfile.mkdtemp()))
        >>> with files.create("a") as file:
        ...     _ = file.write(b"some"), file.write(b"thing")
        >>> files.sizes_and_hashes["a"] == (9, hash_of(files.folder / "a"))
        True
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes_and_hashes: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Open a file to write to."""
        with open(self.folder / name, "wb") as stream:
            file = _HashedFile(stream)
            yield file
            self.sizes_and_hashes[name] = stream.tell(), file.hash.hexdigest()


class _HashedFile:
    """A binary file that hashes what is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.flush = stream.flush
        self.hash = hashing()

    def write(self, data: Any) -> int:
        """Append bytes."""
        self.hash.update(data)
        return int(self._stream.write(data))


def hash_of(file: Path) -> str:
    """Compute the hash of a file."""
    found = hashing()
    with open(file, "rb") as stream:
        while data := stream.read(CHUNK):
            found.update(data)
    return str(found.hexdigest())


def check_size(file: Path, size: int) -> None:
    """Refuse a file that is missing (``FileNotFoundError``) or of another size (``ValueError``)."""
    if not file.is_file():
        raise FileNotFoundError(f"the checkpoint is damaged: {file} is missing; load another one.")
    if file.stat().st_size != size:
        raise damaged(file, f"must have {size} bytes, it has {file.stat().st_size}")


def check_hash(file: Path, expected: str) -> None:
    """Refuse a file that has another hash (``ValueError``)."""
    if hash_of(file) != expected:
        raise damaged(file)


def damaged(file: Path, how: str = "is not as it was written") -> ValueError:
    """Create the error for a damaged file."""
    return ValueError(f"the checkpoint is damaged: {file} {how}; load another one.")


def write_manifest(file: Path, files: Mapping[str, tuple[int, str | None]]) -> None:
    """Write sizes and hashes of files by name; a hash is None if another manifest has it."""
    file.write_text(_text(files), encoding="utf-8")


def read_manifest(file: Path) -> dict[str, tuple[int, str | None]]:
    """Read what :func:`write_manifest` wrote.

    Raises:
        ValueError: if the manifest is damaged, or names what lies outside its folder.
    """
    try:
        text = inside(file.parent, file.name).read_text(encoding="utf-8")
        files = json.loads(text)["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(file) from error
    if _text(files) != text:
        raise damaged(file)
    for name in files:
        inside(file.parent, name)
    return {name: (size, digest) for name, (size, digest) in files.items()}


def _text(files: Any) -> str:
    """Format a manifest."""
    found = hashing()
    found.update(json.dumps(files).encode())
    return json.dumps({"hash": found.hexdigest(), "files": files})
