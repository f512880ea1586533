"""Lance, a column store, for clips: one row per step, and one column per entry.

``lance.dataset(PATH)`` reads it. A column is named after its key, joined by underscores, with a list of
numbers per row. The other columns are ``episode``, ``step`` and ``length``, the steps of the episode.
An entry ``k`` whose ``("next", k)`` is written with it has one row more per episode, or twice as many:
the filter ``step < length`` leaves those out, in which the other columns are zero or empty.

Beside Lance's own files, a folder has the list of episodes and those that are in no Lance file yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from torchrl_mt.checks import import_extra
from torchrl_mt.datasets import DatasetError
from torchrl_mt.datasets.format_parts import (
    ArrowColumns,
    Column,
    DenseRows,
    EncodedEpisode,
    EpisodeFolder,
    EpisodeList,
    EpisodeSchema,
    Format,
    FormatReader,
    LoggedWriter,
    Mode,
    Path,
    RaggedRows,
    Runs,
    Steps,
    StoredRows,
    TextRows,
    checked_header,
    decode,
    has_log,
    read_log,
    runs_of,
)
from torchrl_mt.paths import inside

__all__ = ["FORMAT"]

_NAME = "lance"
_HEADER = b"torchrl_mt"
"""Key of the header in the metadata of the Arrow schema, which Lance replaces with the data."""
_VERSIONS = "_versions"
_MOST_SMALL_FRAGMENTS = 8


def _columns(schema: EpisodeSchema) -> ArrowColumns:
    def name(path: Path) -> str:
        # Dots would name parts of structures; what begins with an underscore is Lance's.
        return re.sub(r"\W", "_", "_".join(path)).lstrip("_") or "entry"

    return ArrowColumns(schema, name, ("episode", "step", "length"), nested=False)


def _num_rows(schema: EpisodeSchema, lengths: np.ndarray, own_next: np.ndarray) -> np.ndarray:
    """Return how many rows each episode has: int64 ``[E]``."""
    if not schema.shared:
        return lengths
    return lengths + np.where(own_next != 0, lengths, 1)


_process: int | None = None
"""The process that uses Lance; its forks must not."""


def _lance() -> Any:
    """Import Lance.

    Raises:
        RuntimeError: in a fork of a process that has used it: Lance crashes or hangs there.
    """
    global _process
    import_extra("pyarrow", "lance")
    lance = import_extra("lance", "lance")
    if _process not in (None, os.getpid()):
        raise RuntimeError(
            "Lance does not work in a fork of a process that has used it: start processes by "
            "'forkserver' or 'spawn', such as DataLoader(..., multiprocessing_context='forkserver')."
        )
    _process = os.getpid()
    return lance


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise a panic of Lance (of damaged files), which is no ``Exception``, as an error."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error


@_panics_as_errors()
def _open(path: FilePath) -> tuple[Any, dict[str, Any] | None]:
    """Open a Lance data set, and read its header; None if another program wrote it."""
    for each in (path / _VERSIONS).iterdir():
        inside(path, each.relative_to(path))
    data = _lance().dataset(str(path))
    for fragment in data.get_fragments():
        for file in fragment.data_files():
            inside(path, f"data/{file.path}")
            if getattr(file, "base_id", None) is not None:
                raise DatasetError(f"{path} has its files elsewhere, which are not read: copy it.")
    text = (data.schema.metadata or {}).get(_HEADER)
    return data, None if text is None else checked_header(path, json.loads(text))


def _num_folded(data: Any, ends: np.ndarray) -> int:
    """Return how many episodes are in the rows of a Lance data set.

    Args:
        data: the ``LanceDataset``.
        ends: int64 ``[E]``, where the rows of each episode end.
    """
    rows = data.count_rows()
    count = int(np.searchsorted(ends, rows, side="right"))
    if rows != (ends[count - 1] if count else 0):
        raise DatasetError(
            f"{data.uri} has {rows} rows, which are no whole episodes: another program added or "
            f"deleted some. Restore an earlier version with Lance."
        )
    return count


class _Reader(FormatReader):
    """Reads Lance, and the log of a writer that is at work or was killed."""

    def __init__(self, path: FilePath) -> None:
        self._path = path
        header = self._open()
        schema = EpisodeSchema.from_json(header["schema"])
        episodes = self._list
        super().__init__(schema, episodes.lengths, episodes.own_next, episodes.checksums)
        self.identity = header["data"]
        self._columns = _columns(schema)
        self._first = self._ends - _num_rows(schema, self.lengths, self.own_next)

    def _open(self) -> dict[str, Any]:
        """Open the files; return the header. Those of a data set that replaced this one are refused."""
        header: dict[str, Any] = {}
        for last in (False, False, True):
            lance, found = _open(self._path)
            if found is None:
                raise DatasetError(
                    f"{self._path} is a Lance data set of another program: it says nothing about "
                    f"episodes. Read it with Lance, and write its episodes with open_episodes."
                )
            header = found
            if self.identity not in (None, header["data"]):
                raise DatasetError(f"{self._path} was replaced since it was opened: open it again.")
            self._lance, self._data = lance, inside(self._path, header["data"])
            with contextlib.nullcontext() if last else contextlib.suppress(FileNotFoundError):
                self._list = EpisodeList(self._data, header)
                schema = EpisodeSchema.from_json(header["schema"])
                rows = _num_rows(schema, self._list.lengths, self._list.own_next)
                self._ends = rows.cumsum()
                self._folded = _num_folded(self._lance, self._ends)
                self._logged = lru_cache(maxsize=1)(self._read_log)
                # A writer may have folded the log since the Lance data set was opened.
                if self._folded == len(rows) or has_log(self._data, self._folded):
                    break
        return header

    def _read_log(self) -> Any:
        """Read the episodes that are not in Lance's files."""
        return _table(read_log(self._data, self._folded, len(self._ends) - self._folded))

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        return self._list.metadata(i)

    def read(self, runs: Runs, paths: Sequence[Path]) -> Steps:
        """Read these entries of steps, all at once."""
        places = {path: self.place(path, runs) for path in paths}
        different = {rows.starts.tobytes(): rows for _, rows in places.values()}
        every = [
            runs_of(self._first[rows.episodes] + rows.starts, rows.counts, rows.stride)
            for rows in different.values()
        ]
        taken, inverse = np.unique(np.concatenate(every), return_inverse=True)
        index = dict(zip(different, inverse.reshape(len(every), -1), strict=True))

        names = {name: None for of, _ in places.values() for name in self._columns.names[of]}
        arrays = self._take(taken, [*names])
        columns: dict[Path, Column] = {}
        for path, (of, rows) in places.items():
            self.verify(of, rows)
            own = [arrays[name] for name in self._columns.names[of]]
            part = self._columns.rows(of, own, index[rows.starts.tobytes()])
            columns[path] = decode(self.schema.fields[path], part)
        return Steps(len(runs), columns)

    def stored(self, path: Path, rows: Runs) -> StoredRows:
        """Read rows of an entry that is not shared."""
        every = runs_of(self._first[rows.episodes] + rows.starts, rows.counts, rows.stride)
        taken, index = np.unique(every, return_inverse=True)
        arrays = self._take(taken, self._columns.names[path])
        return self._columns.rows(path, [*arrays.values()], index.reshape(-1))

    def was_replaced(self) -> bool:
        """Whether a writer has replaced the data set."""
        return not self._data.exists()

    def _take(self, rows: np.ndarray, names: list[str]) -> dict[str, Any]:
        """Read rows, which are sorted, as one array per column."""
        if not names:
            return {}
        try:
            return self._taken(rows, names)
        except Exception:
            # A writer may have joined the files since they were opened.
            version = self._lance.version
            self._open()
            if self._lance.version == version:
                raise
            return self._taken(rows, names)

    @_panics_as_errors()
    def _taken(self, rows: np.ndarray, names: list[str]) -> dict[str, Any]:
        import pyarrow as pa

        end = self._ends[self._folded - 1] if self._folded else 0
        inside = rows[: np.searchsorted(rows, end)]
        parts = []
        if len(inside):
            if len(inside) == inside[-1] - inside[0] + 1:
                begin, count = int(inside[0]), len(inside)
                parts.append(self._lance.to_table(columns=names, offset=begin, limit=count))
            else:
                parts.append(self._lance.take(inside, columns=names))
        if len(inside) < len(rows):
            parts.append(self._logged().select(names).take(rows[len(inside) :] - end))
        chunks = {name: [c for part in parts for c in part.column(name).chunks] for name in names}
        return {
            name: found[0] if len(found) == 1 else pa.concat_arrays(found)
            for name, found in chunks.items()
        }


def _table(batches: Sequence[Any]) -> Any:
    """Join batches to one table of one chunk."""
    import pyarrow as pa

    return pa.Table.from_batches(batches).combine_chunks()


class _Folder(EpisodeFolder):
    """A Lance data set with a list of episodes in it."""

    def __init__(self, path: FilePath, mode: Mode) -> None:
        self.fragments: list[Any] = []
        """What an ``overwrite`` has written and not committed."""
        self.arrow_schema: Any = None
        """That of the rows; None before the first episode."""
        super().__init__(path, _NAME, mode)

    def read_header(self) -> dict[str, Any] | None:
        """Read the header of what is there; None if there is no data set of ours."""
        return _open(self.path)[1] if (self.path / _VERSIONS).is_dir() else None

    def write_header(self, folder: FilePath) -> None:
        """Make a new version of the Lance data set, which has the new fragments only."""
        lance = _lance()
        schema = self.arrow_schema.with_metadata({_HEADER: json.dumps(self.header).encode()})
        operation = lance.LanceOperation.Overwrite(schema, self.fragments)
        lance.LanceDataset.commit(str(folder), operation)

    def write_count(self) -> None:
        """Lance counts its rows."""


class _Writer(LoggedWriter):
    """Writes Lance."""

    folder: _Folder

    def __init__(self, path: FilePath, mode: Mode) -> None:
        _lance()
        for each in path.rglob("*"):
            inside(path, each.relative_to(path), to_write=True)
        super().__init__(_Folder(path, mode), mode)

    def num_folded(self) -> int:
        """Return how many episodes Lance has."""
        episodes = EpisodeList(self.folder.data, self.folder.header)
        assert self.schema is not None
        rows = _num_rows(self.schema, episodes.lengths, episodes.own_next)
        return _num_folded(_open(self.folder.path)[0], rows.cumsum())

    def batch(self, episode: EncodedEpisode) -> Any:
        """Return the rows of an episode."""
        import pyarrow as pa

        size = max(map(len, episode.columns.values()))
        padded = {path: _padded(stored, size) for path, stored in episode.columns.items()}
        batch = pa.record_batch(
            {
                "episode": pa.array(np.full(size, self.folder.num_episodes)),
                "step": pa.array(np.arange(size)),
                "length": pa.array(np.full(size, episode.length)),
                **_columns(episode.schema).arrays(padded),
            }
        )
        self.folder.arrow_schema = batch.schema
        return batch

    def fold(self, first: int, batches: Sequence[Any]) -> None:
        """Write a fragment."""
        lance = _lance()
        replaces = self.mode == "overwrite"
        root = str(self.folder.root)
        fragments = lance.fragment.write_fragments(
            _table(batches),
            root,
            schema=batches[0].schema,
            mode="overwrite" if replaces else "append",
        )
        if replaces:
            self.folder.fragments += fragments
        else:
            version = lance.dataset(root).version
            operation = lance.LanceOperation.Append(fragments)
            lance.LanceDataset.commit(root, operation, read_version=version)

    def tidy(self) -> None:
        """Join fragments where many are small, and delete what no version needs."""
        data = _open(self.folder.path)[0]
        sizes = [
            (
                fragment.physical_rows,
                sum(file.file_size_bytes or 0 for file in fragment.data_files()),
            )
            for fragment in data.get_fragments()
        ]
        most = self.fold_bytes // 2
        small = [(rows, size) for rows, size in sizes if size <= most]
        if len(small) > _MOST_SMALL_FRAGMENTS:
            rows, size = map(sum, zip(*small, strict=True))
            data.optimize.compact_files(
                target_rows_per_fragment=max(1, rows * most // max(size, 1))
            )
        data.cleanup_old_versions(
            timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
        )

    def abort(self) -> None:
        """Give up an ``overwrite``."""
        super().abort()
        for fragment in self.folder.fragments:
            for file in fragment.files:
                (self.folder.path / "data" / file.path).unlink(missing_ok=True)


def _padded(stored: StoredRows, size: int) -> StoredRows:
    """Append rows of zeros, or empty ones, up to ``size`` rows."""
    more = size - len(stored)
    if not more:
        return stored
    if isinstance(stored, TextRows):
        return TextRows(stored.texts + ["null"] * more)
    if isinstance(stored, DenseRows):
        zeros = np.zeros((more, *stored.values.shape[1:]), stored.values.dtype)
        return DenseRows(np.concatenate([stored.values, zeros]))
    shapes = np.zeros((more, stored.shapes.shape[1]), np.int64)
    zeros = np.zeros(int(shapes.prod(1).sum()), stored.values.dtype)
    return RaggedRows(
        np.concatenate([stored.values, zeros]), np.concatenate([stored.shapes, shapes])
    )


def _detect(path: FilePath) -> bool:
    return (path / _VERSIONS).is_dir() if path.exists() else path.suffix.lower() == ".lance"


FORMAT = Format(_NAME, _Reader, _Writer, _detect)
