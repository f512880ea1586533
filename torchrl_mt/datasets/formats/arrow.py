"""Parquet files, for conversations: one row per episode, and one column per entry.

``datasets.load_dataset("parquet", data_files="PATH/*/*.parquet")`` or ``load_dataset(PATH)`` reads them.
A column is named after its key, joined by dots, and holds a list with one value per step; an entry ``k``
whose ``("next", k)`` is written with it has one value more, or twice as many. The other columns are

- ``length``: number of steps;
- ``metadata``: JSON;
- ``messages``: role and content of the whole dialogue, if the entry ``"text"`` holds the new messages of
  each turn. The entry itself has the exact messages, with tool calls and thoughts, as JSON: where it
  comes along, ``ConversationDataset`` reads it instead.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from torchrl_mt.checks import import_extra
from torchrl_mt.data._store.steps import Path
from torchrl_mt.datasets._encoding.arrow_columns import ArrowColumns
from torchrl_mt.datasets._encoding.schema import EpisodeSchema
from torchrl_mt.datasets._encoding.stored_columns import StoredRows, TextRows
from torchrl_mt.datasets._encoding.values import from_json_text, to_json_text
from torchrl_mt.datasets._files.episode_folder import EpisodeFolder, format_in, open_folder
from torchrl_mt.datasets._files.episode_log import LoggedWriter, read_log
from torchrl_mt.datasets._files.readers import DatasetError, EpisodicReader
from torchrl_mt.datasets._files.write_lock import unfinished_path
from torchrl_mt.datasets._files.writers import EncodedEpisode
from torchrl_mt.datasets.registry import Format, Mode
from torchrl_mt.paths import inside

__all__ = ["FORMAT"]

_NAME = "arrow"
_FILE = re.compile(r"episodes-(\d+)-(\d+)\.parquet")
_WRITTEN = re.compile(rf"{_FILE.pattern}|\.{_FILE.pattern}\.[0-9a-f]{{32}}\.unfinished")
"""Whole files, and those of writers that were killed."""
_TEXT: Path = ("text",)
_ROW_GROUP = 2**22
"""Bytes of a row group, which is read as a whole."""
_MOST_SMALL_FILES = 8


@dataclass(frozen=True)
class _File:
    """A Parquet file with the episodes ``start`` to ``end - 1``."""

    path: FilePath
    start: int
    end: int


def _files(data: FilePath) -> list[_File]:
    """List the files of a folder, without those whose episodes are all in a larger one."""
    found = []
    for each in os.scandir(data):
        match = _FILE.fullmatch(each.name)
        if match:
            found.append(_File(FilePath(each.path), int(match[1]), int(match[2])))
    chosen: list[_File] = []
    for file in sorted(found, key=lambda file: (file.start, -file.end)):
        if not chosen or file.end > chosen[-1].end:
            chosen.append(file)
    return chosen


def _columns(schema: EpisodeSchema) -> ArrowColumns:
    reserved = ("length", "metadata", "messages")
    return ArrowColumns(schema, lambda path: ".".join(path) or "entry", reserved, nested=True)


class _Reader(EpisodicReader):
    """Reads Parquet files, and the log of a writer that is at work or was killed."""

    def __init__(self, path: FilePath) -> None:
        import_extra("pyarrow", "arrow")
        header, self._data, self._list = open_folder(path)
        super().__init__(
            EpisodeSchema.from_json(header["schema"]),
            self._list.lengths,
            self._list.own_next,
            self._list.checksums,
        )
        self.identity = header["data"]
        self._columns = _columns(self.schema)
        self._find()

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        return self._list.metadata(i)

    def take(self, path: Path, episode: int, rows: np.ndarray) -> StoredRows:
        """Read rows of one episode."""
        names = tuple(self._columns.names[path])
        try:
            lists, place = self._lists(names, episode)
        except FileNotFoundError:
            # A writer has folded the log or joined files since they were listed.
            self._find()
            lists, place = self._lists(names, episode)
        return self._columns.rows(path, [_values(each, place) for each in lists], rows)

    def was_replaced(self) -> bool:
        """Whether a writer has replaced the data set."""
        return not self._data.exists()

    def close(self) -> None:
        """Close the files."""
        if self._data.exists():
            self._find()

    def _find(self) -> None:
        """List the files, and forget what was read."""
        self._files = _files(self._data)
        self._starts = [file.start for file in self._files]
        self._open = lru_cache(maxsize=16)(_open)
        self._row_group = lru_cache(maxsize=32)(self._read_row_group)
        self._log = lru_cache(maxsize=1)(read_log)

    def _lists(self, names: tuple[str, ...], episode: int) -> tuple[list[Any], int]:
        """Return the columns of these names that have an episode, and its place in them."""
        if not names:
            return [], 0
        number = bisect_right(self._starts, episode) - 1
        end = self._files[-1].end if self._files else 0
        if episode >= end:
            batches = self._log(self._data, end, len(self.lengths) - end)
            return [batches[episode - end].column(name) for name in names], 0
        file = self._files[number] if number >= 0 else None
        if file is None or episode >= file.end:
            raise DatasetError(f"{self._data} lacks the file that has the episode.")
        ends = self._open(file)[1]
        group = bisect_right(ends, episode - file.start)
        place = episode - file.start - (ends[group - 1] if group else 0)
        return self._row_group(file, group, names), place

    def _read_row_group(self, file: _File, group: int, names: tuple[str, ...]) -> list[Any]:
        import pyarrow as pa

        try:
            table = self._open(file)[0].read_row_group(group, columns=list(names))
            return [table.column(name).combine_chunks() for name in names]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DatasetError(f"{file.path} is damaged: {error}") from error


def _open(file: _File) -> tuple[Any, list[int]]:
    """Open a Parquet file; also return where each of its row groups ends."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        path = inside(file.path.parent, file.path.name)
        opened = parquet.ParquetFile(path, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{file.path} is no whole Parquet file: {error}") from error
    groups = (opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups))
    return opened, np.cumsum(list(groups)).tolist()


def _values(lists: Any, place: int) -> Any:
    """Return one value per row of an episode."""
    begin, end = lists.offsets[place].as_py(), lists.offsets[place + 1].as_py()
    return lists.values.slice(begin, end - begin)


class _Writer(LoggedWriter):
    """Writes Parquet files."""

    def __init__(self, path: FilePath, mode: Mode) -> None:
        import_extra("pyarrow", "arrow")
        super().__init__(EpisodeFolder(path, _NAME, mode), mode)

    def num_folded(self) -> int:
        """Return how many episodes the files have."""
        files = _files(self.folder.data)
        return files[-1].end if files else 0

    def batch(self, episode: EncodedEpisode) -> Any:
        """Return the row of an episode."""
        import pyarrow as pa

        row = {
            "length": pa.array([episode.length], pa.int64()),
            "metadata": pa.array([episode.metadata], pa.string()),
        }
        text = episode.columns.get(_TEXT)
        if isinstance(text, TextRows):
            kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
            row["messages"] = pa.array([[*_dialogue(text.texts)]], kind)
        for name, values in _columns(episode.schema).arrays(episode.columns).items():
            row[name] = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
        return pa.record_batch(row)

    def fold(self, first: int, batches: Sequence[Any]) -> None:
        """Write a file."""
        self._write_file(first, first + len(batches), batches)

    def tidy(self) -> None:
        """Delete what killed writers left, and join the last files where many are small."""
        files = _files(self.folder.data)
        small = []
        for file in reversed(files):
            if file.path.stat().st_size > self.fold_bytes // 2:
                break
            small.append(file)
        if len(small) > _MOST_SMALL_FILES:
            small.reverse()
            groups = (
                batch
                for file in small
                for opened in [_open(file)[0]]
                for i in range(opened.num_row_groups)
                for batch in opened.read_row_group(i).to_batches()
            )
            self._write_file(small[0].start, small[-1].end, groups)
            files = _files(self.folder.data)
        kept = {file.path.name for file in files}
        for each in os.scandir(self.folder.data):
            if each.name not in kept and _WRITTEN.fullmatch(each.name):
                os.unlink(each.path)

    def _write_file(self, start: int, end: int, batches: Any) -> None:
        """Write a file, which appears whole."""
        from pyarrow import parquet

        path = self.folder.data / f"episodes-{start:09d}-{end:09d}.parquet"
        partial = unfinished_path(path)
        tables = _in_row_groups(batches)
        first = next(tables)
        try:
            # With a dictionary, all NaNs would become one.
            with parquet.ParquetWriter(
                partial,
                first.schema,
                compression="zstd",
                use_dictionary=False,
                write_page_checksum=True,
            ) as file:
                for table in chain([first], tables):
                    file.write_table(table, row_group_size=len(table))
            os.rename(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _in_row_groups(batches: Any) -> Iterator[Any]:
    """Join batches to tables of the size of a row group."""
    import pyarrow as pa

    gathered: list[Any] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= _ROW_GROUP:
            yield pa.Table.from_batches(gathered)
            gathered, size = [], 0
    if gathered:
        yield pa.Table.from_batches(gathered)


def _dialogue(texts: Sequence[str]) -> Iterator[dict[str, str | None]]:
    """Iterate over role and content of the messages in the entry "text"."""
    for text in texts:
        messages = from_json_text(text)
        for message in messages if isinstance(messages, list) else []:
            if isinstance(message, Mapping) and isinstance(message.get("role"), str):
                content = message.get("content")
                if content is not None and not isinstance(content, str):
                    content = to_json_text(content)
                yield {"role": message["role"], "content": content}


FORMAT = Format(_NAME, _Reader, _Writer, lambda path: format_in(path) == _NAME)
