"""The format ``"folder"``: a folder of ordinary files per episode, which a person can look at.

Arrays are ``.npy`` files, images are PNG files, and objects are JSON texts. What is read equals what was
written, bit for bit, unless ``jpeg_quality`` is given.

Episode 12 of a data set is ``data-ID/chunk-000/episode-000012``, with a thousand episodes in a chunk. Of
an entry ``k`` with a shared ``("next", k)`` it has ``T + 1`` rows: those of ``k``, and the last of
``("next", k)``. Where the two disagree, it has all of both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from torchrl_mt.checks import check_integer_within
from torchrl_mt.data._store.steps import Path, Steps
from torchrl_mt.datasets._encoding.schema import EpisodeSchema, Field
from torchrl_mt.datasets._encoding.stored_columns import DenseRows, RaggedRows, StoredRows
from torchrl_mt.datasets._files.checksums import CheckedFiles, crcs_of_files
from torchrl_mt.datasets._files.entry_files import (
    EntryFiles,
    entry_name,
    read_rows,
    read_shapes,
    write_array,
    write_rows,
)
from torchrl_mt.datasets._files.episode_folder import EpisodeFolder, format_in, open_folder
from torchrl_mt.datasets._files.image_files import is_image, read_image, write_images
from torchrl_mt.datasets._files.readers import EpisodicReader, Runs
from torchrl_mt.datasets._files.writers import EncodedEpisode, FormatWriter
from torchrl_mt.datasets.registry import Format, Mode
from torchrl_mt.paths import inside

__all__ = ["FORMAT", "FolderReader", "FolderWriter"]

_CHUNK = 1000
_UNFINISHED = ".unfinished"


class FolderReader(EpisodicReader):
    """Reads a data set of ordinary files.

    Args:
        path: its folder.

    Raises:
        DatasetError: if it cannot be read; names the file.
    """

    def __init__(self, path: FilePath) -> None:
        header, self.data, self._episodes = open_folder(path.absolute())
        self._files = CheckedFiles(path.absolute(), self._episodes.checksums)
        self.options: dict[str, Any] = header.get("options", {})
        schema = EpisodeSchema.from_json(header["schema"])
        super().__init__(schema, self._episodes.lengths, self._episodes.own_next)
        self.identity = header["data"]
        self._decoded: dict[tuple[FilePath, str, int], np.ndarray] = {}
        """Images of what is being read, in case another entry has them as well."""

    def read(self, runs: Runs, paths: Sequence[Path]) -> Steps:
        """Read these entries of steps; an image that is in two of them is decoded once."""
        try:
            return super().read(runs, paths)
        finally:
            self._decoded.clear()

    def take(self, path: Path, episode: int, rows: np.ndarray) -> StoredRows:
        """Read rows of one episode."""
        folder = _folder_of(self.data, episode)
        entry = EntryFiles(self._files, folder, episode, entry_name(path))
        return self.read_entry(entry, self.schema.fields[path], rows)

    def read_entry(self, entry: EntryFiles, field: Field, rows: np.ndarray) -> StoredRows:
        """Read rows of one entry."""
        if field.dtype is not torch.uint8:
            return read_rows(entry, field, rows)
        if _is_image(field):
            values = np.empty((len(rows), *field.shape), dtype=np.uint8)
            for place, row in enumerate(rows.tolist()):
                values[place] = self._image(entry, row, field.shape)
            return DenseRows(values)
        if field.kind == "ragged":
            shapes = read_shapes(entry, field)
            if all(map(is_image, shapes.tolist())):
                images = [self._image(entry, row, shapes[row]) for row in rows.tolist()]
                values = np.concatenate([image.reshape(-1) for image in images])
                return RaggedRows(values, shapes[rows])
        return read_rows(entry, field, rows)

    def _image(self, entry: EntryFiles, row: int, shape: Sequence[int]) -> np.ndarray:
        key = entry.folder, entry.name, row
        image = self._decoded.get(key)
        if image is None:
            image = read_image(entry, row, shape, self.options.get("jpeg_quality"))
            if self.schema.shared:
                self._decoded[key] = image
        return image

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode."""
        return self._episodes.metadata(i)

    def was_replaced(self) -> bool:
        """Whether a writer has replaced the data set."""
        return not self.data.exists()


class FolderWriter(FormatWriter):
    """Writes a data set of ordinary files.

    Args:
        path: its folder.
        mode: see :func:`~torchrl_mt.datasets.open_episodes`.
        jpeg_quality: 1 to 100: write images as JPEG files of this quality, which are small and lossy.
            Images with four channels stay PNG files. None writes PNG files, or, with ``"append"``, what
            the data set has.

    Raises:
        ValueError: if ``jpeg_quality`` is out of range, or not that of the data set to append to.
        ImportError: when the first image is written, if Pillow is not installed; names the extra.
    """

    def __init__(self, path: FilePath, mode: Mode, *, jpeg_quality: int | None = None) -> None:
        super().__init__(path, mode)
        if jpeg_quality is not None:
            check_integer_within("jpeg_quality", jpeg_quality, 1, 100)
        self.open("folder", {"jpeg_quality": jpeg_quality}, {"jpeg_quality": None})

    def open(self, format: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
        """Open the folder, with the options that are given and those that are not."""
        self._folder = EpisodeFolder(self.path, format, self.mode, given, defaults)
        self.schema = self._folder.schema
        self.options = self._folder.options

    def write(self, episode: EncodedEpisode) -> None:
        """Write an episode aside, put it in its place, and count it."""
        data = self._folder.make()
        unfinished = data / _UNFINISHED
        place = _folder_of(data, self._folder.num_episodes)
        inside(data, place.relative_to(data), to_write=True)
        for leftover in (unfinished, place):  # Of a killed writer; it does not count.
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir()
        try:
            for path, stored in episode.columns.items():
                field = episode.schema.fields[path]
                self.write_entry(unfinished / entry_name(path), field, stored)
            crcs = crcs_of_files(unfinished)
            place.parent.mkdir(exist_ok=True)
            os.rename(unfinished, place)
            self._folder.commit(episode, crcs)
        except BaseException:
            for partial in (unfinished, place):
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def write_entry(self, base: FilePath, field: Field, stored: StoredRows) -> None:
        """Write all rows of one entry; ``base`` is its path without a suffix."""
        quality = self.options.get("jpeg_quality")
        if field.dtype is torch.uint8:
            if isinstance(stored, DenseRows) and _is_image(field):
                base.mkdir()
                write_images(base, stored.values, quality)
                return
            if isinstance(stored, RaggedRows) and all(map(is_image, stored.shapes.tolist())):
                base.mkdir()
                write_array(base / "shapes.npy", stored.shapes)
                ends = stored.shapes.prod(1).cumsum()
                flat = np.split(stored.values, ends[:-1])
                rows = zip(flat, stored.shapes.tolist(), strict=True)
                write_images(base, (values.reshape(shape) for values, shape in rows), quality)
                return
        write_rows(base, stored)

    def close(self) -> None:
        """Finish the data set; with ``overwrite``, put it in the place of what was there."""
        self._folder.finish()

    def abort(self) -> None:
        """Give up an ``overwrite``: what was there remains, and nothing else."""
        self._folder.abort()


def _is_image(field: Field) -> bool:
    """Whether the rows of an entry are images of one shape."""
    return field.kind == "dense" and field.dtype is torch.uint8 and is_image(field.shape)


def _folder_of(data: FilePath, episode: int) -> FilePath:
    """Return the folder of an episode."""
    return data / f"chunk-{episode // _CHUNK:03d}" / f"episode-{episode:06d}"


FORMAT = Format("folder", FolderReader, FolderWriter, lambda path: format_in(path) == "folder")
