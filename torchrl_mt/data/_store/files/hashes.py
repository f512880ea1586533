"""Files that tell whether they are as they were written: a changed bit is found, and the file named.

A hash is computed as the file is written. Those of a folder's files are kept in one record, which
carries a hash of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "CHUNK",
    "MANIFEST",
    "HashedFile",
    "check_hash",
    "check_size",
    "damaged",
    "hash_of",
    "hashing",
    "read_record",
    "record_text",
]

CHUNK = 4 << 20
"""Bytes that are copied or hashed at a time."""
MANIFEST = "hashes.json"
"""The record of the files that lie beside it: their sizes and hashes."""


def hashing() -> Any:
    """What computes a hash: ``update(data)``, then ``hexdigest()``."""
    return hashlib.blake2b(digest_size=20)


class HashedFile:
    """A new file that hashes what is written to it.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "a")
        >>> with HashedFile.create(file) as new:
        ...     _ = new.write(b"some"), new.write(b"thing")
        >>> new.size, new.hash == hash_of(file)
        (9, True)
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hashing = hashing()
        self.size = 0
        """Bytes written so far."""

    @staticmethod
    @contextmanager
    def create(file: Path) -> Iterator[HashedFile]:
        """Open a file to write to."""
        with open(file, "wb") as stream:
            yield HashedFile(stream)

    @property
    def hash(self) -> str:
        """The hash of what was written so far."""
        return str(self._hashing.hexdigest())

    def write(self, data: Any) -> int:
        """Append bytes."""
        self._hashing.update(data)
        written = memoryview(data).nbytes
        self._stream.write(data)
        self.size += written
        return written

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._stream.flush()


def hash_of(file: Path) -> str:
    """The hash of a file."""
    found = hashing()
    with open(file, "rb") as stream:
        while data := stream.read(CHUNK):
            found.update(data)
    return str(found.hexdigest())


def check_size(file: Path, size: int) -> None:
    """Refuse a file of another size.

    Raises:
        FileNotFoundError: if it is missing.
        ValueError: if its size is another one.
    """
    if not file.is_file():
        raise FileNotFoundError(f"the checkpoint is damaged: {file} is missing")
    if file.stat().st_size != size:
        raise damaged(file, f"must have {size} bytes, it has {file.stat().st_size}")


def check_hash(file: Path, expected: str) -> None:
    """Refuse a file that is not as it was written.

    Raises:
        ValueError: if its hash is another one.
    """
    if hash_of(file) != expected:
        raise damaged(file)


def damaged(file: Path, how: str = "is not as it was written") -> ValueError:
    """The error that a file is damaged."""
    return ValueError(f"the checkpoint is damaged: {file} {how}; load another one")


def record_text(record: Any) -> str:
    """A record as text that carries its own hash; :func:`read_record` reads it."""
    found = hashing()
    found.update(json.dumps(record).encode())
    return json.dumps({"hash": found.hexdigest(), "record": record})


def read_record(file: Path) -> Any:
    """The record in a file.

    Raises:
        ValueError: if the file is not as it was written.
    """
    try:
        text = file.read_text(encoding="utf-8")
        record = json.loads(text)["record"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(file) from error
    if record_text(record) != text:
        raise damaged(file)
    return record
