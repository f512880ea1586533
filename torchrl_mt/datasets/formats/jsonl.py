"""JSON Lines: one file, one line per episode, for conversations.

Every line describes itself (see ``episode_lines.py``), so any tool may join, filter and shuffle lines. A
line counts when it is whole. One that is damaged is an episode that cannot be read, and those after it
keep their numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any
from zlib import crc32

import numpy as np

from torchrl_mt.data._store.steps import Steps
from torchrl_mt.datasets._encoding.growing_prompts import growing, whole_prompts, whole_schema
from torchrl_mt.datasets._encoding.schema import EpisodeSchema
from torchrl_mt.datasets._files.episode_lines import (
    checked_line,
    columns_of,
    describe,
    fields_of,
    with_crc,
)
from torchrl_mt.datasets._files.readers import DatasetError, WholeReader
from torchrl_mt.datasets._files.write_lock import replace, unfinished_path
from torchrl_mt.datasets._files.writers import EncodedEpisode, FormatWriter
from torchrl_mt.datasets.registry import Format, Mode
from torchrl_mt.json_lines import append_lines, line_of

__all__ = ["FORMAT"]

_LENGTH = re.compile(rb'\s*\{\s*"length"\s*:\s*(\d+)\s*[,}]')
"""The beginning of a line."""
_BEGIN, _END, _TAIL = b'{"length": ', b', "crc32": "', 24
"""How our lines begin, how their last entry does, and the bytes of that."""
_WHOLE = re.compile(rb', "crc32": "[0-9a-f]{8}"\}.?\Z', re.DOTALL)
_MOST_STEPS = 1 << 40


class _Reader(WholeReader):
    def __init__(self, path: FilePath) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=1 << 20)  # noqa: SIM115 - it stays open
        weakref.finalize(self, self._file.close)
        self._starts, self._sizes, lengths = _find_lines(self._file)
        super().__init__(self._first_schema(), lengths)
        self.identity = crc32(self._bytes(0)) if len(lengths) else None

    def whole(self, episode: int) -> Steps:
        """Read an episode."""
        line = self._line(episode)
        try:
            return whole_prompts(Steps(line["length"], dict(columns_of(line))))
        except Exception as error:
            raise self._damaged(episode, error) from error

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        line = self._line(i)
        tools = {"tools": line["tools"]} if "tools" in line else {}
        return {**line.get("metadata", {}), **tools}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def mend_end(self) -> None:
        """End the last line that counts, and remove what a killed writer left behind it."""
        last, end = b"\n", 0
        if len(self._starts):
            last, end = self._bytes(-1), int(self._starts[-1] + self._sizes[-1])
        with open(self.path, "rb+") as file:
            file.truncate(end)
            if not last.endswith(b"\n"):
                # If the rest is whole, its last byte is a line end that has changed.
                file.seek(end - (_parsed(last[:-1]) is not None))
                file.write(b"\n")

    def _line(self, i: int) -> dict[str, Any]:
        """Read and parse a line."""
        try:
            line = checked_line(self._bytes(i))
            if not _is_episode(line):
                raise ValueError("it has no 'length', 'steps' and 'dtypes'")
        except Exception as error:
            raise self._damaged(i, error) from error
        return dict(line)

    def _bytes(self, i: int) -> bytes:
        return os.pread(self._file.fileno(), int(self._sizes[i]), int(self._starts[i]))

    def _damaged(self, i: int, error: Exception) -> DatasetError:
        return DatasetError(
            f"{self.path}: the line of episode {i}, at byte {self._starts[i]}, is damaged: {error}"
        )

    def _first_schema(self) -> EpisodeSchema:
        """Return the schema of the first episode that can be read."""
        for i in range(len(self._starts)):
            with contextlib.suppress(DatasetError, ValueError, TypeError):
                return whole_schema(EpisodeSchema(fields_of(self._line(i))))
        if not len(self._starts):
            return EpisodeSchema({})
        error = DatasetError(f"{self.path}: no line of it is an episode of torchrl_mt.")
        first = _parsed(self._bytes(0))
        if isinstance(first, dict) and "messages" in first:
            error = DatasetError(
                f"{self.path} has conversations without the steps of episodes: read it with "
                f"torchrl_mt.datasets.ConversationDataset(path, tokenizer)."
            )
        raise error


class _Writer(FormatWriter):
    share_next = False

    def __init__(self, path: FilePath, mode: Mode) -> None:
        super().__init__(path, mode)
        adds = mode != "overwrite" and path.is_file()
        self._new = None if adds else unfinished_path(path)
        """What becomes ``path``: with the first episode, or at the end of an overwrite."""
        self._written = False
        if mode == "overwrite" and path.is_file() and _detect(path):
            _Reader(path).close()  # Lines of others are not replaced.
        if adds:
            reader = _Reader(path)
            self.schema = growing(reader.schema) if len(reader.lengths) else None
            reader.mend_end()
            reader.close()

    def write(self, episode: EncodedEpisode) -> None:
        """Append a line."""
        append_lines(self._new or self.path, [line_of(with_crc(describe(episode)))])
        self._written = True
        if self._new is not None and self.mode != "overwrite":
            self._publish(self._new)

    def close(self) -> None:
        """Put what was written in the place of what was there."""
        if self._new is not None and self._written:
            self._publish(self._new)
        self.abort()

    def abort(self) -> None:
        """Delete what was written and is not part of the data set."""
        if self._new is not None:
            self._new.unlink(missing_ok=True)

    def _publish(self, new: FilePath) -> None:
        replace(new, self.path)
        self._new = None


def _find_lines(file: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the lines of the episodes start, their bytes, and the steps of the episodes."""
    starts, sizes, lengths = array("q"), array("q"), array("q")
    at = 0
    for line in _lines(file):
        match = _LENGTH.match(line)
        # A killed writer may have left part of the last line.
        if line.endswith(b"\n") or _WHOLE.search(line[-_TAIL:]) or _parsed(line) is not None:
            if match is not None:
                length = _length({"length": int(match[1])})
            elif line.isspace():
                length = -1
            else:
                length = _length(_parsed(line))
            if length >= 0:
                starts.append(at)
                sizes.append(len(line))
                lengths.append(length)
        at += len(line)
    return np.array(starts), np.array(sizes), np.array(lengths, dtype=np.int64)


def _lines(file: Any) -> Iterator[bytes]:
    """Iterate over the lines of a file; also where a line end, or a byte to one, has changed."""
    before = b""
    for line in file:
        if before and not line.startswith(_BEGIN) and line.strip() and _parsed(before) is None:
            before += line
            continue
        if before:
            yield before
        before = b""
        if line.count(_END) > 1:
            *whole, line = re.split(rb'(?<="\}).(?=\{"length": )', line, flags=re.DOTALL)
            yield from (each + b"\n" for each in whole)
        if line.startswith(_BEGIN) and not _WHOLE.search(line[-_TAIL:]):
            before = line  # Its end may follow.
        else:
            yield line
    if before:
        yield before


def _parsed(line: bytes) -> Any:
    """Parse a line; None if it is damaged."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _length(line: Any) -> int:
    """Return the steps of an episode; 0 for a line that is none, so that it has no clips."""
    length = line.get("length") if isinstance(line, dict) else None
    return length if isinstance(length, int) and 0 < length < _MOST_STEPS else 0


def _is_episode(line: Any) -> bool:
    return (
        isinstance(line, dict)
        and isinstance(line.get("length"), int)
        and isinstance(line.get("steps"), dict)
        and isinstance(line.get("dtypes"), dict)
        and isinstance(line.get("metadata", {}), dict)
    )


def _detect(path: FilePath) -> bool:
    try:
        with open(path, "rb") as file:
            return _LENGTH.match(file.read(1000)) is not None or path.suffix.lower() == ".jsonl"
    except OSError:
        return path.suffix.lower() == ".jsonl" and not path.exists()


FORMAT = Format("jsonl", _Reader, _Writer, _detect)
