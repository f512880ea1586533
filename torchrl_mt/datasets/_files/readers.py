"""What reads a format: any steps of any episodes, column by column.

A format either numbers the rows of all its episodes (:class:`FlatReader`) or keeps each episode apart
(:class:`EpisodicReader`). Both need one method, which reads rows of one entry. Where an episode can
only be read as a whole, :class:`WholeReader` needs one method that does so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from torchrl_mt.data._store.ring import within
from torchrl_mt.data._store.steps import Column, Objects, Path, Rows, Steps, name_of
from torchrl_mt.datasets._encoding.schema import EpisodeSchema
from torchrl_mt.datasets._encoding.stored_columns import (
    DenseRows,
    RaggedRows,
    StoredRows,
    TextRows,
    decode,
)
from torchrl_mt.datasets._files.checksums import Checksums, block_rows, crcs_of_parts

__all__ = [
    "DatasetError",
    "EpisodicReader",
    "FlatReader",
    "FormatReader",
    "Runs",
    "WholeReader",
    "check_version",
    "joined",
    "runs_of",
]


class DatasetError(ValueError):
    """A data set, or an episode of it, that cannot be read."""


def check_version(path: FilePath, version: int, newest: int) -> None:
    """Refuse a data set of a layout that this package does not know yet (``DatasetError``)."""
    if version > newest:
        raise DatasetError(
            f"{path} was written by a newer torchrl_mt (version {version} of its layout, this one "
            f"reads {newest}): upgrade torchrl_mt."
        )


@dataclass(frozen=True)
class Runs:
    """Steps to read: ``n`` runs, each of steps of one episode.

    Run ``i`` is the steps ``starts[i]``, ``starts[i] + stride``, ... of ``episodes[i]``, ``counts[i]``
    of them.
    """

    episodes: np.ndarray
    """int64 ``[n]``: numbers of the episodes."""
    starts: np.ndarray
    """int64 ``[n]``: first steps within their episodes."""
    counts: np.ndarray
    """int64 ``[n]``: steps of each run."""
    stride: int = 1

    @staticmethod
    def whole(episode: int, length: int) -> Runs:
        """Return all steps of one episode."""
        return Runs(np.array([episode]), np.array([0]), np.array([length]))

    def __len__(self) -> int:
        return int(self.counts.sum())


def runs_of(first: np.ndarray, counts: np.ndarray, stride: int) -> np.ndarray:
    """Return every row of runs, ``first[i] + stride * j`` for ``j < counts[i]``: int64 ``[N]``.

    Examples:
        >>> runs_of(np.array([0, 7]), np.array([2, 3]), 2)
        array([ 0,  2,  7,  9, 11])
    """
    return within(counts) * stride + np.repeat(first, counts)


@dataclass
class _Blocks:
    """The blocks of rows of an entry that have a checksum each."""

    size: int
    """Rows of a block; the last one of an episode may have fewer."""
    first: np.ndarray
    """int64 ``[E]``: number of the first block of each episode."""
    crcs: np.ndarray
    done: np.ndarray
    """Whether the checksum was compared."""
    left: int
    """How many were not."""


class FormatReader(ABC):
    """A data set of one format, open for reading.

    Args:
        schema: its entries.
        lengths: int64 ``[E]``, steps of each episode.
        own_next: int64 ``[E]``, what :meth:`EpisodeSchema.disagreeing` returned for each; None if no
            entry is shared.
        checksums: those of all blocks of rows (:func:`crcs_of`); None if there are none.
    """

    identity: Any = None
    """Tells the data set from one that replaces it at the same path, as far as the format can."""

    def __init__(
        self,
        schema: EpisodeSchema,
        lengths: np.ndarray,
        own_next: np.ndarray | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        self.schema = schema
        self.lengths = lengths
        self.own_next = np.zeros_like(lengths) if own_next is None else own_next
        self.checksums = checksums
        self._blocks: dict[Path, _Blocks] = {}

    def read(self, runs: Runs, paths: Sequence[Path]) -> Steps:
        """Read these entries of steps."""
        return Steps(len(runs), {path: self.column(path, runs) for path in paths})

    def column(self, path: Path, runs: Runs) -> Column:
        """Read one entry of the steps."""
        of, rows = self.place(path, runs)
        self.verify(of, rows)
        return decode(self.schema.fields[path], self.stored(of, rows))

    def place(self, path: Path, runs: Runs) -> tuple[Path, Runs]:
        """Return the entry whose rows have these steps of an entry, and which of its rows."""
        if not self.schema.fields[path].shared:
            return path, runs
        own = self.own_next[runs.episodes] >> self.schema.shared.index(path) & 1
        # What follows step t is row t + 1 of k, or row T + t where the two disagree.
        ahead = np.where(own, self.lengths[runs.episodes], 1)
        return path[1:], replace(runs, starts=runs.starts + ahead)

    def verify(self, path: Path, rows: Runs) -> None:
        """Compare the checksums of the blocks that have these rows, where that was not yet done.

        Raises:
            DatasetError: if one is not as it was written.
        """
        if self.checksums is None:
            return
        blocks = self._blocks.get(path) or self._blocks_of(self.checksums)[path]
        if not blocks.left:
            return
        begin = rows.starts // blocks.size
        last = (rows.starts + np.maximum(rows.counts - 1, 0) * rows.stride) // blocks.size
        touched = runs_of(blocks.first[rows.episodes] + begin, last - begin + 1, 1)
        new = np.unique(touched[~blocks.done[touched]])
        if not len(new):
            return
        episodes = np.searchsorted(blocks.first, new, side="right") - 1
        starts = (new - blocks.first[episodes]) * blocks.size
        counts = np.minimum(blocks.size, self.rows_of(path)[episodes] - starts)
        found = crcs_of_parts(self.stored(path, Runs(episodes, starts, counts)), counts.tolist())
        wrong = episodes[np.array(found, np.uint32) != blocks.crcs[new]].tolist()
        if wrong:
            raise DatasetError(
                f"{name_of(path)} of episode {wrong[0]} is not as it was written: a file is damaged"
            )
        blocks.done[new] = True
        blocks.left -= len(new)

    def _blocks_of(self, checksums: Checksums) -> dict[Path, _Blocks]:
        """Find the blocks of every entry."""
        begin = checksums.starts
        for path, field in self.schema.fields.items():
            if not field.shared:
                size = block_rows(field)
                counts = -(-self.rows_of(path) // size)
                crcs = checksums.values[runs_of(begin, counts, 1)]
                done = np.zeros(len(crcs), bool)
                first = counts.cumsum() - counts
                self._blocks[path] = _Blocks(size, first, crcs, done, len(crcs))
                begin = begin + counts
        return self._blocks

    def was_replaced(self) -> bool:
        """Whether it is known that a writer has replaced the data set."""
        return False

    def rows_of(self, path: Path) -> np.ndarray:
        """Return how many rows each episode has of an entry that is not shared: int64 ``[E]``."""
        following = ("next", *path)
        if following not in self.schema.shared:
            return self.lengths
        own = self.own_next >> self.schema.shared.index(following) & 1
        return self.lengths + np.where(own, self.lengths, 1)

    @abstractmethod
    def stored(self, path: Path, rows: Runs) -> StoredRows:
        """Read rows of an entry that is not shared; ``rows`` counts them within each episode.

        The arrays are writable and nobody else's.

        Raises:
            DatasetError: if they cannot be read; names the file.
        """

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode: none, unless the format has some."""
        return {}

    def close(self) -> None:  # noqa: B027 - a format may have nothing to close
        """Close the files."""


class FlatReader(FormatReader):
    """A format that numbers the rows of an entry through all episodes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_rows: dict[Path, np.ndarray] = {}

    def stored(self, path: Path, rows: Runs) -> StoredRows:
        """Read rows of an entry, found by the number of each episode's first row."""
        if path not in self._first_rows:
            sizes = self.rows_of(path)
            self._first_rows[path] = sizes.cumsum() - sizes
        first = self._first_rows[path][rows.episodes] + rows.starts
        return self.take(path, first, rows.counts, rows.stride)

    @abstractmethod
    def take(self, path: Path, first: np.ndarray, counts: np.ndarray, stride: int) -> StoredRows:
        """Read the rows ``first[i] + stride * j`` for ``j < counts[i]``, run after run.

        Args:
            path: the entry.
            first: int64 ``[n]``.
            counts: int64 ``[n]``.
            stride: at least 1.
        """


class EpisodicReader(FormatReader):
    """A format that keeps the rows of each episode apart."""

    def stored(self, path: Path, rows: Runs) -> StoredRows:
        """Read rows of an entry, episode by episode."""
        parts = []
        for episode, start, count in zip(rows.episodes, rows.starts, rows.counts, strict=True):
            wanted = np.arange(count) * rows.stride + start
            parts.append(self.take(path, int(episode), wanted))
        return joined(parts)

    @abstractmethod
    def take(self, path: Path, episode: int, rows: np.ndarray) -> StoredRows:
        """Read rows of one episode.

        Args:
            path: the entry.
            episode: its number.
            rows: int64 ``[R]``, rows within the episode, in order.
        """


class WholeReader(FormatReader):
    """A format that reads whole episodes only; the last few stay in memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recent = lru_cache(maxsize=8)(self._conformed)

    @abstractmethod
    def whole(self, episode: int) -> Steps:
        """Read an episode."""

    def read(self, runs: Runs, paths: Sequence[Path]) -> Steps:
        """Read these entries of steps, episode by episode."""
        parts = []
        for episode, start, count in zip(runs.episodes, runs.starts, runs.counts, strict=True):
            steps = self._recent(int(episode))
            chosen = Steps(steps.length, {path: steps.columns[path] for path in paths})
            parts.append(
                chosen.take(torch.arange(int(count), device="cpu") * runs.stride + int(start))
            )
        columns = Steps.concat(parts).columns
        return Steps(len(runs), {path: self._own(path, columns[path]) for path in paths})

    def stored(self, path: Path, rows: Runs) -> StoredRows:
        """Not used: :meth:`read` reads."""
        raise NotImplementedError

    def _conformed(self, episode: int) -> Steps:
        """Read an episode and check it."""
        steps = self.schema.conform(self.whole(episode))
        if steps.length != self.lengths[episode]:
            raise ValueError(
                f"it has {steps.length} steps, and {self.lengths[episode]} according to its length."
            )
        return steps

    def _own(self, path: Path, column: Column) -> Column:
        """Copy what :meth:`Steps.take` did not, so that nobody changes the episodes in memory."""
        if isinstance(column, Objects):
            return Objects(deepcopy(column.items))
        if isinstance(column, Rows):
            return Rows([row.clone() for row in column.items])
        return column


def joined(parts: Sequence[StoredRows]) -> StoredRows:
    """Join rows of one entry."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, TextRows):
        return TextRows([text for part in parts for text in part.texts])  # type: ignore[union-attr]
    values = np.concatenate([part.values for part in parts])  # type: ignore[union-attr]
    if isinstance(first, DenseRows):
        return DenseRows(values)
    return RaggedRows(values, np.concatenate([part.shapes for part in parts]))  # type: ignore[union-attr]
